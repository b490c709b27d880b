"""Commands of TensorRT: an engine for the GPU that is here."""

"""Commands of the CUDA engine: its least possible latency on a GPU, and its fastest tiles on the GPU that is here."""

"""Quantization: nodes, the fake-quant op, observers, range searches, policies and passes. It knows no architecture."""

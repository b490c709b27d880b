"""Quantization: nodes, the fake-quant op, observers, range searches, policies, passes. It knows no architecture."""

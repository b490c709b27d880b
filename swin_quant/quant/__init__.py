"""What quantization is: nodes, the fake-quant op, observers, range searches, policies. It knows no architecture."""

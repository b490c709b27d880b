"""ONNX files that anybody may have made: read within bounds, checked and described, for every engine that runs them."""

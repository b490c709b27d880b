"""ONNX with explicit Q/DQ: one exporter for TensorRT, ONNX Runtime and OpenVINO, and named rewrites of the graph."""

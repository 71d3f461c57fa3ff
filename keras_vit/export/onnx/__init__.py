"""A model as an ONNX file, for ONNX Runtime."""

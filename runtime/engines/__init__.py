"""What runs a graph: the protocol, ONNX Runtime and the key/value cache."""

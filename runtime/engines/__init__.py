"""What runs a graph on the host: the protocol, ONNX Runtime and the key/value cache."""

"""What runs a graph on the host: the protocol, ONNX Runtime, the key/value cache and attention masks."""

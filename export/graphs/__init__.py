"""The ONNX graphs: what they read and write, how they are traced, and passes over them."""

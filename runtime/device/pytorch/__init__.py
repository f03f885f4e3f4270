"""PyTorch as the engines of the graph step: it runs the ONNX files of a bundle on a CPU or a GPU."""

"""PyTorch as the engines of the graph step: it runs the ONNX files of a bundle on a CPU or a GPU.

Nothing else of the runtime imports torch. ``runtime.load.engines`` imports this package for bundles of the
target ``torch``.
"""

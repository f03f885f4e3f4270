"""TensorRT engines. The package is not named ``tensorrt``: it would hide the library of that name."""

"""Draft heads in TensorRT-LLM, as a plug-in: nothing of TensorRT-LLM is changed."""

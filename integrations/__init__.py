"""Draft heads in other programs: Transformers, vLLM, SGLang and TensorRT-LLM."""

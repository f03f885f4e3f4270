"""Draft heads in other programs: Transformers and vLLM."""

"""Draft heads in vLLM, as a plug-in: nothing of vLLM is changed."""

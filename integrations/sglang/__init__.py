"""Draft heads in SGLang, as a plug-in: nothing of SGLang is changed."""

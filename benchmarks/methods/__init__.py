"""Draft heads compared: tokens per step, speedup and identical outputs."""

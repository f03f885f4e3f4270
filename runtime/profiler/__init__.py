"""Measures speculative against plain decoding. Nothing that serves imports it."""

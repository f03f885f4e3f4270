"""Requests, the queue and the thread that decodes them together; completions of whole files."""

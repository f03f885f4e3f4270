"""OpenAI's interface, which stands before a running server."""

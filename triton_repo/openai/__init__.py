"""What stands before a running server: OpenAI's interface and the chat page."""

"""What people read in a terminal: completions, a conversation, and the options of sampling."""

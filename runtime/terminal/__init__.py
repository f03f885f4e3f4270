"""What people read in a terminal: completions and a conversation."""

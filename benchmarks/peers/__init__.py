"""Other engines, each in a process of its own, beside ours on the same weights and prompts."""

"""From a Hugging Face model and a draft head to an engine bundle."""

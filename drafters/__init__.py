"""Draft heads: small torch modules that read a backbone's hidden states and propose tokens."""

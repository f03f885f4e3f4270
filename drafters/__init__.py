"""Draft heads: small torch modules that read a target model's hidden states and propose tokens."""

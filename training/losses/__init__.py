"""Losses: what a draft head is trained on."""

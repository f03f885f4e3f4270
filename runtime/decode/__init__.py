"""Batches, one decode step, and its parts: target model, proposers, acceptance and sampling, budget."""

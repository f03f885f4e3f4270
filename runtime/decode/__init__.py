"""One decode step and what takes part in it: target model, acceptance, sampling, batch."""

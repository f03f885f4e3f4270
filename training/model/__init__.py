"""The frozen target model of a run, and the fresh draft heads that read it."""

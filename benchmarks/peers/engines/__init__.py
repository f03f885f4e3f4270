"""Every engine that ``benchmarks.peers`` compares: how its model is made and how it is run."""

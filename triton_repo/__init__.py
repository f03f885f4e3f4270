"""A Triton model repository for engine bundles, its launcher and its client."""

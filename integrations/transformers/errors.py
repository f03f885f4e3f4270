"""The error of what cannot be decoded with a draft head."""


class GenerateError(ValueError):
    """A model, head or argument that cannot be used; the message names it, what was expected, what came."""

"""The old name of ``integrations.transformers.hub``, which published heads import, for one release."""

from integrations.transformers.hub import generate_with

__all__ = ["generate_with"]

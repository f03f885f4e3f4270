"""The module that published heads import, under its old name for one release."""

from integrations.transformers.head import generate_with

__all__ = ["generate_with"]

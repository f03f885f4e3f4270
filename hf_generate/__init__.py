"""The old name of ``integrations.transformers``, for one release."""

from integrations.transformers.head import CTCHead, generate_with

__all__ = ["CTCHead", "generate_with"]

"""The old name of ``integrations.transformers``, for one release."""

from integrations.transformers.head import CTCHead
from integrations.transformers.hub import generate_with

__all__ = ["CTCHead", "generate_with"]

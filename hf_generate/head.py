"""The old name of ``integrations.transformers.head``, for one release."""

from integrations.transformers.head import CTCHead

__all__ = ["CTCHead"]

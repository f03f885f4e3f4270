"""The old name of ``integrations.vllm``, for one release."""

from integrations.vllm.plugin import register

__all__ = ["register"]

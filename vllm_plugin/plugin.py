"""The old name of ``integrations.vllm.plugin``, which installed entry points import, for one release."""

from integrations.vllm.plugin import register

__all__ = ["register"]

"""What TensorRT-LLM may be asked of a head."""

from typing import Any

from drafters.config import DrafterConfig

# Layouts of the context's keys and values that the draft model can read: one piece for every sequence.
ATTENTION_BACKEND = "VANILLA"
# Target models of which TensorRT-LLM gives the hidden states to a draft model, among those that are exported.
TARGET_MODEL_TYPES = ("llama", "qwen3", "qwen3_moe")


def serving_problem(head: DrafterConfig, spec_config: Any, mapping: Any) -> str | None:
    """Why a head cannot draft as it is asked to, or None.

    spec_config, mapping: TensorRT-LLM's speculative configuration, and how it divides the model
    """
    drafts = spec_config.max_draft_len
    if not 1 <= drafts <= head.num_frames:
        return f"max_draft_len: expected 1 to {head.num_frames}, the head's frames, got {drafts}"
    if spec_config.attention_backend != ATTENTION_BACKEND:
        return (
            f"attention_backend: expected {ATTENTION_BACKEND}, whose context is not paged, got "
            f"{spec_config.attention_backend!r}"
        )
    if mapping.pp_size > 1:
        return (
            "pipeline_parallel_size: expected 1, because the head shares the model's embedding and LM head, "
            f"got {mapping.pp_size}"
        )
    return None

"""What SGLang may be asked of a head."""

from typing import Any

from drafters.config import DrafterConfig

# Target models whose hidden states are handed over, with ``integrations.sglang.hooks`` the last layer's too.
TARGET_MODEL_TYPES = ("llama", "qwen3")


def target_problem(model_type: str) -> str | None:
    """Why SGLang cannot draft for a target model of this type, or None."""
    if model_type in TARGET_MODEL_TYPES:
        return None
    return (
        f"model_type: expected {' or '.join(TARGET_MODEL_TYPES)}, of which the plug-in for SGLang hands over "
        f"all hidden states, got {model_type!r}"
    )


def block_problem(head: DrafterConfig, block_size: int) -> str | None:
    """Why a head cannot fill blocks of this many tokens, the anchor and the drafts, or None."""
    if head.num_frames < 2:
        return f"num_frames: expected at least 2, for the anchor and one draft, got {head.num_frames}"
    if 2 <= block_size <= head.num_frames:
        return None
    return (
        f"speculative_num_draft_tokens: expected 2 to {head.num_frames}, the head's frames, got {block_size}"
    )


def lm_head_problem(lm_head: Any) -> str | None:
    """Why the chains cannot be found with a target model's LM head, or None."""
    weight = getattr(lm_head, "weight", None)
    if weight is None or not weight.is_floating_point() or weight.element_size() == 1:
        return "lm_head: expected the target model's in floating point, got one that is quantised"
    shard = getattr(lm_head, "shard_indices", None)
    if shard is not None and shard.num_added_elements:
        return f"lm_head: expected no added tokens, got {shard.num_added_elements}"
    return None

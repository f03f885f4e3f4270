"""What SGLang may be asked of a head."""

from typing import Any

from drafters.config import DrafterConfig

# Target models whose hidden states are handed over, with ``integrations.sglang.hooks`` the last layer's too.
TARGET_MODEL_TYPES = ("llama", "qwen3")
# Attention that masks a tree in passes of the algorithm DFLASH: SGLang's classes, and their option's values.
# Others take a mask for trees of a fixed number of children alone, which this algorithm rules out.
TREE_BACKENDS = {"FlashInferAttnBackend": "flashinfer", "TritonAttnBackend": "triton"}
# The one that masks trees with pages of any size.
TREE_BACKEND = "flashinfer"


def block_problem(head: DrafterConfig, block_size: int) -> str | None:
    """Why a head cannot fill blocks of this many tokens, the anchor and the drafts, or None."""
    if head.num_frames < 2:
        return f"num_frames: expected at least 2, for the anchor and one draft, got {head.num_frames}"
    if 2 <= block_size <= head.num_frames:
        return None
    return (
        f"speculative_num_draft_tokens: expected 2 to {head.num_frames}, the head's frames, got {block_size}"
    )


def tree_backend_problem(name: str, page_size: int) -> str | None:
    """Why a target model's attention cannot verify trees, or None.

    name: of its class in SGLang; page_size: tokens of a page of its cache
    """
    if name not in TREE_BACKENDS:
        return (
            f"attention_backend: expected {' or '.join(TREE_BACKENDS.values())}, which mask the drafts of a "
            f"tree, got {name}"
        )
    if page_size > 1 and TREE_BACKENDS[name] != TREE_BACKEND:
        return f"page_size: expected 1 for trees with triton, got {page_size}; {TREE_BACKEND} takes any"
    return None


def lm_head_problem(lm_head: Any) -> str | None:
    """Why the chains cannot be found with a target model's LM head, or None."""
    weight = getattr(lm_head, "weight", None)
    if weight is None or not weight.is_floating_point() or weight.element_size() == 1:
        return "lm_head: expected the target model's in floating point, got one that is quantised"
    shard = getattr(lm_head, "shard_indices", None)
    if shard is not None and shard.num_added_elements:
        return f"lm_head: expected no added tokens, got {shard.num_added_elements}"
    return None

"""What vLLM may be asked of a head."""

from typing import Any

from drafters.config import DrafterConfig


def serving_problem(head: DrafterConfig, speculative_config: Any, parallel_config: Any) -> str | None:
    """Why a head cannot draft as it is asked to, or None.

    speculative_config, parallel_config: vLLM's
    """
    drafts = speculative_config.num_speculative_tokens
    if not 1 <= drafts < head.num_frames:
        return (
            f"num_speculative_tokens: expected 1 to {head.num_frames - 1}, one fewer than the head's "
            f"{head.num_frames} frames, got {drafts}"
        )
    if not speculative_config.use_local_argmax_reduction:
        return (
            "use_local_argmax_reduction: expected true, because a draft is what a search finds in frames, "
            "got false"
        )
    if parallel_config.pipeline_parallel_size > 1:
        return (
            "pipeline_parallel_size: expected 1, because the head shares the model's embedding and LM head, "
            f"got {parallel_config.pipeline_parallel_size}"
        )
    return None

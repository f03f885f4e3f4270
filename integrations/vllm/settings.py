"""The plug-in's settings in a draft directory's ``config.json``, and checks of heads and options."""

from dataclasses import dataclass
from typing import Any, Self

from drafters.config import DrafterConfig, DrafterConfigError

# The key of our settings in config.json; the other keys are vLLM's.
KEY = "ctc_speculator"
DRAFTER_TYPES = ("ctc", "block")


class DraftError(ValueError):
    """A draft directory that cannot be used; the message is one line that names the field."""


@dataclass(frozen=True)
class DraftSettings:
    """head: the head's configuration; top_k: labels of a frame that the search reads"""

    head: DrafterConfig
    top_k: int

    @classmethod
    def read(cls, config: Any, directory: str) -> Self:
        """config: an object with vLLM's view of the directory's config.json.

        Raises DraftError for a directory of another program, or with a head that has no chains here.
        """
        file = f"{directory}/config.json"
        values = getattr(config, KEY, None)
        if not isinstance(values, dict) or set(values) != {"head", "top_k"}:
            raise DraftError(
                f"{file}: expected the key {KEY!r} that export/build_engines.py --target vllm writes"
            )
        try:
            head = DrafterConfig.from_dict(values["head"])
        except (DrafterConfigError, TypeError) as error:
            raise DraftError(f"{file}: {KEY}: {error}") from error
        problem = head_problem(head)
        if problem:
            raise DraftError(f"{file}: {KEY}: {problem}")
        return cls(head, int(values["top_k"]))


def head_problem(head: DrafterConfig) -> str | None:
    """Why a head cannot draft in vLLM, or None."""
    if head.trunk_type.borrows_layers:
        return (
            f"trunk: expected a head with passes of its own, got {head.trunk!r}, which runs through layers "
            "of the target model"
        )
    if head.drafter_type not in DRAFTER_TYPES:
        return f"drafter_type: expected {' or '.join(DRAFTER_TYPES)}, got {head.drafter_type!r}"
    if not head.trunk_type.attends:
        return f"trunk: expected 'attention', which reads the whole context, got {head.trunk!r}"
    return None


def model_problem(head: DrafterConfig, *, vocab_size: int, hidden_size: int, num_layers: int) -> str | None:
    """Why a head cannot draft for a target model of these sizes, or None."""
    for name, expected, got in (
        ("vocab_size", vocab_size, head.vocab_size),
        ("hidden_size", hidden_size, head.hidden_size),
        ("base_num_layers", num_layers, head.base_num_layers),
    ):
        if expected != got:
            made_for = f"another model{f', {head.base_model!r}' if head.base_model else ''}"
            return f"{name}: expected the model's {expected}, got {got}; the head was made for {made_for}"
    return None


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

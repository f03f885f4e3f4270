"""The served models, the names and types of their tensors, and why requests end.

Server and clients share this module, so it imports no engine. Names and meanings are those of the
TensorRT-LLM backend's ``ensemble`` model, whose clients therefore work unchanged. Our additions are
``messages``, ``template_options``, ``input_ids`` of the text models, ``logit_bias``, ``min_p``, ``raw``,
``add_special_tokens``, ``top_log_probs``, ``prompt_log_probs``, ``output_tokens``, ``token_scores``,
``prompt_scores``, ``acceptance_length``, ``num_steps``, ``num_cached_tokens``, ``num_drafted_tokens`` and
``num_accepted_tokens``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from runtime.core.errors import UserError

# An interface says whether prompts and completions are text or token ids.
TEXT, TOKENS = "text", "tokens"
MODEL, PLAIN_MODEL, TOKENS_MODEL = "ctc_llm", "ctc_llm_plain", "ctc_llm_tokens"
# The interface of every model.
MODELS = {MODEL: TEXT, PLAIN_MODEL: TEXT, TOKENS_MODEL: TOKENS}
# Why a request was refused, or ended with an error, in metrics and logs.
INVALID, UNAVAILABLE, CANCELLED, INTERNAL = "invalid", "unavailable", "cancelled", "internal"


@dataclass(frozen=True)
class TensorInfo:
    """One input or output of ``config.pbtxt``. A size of -1 accepts any number of elements."""

    name: str
    triton_type: str
    size: int = 1
    optional: bool = True

    @property
    def datatype(self) -> str:
        """The type's name in requests: ``BYTES`` for strings, else ``triton_type`` without its prefix."""
        return {"TYPE_STRING": "BYTES"}.get(self.triton_type, self.triton_type.removeprefix("TYPE_"))


PROMPTS = {
    TEXT: TensorInfo("text_input", "TYPE_STRING"),
    TOKENS: TensorInfo("input_ids", "TYPE_INT32", size=-1, optional=False),
}
# In place of ``text_input``: a conversation, and further variables of the chat template, each as JSON; or
# token ids.
OTHER_PROMPTS = (
    TensorInfo("messages", "TYPE_STRING"),
    TensorInfo("template_options", "TYPE_STRING"),
    TensorInfo("input_ids", "TYPE_INT32", size=-1),
)
OPTIONS = (
    TensorInfo("max_tokens", "TYPE_INT32"),
    TensorInfo("stop_words", "TYPE_STRING", size=-1),
    TensorInfo("end_id", "TYPE_INT32"),
    TensorInfo("temperature", "TYPE_FP32"),
    TensorInfo("top_k", "TYPE_INT32"),
    TensorInfo("top_p", "TYPE_FP32"),
    TensorInfo("min_p", "TYPE_FP32"),
    TensorInfo("repetition_penalty", "TYPE_FP32"),
    TensorInfo("presence_penalty", "TYPE_FP32"),
    TensorInfo("frequency_penalty", "TYPE_FP32"),
    TensorInfo("logit_bias", "TYPE_STRING"),
    TensorInfo("guided_decoding_guide_type", "TYPE_STRING"),
    TensorInfo("guided_decoding_guide", "TYPE_STRING"),
    TensorInfo("seed", "TYPE_UINT64"),
    TensorInfo("stream", "TYPE_BOOL"),
    TensorInfo("raw", "TYPE_BOOL"),
    TensorInfo("add_special_tokens", "TYPE_BOOL"),
    TensorInfo("exclude_input_in_output", "TYPE_BOOL"),
    TensorInfo("return_log_probs", "TYPE_BOOL"),
    TensorInfo("top_log_probs", "TYPE_INT32"),
    TensorInfo("prompt_log_probs", "TYPE_BOOL"),
    TensorInfo("num_return_sequences", "TYPE_INT32"),
    TensorInfo("beam_width", "TYPE_INT32"),
    TensorInfo("num_draft_tokens", "TYPE_INT32"),
    TensorInfo("use_draft_logits", "TYPE_BOOL"),
    TensorInfo("return_context_logits", "TYPE_BOOL"),
    TensorInfo("return_generation_logits", "TYPE_BOOL"),
    TensorInfo("return_perf_metrics", "TYPE_BOOL"),
    TensorInfo("return_num_input_tokens", "TYPE_BOOL"),
    TensorInfo("return_num_output_tokens", "TYPE_BOOL"),
    TensorInfo("bad_words", "TYPE_STRING", size=-1),
    TensorInfo("pad_id", "TYPE_INT32"),
    TensorInfo("length_penalty", "TYPE_FP32"),
)
COMPLETIONS = {
    TEXT: TensorInfo("text_output", "TYPE_STRING", size=-1),
    TOKENS: TensorInfo("output_ids", "TYPE_INT32", size=-1),
}
STATISTICS = (
    TensorInfo("cum_log_probs", "TYPE_FP32"),
    TensorInfo("output_log_probs", "TYPE_FP32", size=-1),
    TensorInfo("output_tokens", "TYPE_STRING", size=-1),
    TensorInfo("token_scores", "TYPE_STRING"),
    TensorInfo("prompt_scores", "TYPE_STRING"),
    TensorInfo("sequence_index", "TYPE_INT32"),
    TensorInfo("num_input_tokens", "TYPE_INT32"),
    TensorInfo("num_cached_tokens", "TYPE_INT32"),
    TensorInfo("num_output_tokens", "TYPE_INT32"),
    TensorInfo("num_steps", "TYPE_INT32"),
    TensorInfo("num_drafted_tokens", "TYPE_INT32"),
    TensorInfo("num_accepted_tokens", "TYPE_INT32"),
    TensorInfo("acceptance_length", "TYPE_FP32"),
    TensorInfo("finish_reason", "TYPE_STRING"),
)
# Stands for a log-probability of minus infinity, which JSON lacks.
LEAST_LOG_PROB = -9999.0
NUMPY_TYPES: dict[str, Any] = {
    "TYPE_STRING": np.object_,
    "TYPE_INT32": np.int32,
    "TYPE_FP32": np.float32,
    "TYPE_UINT64": np.uint64,
    "TYPE_BOOL": np.bool_,
}
# Clients of the TensorRT-LLM backend may send these inputs, but only with these values. ``pad_id``,
# ``length_penalty``, ``return_num_input_tokens`` and ``return_num_output_tokens`` may have any value and are
# ignored: nothing is padded, a length penalty only matters among beams, and both counts are always returned.
ONLY: dict[str, int] = {
    "num_return_sequences": 1,
    "beam_width": 1,
    "num_draft_tokens": 0,
    "use_draft_logits": False,
    "return_context_logits": False,
    "return_generation_logits": False,
    "return_perf_metrics": False,
}


def inputs_of(interface: str) -> tuple[TensorInfo, ...]:
    return (PROMPTS[interface], *(OTHER_PROMPTS if interface == TEXT else ()), *OPTIONS)


def outputs_of(interface: str) -> tuple[TensorInfo, ...]:
    return (COMPLETIONS[interface], *STATISTICS)


def check_tensors(config: Mapping[str, Any], interface: str) -> None:
    """Raise UserError unless a model configuration, as parsed JSON, has exactly this interface's tensors."""
    for kind, infos in (("input", inputs_of(interface)), ("output", outputs_of(interface))):
        expected = {info.name: (info.triton_type, [info.size]) for info in infos}
        actual = {t["name"]: (t["data_type"], [int(size) for size in t["dims"]]) for t in config[kind]}
        for name in sorted(expected.keys() | actual.keys()):
            if expected.get(name) != actual.get(name):
                raise UserError(
                    f"config.pbtxt: {kind} {name} must be {expected.get(name, 'absent')}, "
                    f"got {actual.get(name, 'none')}"
                )

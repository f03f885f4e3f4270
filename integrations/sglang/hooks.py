"""What is changed around functions of SGLang where they meet a draft model of ours.

All of them call the original for other draft models. Their arguments are SGLang's: the original function, and
what it is called with.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from integrations.draft_directory import ARCHITECTURE
from integrations.sglang import trees

WORKER = "sglang.srt.speculative.dflash_worker_v2.DFlashWorkerV2"
VERIFY_INPUT = "sglang.srt.speculative.dflash_info.DFlashVerifyInput"
GRAMMAR_TREE = "sglang.srt.speculative.spec_utils.GrammarTree"
GRAPH_RUNNER = "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner"
FINAL_NORM = "sglang.srt.layers.layer_boundary.residual.batch.final_norm"
# Decoders, and the models around them that are told which layers to hand over.
DECODERS = ("sglang.srt.models.llama.LlamaModel", "sglang.srt.models.qwen3.Qwen3Model")
MODELS = ("sglang.srt.models.llama.LlamaForCausalLM", "sglang.srt.models.qwen3.Qwen3ForCausalLM")
# The attribute of a decoder whose last layer is to be handed over.
WANTS_LAST = "ctc_speculator_wants_last_layer"


def is_ours(worker: Any) -> bool:
    return type(worker.draft_model).__name__ == ARCHITECTURE


class PassDrafts:
    """Copies the drafts of a captured pass to where the worker reads them.

    out: [largest batch * drafts of a block] int64; parents: as many, of the drafts of trees
    """

    def __init__(self, *, block_size: int, max_batch: int, device: Any):
        self.block_size = block_size
        self.out = torch.zeros(max_batch * (block_size - 1), dtype=torch.int64, device=device)
        self.parents = torch.zeros_like(self.out)

    def __call__(self, hidden_states: Tensor, input_ids: Tensor | None = None) -> None:
        rows = hidden_states.view(-1, self.block_size, hidden_states.shape[-1])[:, 1:].flatten(0, 1)
        for found, column in zip((self.out, self.parents), rows.unbind(1), strict=False):
            found[: len(rows)].copy_(column)


def share_target(worker: Any, *args: Any, **kwargs: Any) -> None:
    """Before graphs are captured: the draft model gets the target model's LM head, and room for requests."""
    if is_ours(worker):
        runner = worker.model_runner
        worker.draft_model.attach(
            runner.model,
            model_config=runner.model_config,
            num_requests=runner.req_to_token_pool.req_to_token.shape[0],
        )


def build_sampler(original: Callable[..., Any], worker: Any) -> Any:
    """In a captured pass the drafts are found already, and need no LM head."""
    if not is_ours(worker):
        return original(worker)
    from sglang.srt.runtime_context import get_exec

    sizes = get_exec().graph.cuda_graph_config.decode.bs
    return PassDrafts(block_size=worker.block_size, max_batch=max(sizes), device=worker.device)


def sample(original: Callable[..., Any], worker: Any, *args: Any, **kwargs: Any) -> Any:
    """The same in a pass that is not captured, of which the worker hands over the rows of drafts."""
    if not is_ours(worker):
        return original(worker, *args, **kwargs)
    drafts, *parents = kwargs["hidden_states"].unbind(1)
    if parents:
        trees.keep_parents(parents[0])
    return drafts


def note_requests(original: Callable[..., Any], worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Remember whose tokens a step has, until its context is written."""
    worker.ctc_speculator_requests = batch.req_pool_indices
    return trees.run_step(original, worker, batch, *args, **kwargs)


def keep_last(original: Callable[..., Any], worker: Any, *args: Any, **kwargs: Any) -> Any:
    """When a step's context is written, keep each request's last token of it, from which frames begin.

    A prompt's part comes with the lengths of the parts, a verified block with the numbers of accepted tokens.
    """
    lengths, accepted = kwargs.get("extend_lens"), kwargs.get("commit_lens")
    if accepted is not None:
        kwargs["target_hidden"] = trees.path_first(kwargs["target_hidden"])
    result = original(worker, *args, **kwargs)
    features = kwargs["target_hidden"]
    if not is_ours(worker) or not features.numel():
        return result
    if accepted is not None:
        starts = torch.arange(len(accepted), device=features.device) * worker.block_size
        last = starts + accepted.to(features.device) - 1
    elif lengths is not None:
        last = lengths.to(features.device).cumsum(0) - 1
    else:
        return result
    worker.draft_model.keep_last(features[last.long()], worker.ctc_speculator_requests.long())
    return result


# Where the running decoder's last layer goes: SGLang hands over a layer's output as the next layer's input,
# and nothing follows the last layer but the final norm.
_found: list[list[Tensor]] = []


def want_last(original: Callable[..., Any], model: Any, layer_ids: Any) -> Any:
    """When a target model is told which layers to hand over: note whether the last one is among them."""
    result = original(model, layer_ids)
    setattr(model.model, WANTS_LAST, model.config.num_hidden_layers - 1 in layer_ids)
    return result


def hand_over_last(original: Callable[..., Any], decoder: Any, *args: Any, **kwargs: Any) -> Any:
    """Add the output of the last layer, before the final norm, to those that a decoder hands over."""
    if not getattr(decoder, WANTS_LAST, False):
        return original(decoder, *args, **kwargs)
    _found.append([])
    try:
        result = original(decoder, *args, **kwargs)
    finally:
        found = _found.pop()
    hidden, others = result if isinstance(result, tuple) else (result, [])
    others.extend(found)
    return hidden, others


def capture_last(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The final norm of a decoder whose last layer is wanted."""
    if not _found or kwargs.get("capture") is not None:
        return original(*args, **kwargs)
    found = _found[-1]
    return original(*args, **{**kwargs, "capture": lambda hidden, **_: found.append(hidden.clone())})

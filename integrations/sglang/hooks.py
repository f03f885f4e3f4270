"""What is changed around functions of SGLang where they meet a draft model of ours.

A step verifies a chain of drafts as SGLang's worker does, or a tree in its place. The draft pass returns the
tokens of a tree and their parents. SGLang's verification of trees does the rest, as its n-gram worker uses
it: ``NgramVerifyInput`` with the tree's mask, ``eagle_sample``, which walks the tree, and the copy of the
accepted nodes' keys and values to the front of the block. The worker goes on as after a chain, because its
rows of hidden states and of logits are brought into the order of the path.

All hooks call the original for other draft models. Their arguments are SGLang's: the original function, and
what it is called with.
"""

import copy
from collections.abc import Callable
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.tree_search import ancestors_of
from integrations.draft_directory import ARCHITECTURE, TREE, DraftError
from integrations.sglang.settings import tree_backend_problem

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
# The attribute of a model runner whose passes verify trees.
VERIFIES_TREES = "ctc_speculator_verifies_trees"
# What the worker's input of a verify pass has beside SGLang's input of a tree, and its functions read.
CARRIED = ("capture_hidden_mode", "kv_loc_plan", "kv_loc_cols", "live_seq_lens_cpu")
# The steps that are running. Functions that are not the worker's find theirs here.
_running: list["Step"] = []


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
        keep_parents(parents[0])
    return drafts


def note_requests(original: Callable[..., Any], worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Remember whose tokens a step has, until its context is written."""
    worker.ctc_speculator_requests = batch.req_pool_indices
    return run_step(original, worker, batch, *args, **kwargs)


def keep_last(original: Callable[..., Any], worker: Any, *args: Any, **kwargs: Any) -> Any:
    """When a step's context is written, keep each request's last token of it, from which frames begin.

    A prompt's part comes with the lengths of the parts, a verified block with the numbers of accepted tokens.
    """
    lengths, accepted = kwargs.get("extend_lens"), kwargs.get("commit_lens")
    if accepted is not None:
        kwargs["target_hidden"] = path_first(kwargs["target_hidden"])
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


class Step:
    """A step of B requests whose blocks are a root and N drafts.

    parents: [B, N] int64 of a draft pass that was not captured; a captured one leaves them with its sampler
    tree: SGLang's input of the verify pass
    path: [B * (N + 1)] int64, once drafts are accepted: the rows of the blocks, those of the paths first
    """

    tree: Any = None
    parents: Tensor | None = None
    path: Tensor | None = None

    def __init__(self, worker: Any, batch: Any):
        self.worker, self.batch = worker, batch

    @cached_property
    def ancestors(self) -> Tensor:
        """[B, N + 1, N + 1] bool, whether node j is i or an ancestor of i."""
        width, parents = self.worker.block_size, self.parents
        if parents is None:
            drafts = len(self.batch.seq_lens) * (width - 1)
            parents = self.worker._draft_sampler.parents[:drafts].view(-1, width - 1)
        nodes = torch.arange(width, device=parents.device)
        return ancestors_of(F.pad(parents, (1, 0), value=-1), nodes, max_depth=width)

    @cached_property
    def links(self) -> dict[str, Tensor]:
        """How SGLang walks the trees, by the names of ``NgramVerifyInput``."""
        from sglang.kernels.ops.speculative.reconstruct_tree import reconstruct_indices_from_tree_mask_func

        shape = self.ancestors.shape[:2]
        names = ("positions", "retrieve_index", "retrieve_next_token", "retrieve_next_sibling")
        links = {name: torch.empty(shape, dtype=torch.int64, device=self.ancestors.device) for name in names}
        links["positions"] = links["positions"].flatten()
        reconstruct_indices_from_tree_mask_func(
            self.ancestors.flatten(), self.batch.seq_lens, *links.values(), *shape
        )
        return links


def drafts_trees(worker: Any) -> bool:
    """Whether a worker has a draft model of ours that drafts trees."""
    return getattr(worker.draft_model, "shape", None) == TREE


def allow_trees(worker: Any, *args: Any, **kwargs: Any) -> None:
    """Before anything is captured: note that the target model verifies trees.

    Raises DraftError where its attention cannot.
    """
    if not drafts_trees(worker):
        return
    from sglang.srt.speculative.dflash_utils import resolve_dflash_verify_mask_policy

    name, _ = resolve_dflash_verify_mask_policy(worker.model_runner.attn_backend)
    problem = tree_backend_problem(name, worker.page_size)
    if problem:
        raise DraftError(f"draft model: {problem}")
    setattr(worker.model_runner, VERIFIES_TREES, True)


def capture_tree(original: Callable[..., Any], runner: Any, num_tokens: int) -> Any:
    """The input with which the target model's passes are captured: one with a mask."""
    if not getattr(runner.model_runner, VERIFIES_TREES, False):
        return original(runner, num_tokens)
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
    from sglang.srt.speculative.ngram_info import NgramVerifyInput

    found = NgramVerifyInput(
        custom_mask=runner.buffers.custom_mask, draft_token_num=runner.captured_req_width
    )
    found.capture_hidden_mode = CaptureHiddenMode.FULL
    return found


def run_step(original: Callable[..., Any], worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """A worker's whole step."""
    if not drafts_trees(worker):
        return original(worker, batch, *args, **kwargs)
    _running.append(Step(worker, batch))
    try:
        return original(worker, batch, *args, **kwargs)
    finally:
        _running.pop()


def keep_parents(parents: Tensor) -> None:
    """Note the parents [B * N] that a pass has drafted which was not captured."""
    step = _running[-1]
    step.parents = parents.view(len(step.batch.seq_lens), -1)


def link_grammar(original: Callable[..., Any], cls: Any, draft_tokens: Tensor) -> Any:
    """The drafts that a grammar is asked about; the worker takes them for a chain."""
    if not _running:
        return original(cls, draft_tokens)
    links = _running[-1].links
    return cls.from_device(links["retrieve_next_token"], links["retrieve_next_sibling"], draft_tokens)


def verify_tree(
    original: Callable[..., Any], chain: Any, batch: Any, target_worker: Any, **kwargs: Any
) -> Any:
    """Prepare the verify pass: of a tree with the drafts of what the worker takes for a chain."""
    if not _running:
        return original(chain, batch, target_worker, **kwargs)
    from sglang.srt.speculative.ngram_info import NgramVerifyInput

    step = _running[-1]
    # The worker has added a whole block to every length.
    size = chain.draft_token_num * batch.seq_lens_sum
    tree = NgramVerifyInput(
        draft_token=chain.draft_token,
        custom_mask=full_mask(step.ancestors, batch.seq_lens, size),
        draft_token_num=chain.draft_token_num,
        **step.links,
    )
    for name in CARRIED:
        setattr(tree, name, getattr(chain, name))
    step.tree = tree
    return original(tree, batch, target_worker, **kwargs)


def full_mask(ancestors: Tensor, lengths: Tensor, size: int) -> Tensor:
    """The mask of B requests one after another: of each node its whole context, then the nodes, [size] bool.

    ancestors: [B, W, W] bool; lengths: [B] int64 of the contexts; size: at least W * (length + W) of all
    requests together, known without a copy from the device. What is behind their masks means nothing.
    """
    width = ancestors.shape[1]
    keys = lengths + width
    starts = (keys * width).cumsum(0) - keys * width + lengths
    nodes = torch.arange(width, device=ancestors.device)
    rows = starts.unsqueeze(1) + nodes * keys.unsqueeze(1)
    mask = torch.ones(size, dtype=torch.bool, device=ancestors.device)
    mask[rows.unsqueeze(2) + nodes] = ancestors
    return mask


def need_logits(original: Callable[..., Any], worker: Any, *args: Any, **kwargs: Any) -> Any:
    """A tree is walked with the logits, which a chain can do without when decoding is greedy."""
    return False if drafts_trees(worker) else original(worker, *args, **kwargs)


def accept_path(original: Callable[..., Any], worker: Any, **kwargs: Any) -> Any:
    """Accept drafts: the path that SGLang finds in the tree, as the worker's accepted part of a chain."""
    if not drafts_trees(worker):
        return original(worker, **kwargs)
    from sglang.srt.speculative.eagle_utils import eagle_sample
    from sglang.srt.speculative.spec_utils import move_accept_tokens_to_target_kvcache

    step, logits = _running[-1], kwargs["next_token_logits"]
    batch = copy.copy(step.batch)
    # The worker has added these to the logits already.
    batch.sampling_info = copy.copy(batch.sampling_info)
    batch.sampling_info.acc_additive_penalties = batch.sampling_info.logit_bias = None
    predicted, accepted, path = eagle_sample(step.tree, batch, SimpleNamespace(next_token_logits=logits))
    allocator = worker.target_worker.get_memory_pool()[1]
    move_accept_tokens_to_target_kvcache(step.batch, path, accepted - 1, allocator)
    rows = torch.arange(path.numel(), device=path.device)
    step.path = torch.where(path.flatten() >= 0, path.flatten().long(), rows)
    if step.batch.return_logprob or batch.sampling_info.sampling_mask_batch_indices is not None:
        logits.copy_(logits[step.path])
    tokens = predicted[step.path].long().view(path.shape)
    last = tokens.gather(1, accepted.long().unsqueeze(1) - 1).squeeze(1)
    return accepted - 1, accepted.int(), last, tokens, None


def path_first(features: Tensor) -> Tensor:
    """The hidden states [B * (N + 1), F*H] of a verify pass, those of the path first in each block."""
    return features[_running[-1].path] if _running else features

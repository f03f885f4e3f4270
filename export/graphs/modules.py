"""The torch modules that are traced: a target model, draft heads and streams behind their graph contracts.

Every ``forward`` takes the contract's inputs by name, and the cache's keys and values in their order.
"""

import copy
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from drafters.autoregressive import AutoregressiveDrafter
from drafters.features import FeatureTap
from drafters.lattice import lattice_tensors
from drafters.layers import AttentionFunction, pick
from drafters.parallel import ParallelDrafter, last_context
from drafters.streaming import StreamFrames
from drafters.target_models import output_logits
from export.graphs.layers import (
    ATTENTION_OPS,
    ScatterCache,
    attention_masks,
    layer_masks,
    register_attention,
    register_experts,
)


class TargetModelGraph(nn.Module):
    """One pass of a causal LM: logits, their argmax, and the features for a draft head.

    context: the positions that are served
    attention: a name of ``export.options.ATTENTION``
    The model attends, and computes experts, in the forms that are exported until ``close``.
    """

    def __init__(self, model: PreTrainedModel, layer_ids: tuple[int, ...], context: int, attention: str):
        super().__init__()
        self.model = model
        self._context = context
        self._tap = FeatureTap(model, layer_ids)
        self._own_experts = model.config._experts_implementation
        model.set_attn_implementation(register_attention(attention))
        model.set_experts_implementation(register_experts())

    def close(self) -> None:
        """Restore the model, except its form of attention, which every user of the model sets anyway."""
        self._tap.remove()
        self.model.set_experts_implementation(self._own_experts)

    def forward(self, inputs: dict[str, Tensor], past: list[Tensor]) -> tuple[Tensor, ...]:
        cache = ScatterCache(past, inputs["write_index"])
        hidden = self.model.get_decoder()(
            input_ids=inputs["input_ids"],
            position_ids=inputs["position_ids"],
            attention_mask=attention_masks(self.model.config, inputs, self._context),
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        # Only these positions go through the LM head, the widest matrix of a small model.
        logits = output_logits(self.model, pick(hidden, inputs["logit_indices"]))
        return logits, logits.argmax(-1), self._tap.take(), *cache.present


class ParallelGraph(nn.Module):
    """One pass of a parallel drafter: the lattice of its frames."""

    def __init__(self, drafter: ParallelDrafter, width: int, attention: str):
        super().__init__()
        self.drafter = drafter
        self.width = width
        self._attend = _attention(drafter, attention)
        drafter.tabulate()

    def forward(self, inputs: dict[str, Tensor], past: list[Tensor]) -> tuple[Tensor, ...]:
        cache = ScatterCache(past, inputs["write_index"]) if past else None
        anchors = inputs.get("anchor_ids")
        hidden = self.drafter(
            inputs["features"],
            inputs["context_position_ids"],
            anchors,
            inputs["frame_position_ids"],
            inputs.get("attn_mask"),
            cache=cache,
            attend=self._attend,
        )
        anchors = None if anchors is None else anchors.squeeze(1)
        lattice = lattice_tensors(self.drafter, hidden, anchors, width=self.width)
        return *lattice.present().values(), *(() if cache is None else cache.present)


class AutoregressiveGraph(nn.Module):
    """One pass of an autoregressive drafter: the best children of every node, and their states."""

    def __init__(self, drafter: AutoregressiveDrafter, width: int, attention: str):
        super().__init__()
        self.drafter = drafter
        self.width = width
        drafter.tabulate()
        self._attend = _attention(drafter, attention)
        if drafter.heads_per_depth:
            self._attend = _with_spare_query(self._attend)

    def forward(self, inputs: dict[str, Tensor], past: list[Tensor]) -> tuple[Tensor, ...]:
        cache = ScatterCache(past, inputs["write_index"]) if past else None
        hidden, states = self.drafter(inputs, cache=cache, attend=self._attend)
        tokens, log_probs = self.drafter.best_children(hidden, self.width)
        return tokens, log_probs, states, *(() if cache is None else cache.present)


def _attention(drafter: ParallelDrafter | AutoregressiveDrafter, kind: str) -> AttentionFunction:
    operator, scale = ATTENTION_OPS[kind], drafter.config.head_dim**-0.5
    return lambda query, key, value, mask: operator(query, key, value, mask, scale)


def _with_spare_query(attend: AttentionFunction) -> AttentionFunction:
    """Attention that works without queries: ONNX Runtime needs one, and Hydra++ drafts without any."""

    def spare(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        batch, heads, _, size = query.shape
        query = torch.cat((query, query.new_zeros(batch, heads, 1, size)), dim=2)
        mask = torch.cat((mask, mask.new_ones(batch, 1, 1, mask.shape[-1])), dim=2)
        return attend(query, key, value, mask)[:, :, :-1]

    return spare


class StreamGraph(nn.Module, ABC):
    """A pass in which the streams of a head run through the target model's upper layers.

    context: the positions that are served
    width: labels of a frame
    attention: a name of ``export.options.ATTENTION``
    """

    def __init__(self, head: StreamFrames, context: int, width: int, attention: str):
        super().__init__()
        self.head = head
        # Torch traces only weights that a module owns, and the head does not own these.
        self.model = head.model
        self.upper_layers = head.upper_layers
        self.context = context
        self.width = width
        self._attention = attention
        head.tabulate()

    def forward(self, inputs: dict[str, Tensor], past: list[Tensor]) -> tuple[Tensor, ...]:
        """Run the pass with attention and experts in the forms that are exported."""
        own_experts = self.model.config._experts_implementation
        self.model.set_attn_implementation(register_attention(self._attention))
        self.model.set_experts_implementation(register_experts())
        try:
            return self.run_pass(inputs, past)
        finally:
            self.model.set_experts_implementation(own_experts)

    @abstractmethod
    def run_pass(self, inputs: dict[str, Tensor], past: list[Tensor]) -> tuple[Tensor, ...]:
        """The outputs of the graph's contract, in order."""


class StreamCache(ScatterCache):
    """A cache whose upper layers compute fewer rows than they write.

    written_rows: [B, W] int64, the computed row of every position that is written; None while rows and
        positions are the same
    """

    written_rows: Tensor | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        if self.written_rows is not None:
            index = self.written_rows[:, None, :, None]
            shape = (-1, key_states.shape[1], -1, key_states.shape[3])
            key_states, value_states = (
                states.gather(2, index.expand(shape)) for states in (key_states, value_states)
            )
        return super().update(key_states, value_states, layer_idx)


class StreamingGraph(StreamGraph):
    """A pass of a target model with the streams of a head, which verifies a tree and drafts the next one.

    The lower layers read all nodes. There early-exit logits prune the tree, and the nodes of
    ``stream_indices`` start their streams. Kept nodes and streams pass the upper layers together. In the
    cache of every layer node j is at ``write_index + j``, whether it is kept or not, and the streams follow
    the N nodes, where the next pass overwrites them. No mask shows a node that was dropped, so its keys and
    values in the upper layers may be anything.
    """

    def __init__(self, head: StreamFrames, context: int, width: int, attention: str):
        super().__init__(head, context, width, attention)
        self.lower_layers = _lower_layers(head.model, head.config.num_layers)

    def run_pass(self, inputs: dict[str, Tensor], past: list[Tensor]) -> tuple[Tensor, ...]:
        head, config = self.head, self.model.config
        ids, positions, mask = inputs["input_ids"], inputs["position_ids"], inputs["attn_mask"]
        start = inputs["write_index"]
        cache = StreamCache(past, start)
        lower = self.lower_layers(
            input_ids=ids,
            position_ids=positions,
            attention_mask=attention_masks(config, inputs, self.context),
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state

        count = ids.shape[1]
        columns = start[:, None, None] + torch.arange(count, device=ids.device)
        ancestors = mask[:, 0].gather(2, columns.expand(-1, count, -1))
        exit_logits = head.exit_logits(pick(lower, inputs["scored_indices"]))
        kept, places = keep_nodes(exit_logits, ids, inputs["parents"], ancestors, inputs["kept_places"])

        main, origins = pick(lower, kept), inputs["stream_indices"]
        streams = head.start_streams(pick(main, origins)).flatten(1, 2)  # [B, M*T, H]
        frames = head.config.num_frames
        # [M*T]: 1 to T, for one node after another.
        numbers = torch.arange(1, frames + 1).expand(origins.shape[1], -1).flatten()
        kept_positions = positions.gather(1, kept)
        stream_positions = kept_positions.gather(1, _each(origins, frames)) + numbers
        kept_mask = pick(mask[:, 0], kept)
        stream_mask = pick(kept_mask, _each(origins, frames))
        stream_mask = stream_mask | _own_streams(numbers, start + count, mask.shape[-1])
        masks = layer_masks(
            config,
            torch.cat((kept_mask, stream_mask), dim=1).unsqueeze(1),
            positions=torch.cat((kept_positions, stream_positions), dim=1),
            written=torch.cat((positions, stream_positions), dim=1),
            write_index=start,
            context=self.context,
        )
        rows_of_streams = main.shape[1] + torch.arange(numbers.shape[0], device=ids.device)
        cache.written_rows = torch.cat((places, rows_of_streams.expand(ids.shape[0], -1)), dim=1)
        all_positions = torch.cat((kept_positions, stream_positions), dim=1)
        main, hidden = head.run_streams(main, streams, all_positions, numbers, masks, cache)

        logits = head.main_logits(pick(main, origins))
        next_tokens = logits.argmax(-1)
        hidden = hidden.unflatten(1, (-1, frames)).flatten(0, 1)  # [B*M, T, H]
        hidden = head.fuse(hidden, next_tokens.flatten())
        lattice = lattice_tensors(head, hidden, next_tokens.flatten(), width=self.width)
        tables = (table.unflatten(0, next_tokens.shape) for table in lattice.present().values())
        return kept, logits, next_tokens, *tables, *cache.present


def _lower_layers(model: Any, num_upper: int) -> Any:
    """The model's decoder without its last layers and its last norm; all modules are the model's own."""
    decoder = model.get_decoder()
    lower = copy.copy(decoder)
    lower._modules = dict(decoder._modules)
    lower.layers = decoder.layers[:-num_upper]
    lower.norm = nn.Identity()
    return lower


def _each(index: Tensor, times: int) -> Tensor:
    """Every entry several times: [B, M] -> [B, M*T]."""
    return index.unsqueeze(-1).expand(-1, -1, times).flatten(1)


def _own_streams(numbers: Tensor, first: Tensor, capacity: int) -> Tensor:
    """[B, M*T, S] bool: a stream sees the streams of its own node, up to itself.

    first: [B] int64, the position in the cache of the first stream
    """
    own = first.unsqueeze(1) + torch.arange(numbers.shape[0])  # [B, M*T]
    columns = torch.arange(capacity)
    return (columns <= own.unsqueeze(-1)) & (columns > (own - numbers).unsqueeze(-1))


class StreamHeadGraph(StreamGraph):
    """The pass of a parallel drafter (``drafters.parallel``) whose frames are streams.

    The pass that verifies hands on the main stream at layer N - N_s, as the features of a head. Here it goes
    through the upper layers again, beside the streams of the last token alone, and this graph has a cache of
    these layers' keys and values of its own. That is N_s more layers for every accepted token, and T rows in
    place of T for every node of a tree.
    """

    def run_pass(self, inputs: dict[str, Tensor], past: list[Tensor]) -> tuple[Tensor, ...]:
        head, start, main = self.head, inputs["write_index"], inputs["features"]
        context, following = inputs["context_position_ids"], inputs["frame_position_ids"]
        count, frames = main.shape[1], following.shape[1]
        last = last_context(main, context, following[:, :1])
        numbers = torch.arange(1, frames + 1, device=main.device)
        # A slice would be shorter, but TensorRT for RTX 1.7 cannot tell that it has as many rows as the mask.
        streams = head.start_streams(last)[:, 0].index_select(1, numbers - 1)
        positions = torch.cat((context, following), dim=1)

        # In the cache the streams follow the new tokens. A row sees itself and all rows written before it.
        # The mask of the streams hides the padding between tokens and streams.
        own = start.unsqueeze(1) + torch.arange(count + frames, device=main.device)  # [B, A + T]
        columns = torch.arange(past[0].shape[2], device=main.device)
        earlier = columns <= own.unsqueeze(-1)
        mask = torch.cat((earlier[:, :count], inputs["attn_mask"][:, 0] & earlier[:, count:]), dim=1)
        masks = layer_masks(
            self.model.config,
            mask.unsqueeze(1),
            positions=positions,
            written=positions,
            write_index=start,
            context=self.context,
        )
        cache = ScatterCache(past, start, first_layer=head.config.base_num_layers - head.config.num_layers)
        hidden = head.run_streams(main, streams, positions, numbers, masks, cache)[1]

        anchors = inputs["anchor_ids"].squeeze(1) if "anchor_ids" in inputs else None
        hidden = head.fuse(hidden, anchors)
        lattice = lattice_tensors(head, hidden, anchors, width=self.width)
        return *lattice.present().values(), *cache.present


def keep_nodes(
    exit_logits: Tensor, input_ids: Tensor, parents: Tensor, ancestors: Tensor, kept_places: Tensor
) -> tuple[Tensor, Tensor]:
    """The best K of N nodes: those that early-exit logits find most probable.

    The probability of a node is that of its path: the product, over the tokens after the root, of the
    probabilities that the early exit of the token before gives them (Speculative Streaming, arXiv 2402.11131,
    section 3.3). A child is at most as probable as its parent and has a higher number, so the best nodes are
    a tree with the same root.

    exit_logits: [B, E, V] of the first E nodes, the parents of all others among them
    input_ids, parents: [B, N] int64; the root's parent is -1
    ancestors: [B, N, N] bool, whether row i's node sees node j; padding does not see the root and comes last
    kept_places: [K] int64, 0 to K - 1
    Returns the numbers of the kept nodes [B, K], ascending, and where a node is among them [B, N], 0 for a
    node that is not; both int64.
    """
    best = exit_logits.amax(-1, keepdim=True)
    # Written out, because engines spend several passes on a log-sum-exp.
    totals = (best + (exit_logits - best).exp().sum(-1, keepdim=True).log()).squeeze(-1)  # [B, E]
    parent = parents.clamp(min=0)
    flat = exit_logits.flatten(1)
    logits = flat.gather(1, parent * exit_logits.shape[-1] + input_ids)
    # Rounding must not make a token more probable than 1, or a child could come before its parent.
    edges = (logits - totals.gather(1, parent)).clamp(max=0)
    edges = torch.where(parents >= 0, edges, 0.0)
    # Sums of equally many numbers in one order: a further number below 0 never makes such a sum larger.
    scores = torch.where(ancestors, edges.unsqueeze(1), 0.0).sum(-1)  # [B, N]
    is_node = ancestors[:, :, 0]
    numbers = torch.arange(input_ids.shape[1], device=input_ids.device)
    mine, other = scores.unsqueeze(2), scores.unsqueeze(1)
    is_better = (other > mine) | ((other == mine) & (numbers.unsqueeze(0) < numbers.unsqueeze(1)))
    is_real, other_is_real = is_node.unsqueeze(2), is_node.unsqueeze(1)
    comes_before = (other_is_real & ~is_real) | ((other_is_real == is_real) & is_better)
    rank = comes_before.long().sum(-1)
    kept = rank < kept_places.shape[0]
    place = kept.long().cumsum(1) - 1
    is_at = kept.unsqueeze(1) & (place.unsqueeze(1) == kept_places.view(1, -1, 1))  # [B, K, N]
    return torch.where(is_at, numbers, 0).sum(-1), torch.where(kept, place, 0)

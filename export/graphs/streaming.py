"""One pass that verifies a tree and drafts the next one: a target model with speculative streams.

The lower layers read all nodes. There early-exit logits prune the tree (``export.graphs.pruning``), and the
nodes of ``stream_indices`` start their streams. Kept nodes and streams pass the upper layers together.

In the cache of every layer node j is at ``write_index + j``, whether it is kept or not, and the streams
follow the N nodes, where the next pass overwrites them. No mask shows a node that was dropped, so its keys
and values in the upper layers may be anything.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from drafters.lattice import lattice_tensors
from drafters.layers import pick
from drafters.streaming import StreamFrames
from export.graphs.operators import ScatterCache
from export.graphs.pruning import keep_nodes
from export.graphs.stream_graph import StreamGraph
from export.graphs.windows import attention_masks, layer_masks


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
    """A pass of a target model with the streams of a head."""

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
        kept = keep_nodes(exit_logits, ids, inputs["parents"], ancestors, inputs["kept_places"])

        main, origins = pick(lower, kept.nodes), inputs["stream_indices"]
        streams = head.start_streams(pick(main, origins)).flatten(1, 2)  # [B, M*T, H]
        numbers = _stream_numbers(origins.shape[1], head.config.num_frames)
        kept_positions = positions.gather(1, kept.nodes)
        stream_positions = kept_positions.gather(1, _each(origins, head.config.num_frames)) + numbers
        kept_mask = pick(mask[:, 0], kept.nodes)
        stream_mask = pick(kept_mask, _each(origins, head.config.num_frames))
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
        cache.written_rows = torch.cat((kept.places, rows_of_streams.expand(ids.shape[0], -1)), dim=1)
        main, frames = head.run_streams(
            main, streams, torch.cat((kept_positions, stream_positions), dim=1), numbers, masks, cache
        )

        logits = head.main_logits(pick(main, origins))
        next_tokens = logits.argmax(-1)
        frames = frames.unflatten(1, (-1, head.config.num_frames)).flatten(0, 1)  # [B*M, T, H]
        frames = head.fuse(frames, next_tokens.flatten())
        lattice = lattice_tensors(head, frames, next_tokens.flatten(), width=self.width)
        tables = (table.unflatten(0, next_tokens.shape) for table in lattice.present().values())
        return kept.nodes, logits, next_tokens, *tables, *cache.present


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


def _stream_numbers(nodes: int, frames: int) -> Tensor:
    """[M*T]: 1 to T, for one node after another."""
    return torch.arange(1, frames + 1).expand(nodes, -1).flatten()


def _own_streams(numbers: Tensor, first: Tensor, capacity: int) -> Tensor:
    """[B, M*T, S] bool: what a stream sees of the streams, which are its node's streams up to itself.

    first: [B] int64, the position in the cache of the first stream
    """
    own = first.unsqueeze(1) + torch.arange(numbers.shape[0])  # [B, M*T]
    columns = torch.arange(capacity)
    return (columns <= own.unsqueeze(-1)) & (columns > (own - numbers).unsqueeze(-1))

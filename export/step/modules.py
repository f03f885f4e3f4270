"""The torch modules of the step-logic graphs, behind their contracts in ``export.step.contracts``.

A search with nodes and the sampled accept are not traced from these modules but joined from parts
(``export.step.joined_graphs``), which is faster; the modules say what they compute, and check the graphs.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from drafters.lattice import LatticeTensors
from drafters.layers import pick
from drafters.tree_search import TreeTensors, root_alone, search
from export.graphs.layers import scatter
from export.step.acceptance import accept, log_probs_of, sample_tokens
from export.step.levels import Level, frontier_of, tree_of_levels
from runtime.core.bundle import DrafterSpec, GraphSpec
from runtime.core.options import SAMPLING_FILTERS

# The inputs of a search over levels that every level has, by the beginning of their names.
LEVEL_TENSORS = ("child_tokens", "child_logprobs", "frontier_scores", "chosen")


class PrepareGraph(nn.Module):
    """The positions and the mask of the head's first pass over P tokens of context.

    The frames of a parallel head follow the P new positions in the cache, as
    ``runtime.decode.proposers.parallel`` places them. An autoregressive head has none; its last token of the
    context is queried. Behind the new tokens the pass writes padding into the cache; later passes overwrite
    it, or nothing attends to it.
    length: P
    """

    def __init__(self, contract: GraphSpec, spec: DrafterSpec, length: int):
        super().__init__()
        self.outputs = [tensor.name for tensor in contract.outputs]
        self.num_frames = spec.num_frames
        self.length = length

    def forward(self, inputs: dict[str, Tensor], past: list[Tensor]) -> tuple[Tensor, ...]:
        counts = inputs["counts"].unsqueeze(1)
        found = {"query_indices": counts - 1}
        if "lengths" in inputs:
            lengths = inputs["lengths"].unsqueeze(1)
            starts = lengths - counts
            found["context_position_ids"] = starts + torch.arange(self.length)
            found["frame_position_ids"] = lengths + torch.arange(self.num_frames)
            if "positions" in inputs:
                found["attn_mask"] = self._mask(inputs["positions"], lengths, starts + self.length)
                found["write_index"] = starts.squeeze(1)
        return tuple(found[name] for name in self.outputs)

    def _mask(self, positions: Tensor, lengths: Tensor, first_frame: Tensor) -> Tensor:
        """A query attends to the text and, if it is a frame, to all frames."""
        if "frame_position_ids" not in self.outputs:
            return (positions < lengths).view(-1, 1, 1, positions.shape[0])
        is_frame = (positions >= first_frame) & (positions < first_frame + self.num_frames)
        mask = (is_frame | (positions < lengths)).view(-1, 1, 1, positions.shape[0])
        return mask.expand(-1, 1, self.num_frames, -1)


class SearchGraph(nn.Module):
    """From a lattice to a tree of ``num_nodes`` drafts and the inputs of the target model's pass over it."""

    def __init__(self, num_nodes: int, *, merges_repeats: bool = False):
        super().__init__()
        self.num_nodes = num_nodes
        self.merges_repeats = merges_repeats

    def forward(self, inputs: dict[str, Tensor], past: list[Tensor]) -> tuple[Tensor, ...]:
        anchor_ids = inputs["anchor_ids"]
        if self.num_nodes:
            tree = search(
                lattice_of(inputs),
                anchor_ids,
                merges_repeats=self.merges_repeats,
                num_nodes=self.num_nodes,
            )
        else:
            tree = root_alone(anchor_ids)
        return search_outputs(tree, inputs["lengths"], inputs["positions"])


class ExpandGraph(nn.Module):
    """From the children of one pass to the inputs of the next."""

    def __init__(self, spec: DrafterSpec):
        super().__init__()
        self.width = spec.beam_width
        self.places = spec.beam_width * (spec.num_frames - 1)

    def forward(self, inputs: dict[str, Tensor], past: list[Tensor]) -> tuple[Tensor, ...]:
        frontier = frontier_of(
            inputs["child_tokens"], inputs["child_logprobs"], inputs["frontier_scores"], width=self.width
        )
        if "paths" in inputs:
            paths = torch.cat(
                (pick(inputs["paths"], frontier.parents), frontier.tokens.unsqueeze(-1)), dim=-1
            )
            return frontier.scores, frontier.chosen, paths
        # The levels' nodes follow the context in the cache, M places for each level.
        lengths, first = inputs["lengths"], (inputs["depth"] - 1) * self.width
        own = (first + torch.arange(self.width)).unsqueeze(-1) == torch.arange(self.places)
        reach = pick(inputs["reach"], frontier.parents) + own.long()
        return (
            frontier.scores,
            frontier.chosen,
            pick(inputs["node_features"], frontier.parents),
            frontier.tokens,
            # The root stands at the last context position.
            (lengths - 1 + inputs["depth"]).unsqueeze(1).expand(-1, self.width),
            tree_mask(reach, lengths, inputs["positions"]),
            lengths + first,
            reach,
        )


class LevelSearchGraph(nn.Module):
    """From the children of all passes to a tree, and the inputs of the target model's pass over it."""

    def __init__(self, num_nodes: int):
        super().__init__()
        self.num_nodes = num_nodes

    def forward(self, inputs: dict[str, Tensor], past: list[Tensor]) -> tuple[Tensor, ...]:
        levels: list[Level] = []
        while f"child_tokens_{len(levels)}" in inputs:
            names = (f"{name}_{len(levels)}" for name in LEVEL_TENSORS)
            tokens, log_probs, *of_frontier = (inputs[name] for name in names if name in inputs)
            levels.append(Level(tokens, log_probs, *of_frontier))
        tree = tree_of_levels(levels, inputs["anchor_ids"], num_nodes=self.num_nodes)
        return search_outputs(tree, inputs["lengths"], inputs["positions"])


def lattice_of(inputs: Mapping[str, Tensor]) -> LatticeTensors:
    """The lattice among a graph's inputs."""
    found: dict[str, Any] = {name: inputs.get(name) for name in LatticeTensors.__dataclass_fields__}
    return LatticeTensors(**found)


def search_outputs(tree: TreeTensors, lengths: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
    """The outputs of a search graph; lengths [B], positions [S]."""
    return (
        tree.tokens,
        lengths.unsqueeze(1) + tree.depths,
        tree_mask(tree.ancestors, lengths, positions),
        tree.parents,
        tree.depths,
        tree.ancestors,
        tree.log_probs,
    )


def tree_mask(ancestors: Tensor, lengths: Tensor, positions: Tensor) -> Tensor:
    """[B, 1, N, S] bool: a node attends to the text, and at ``lengths + j`` to its ancestors j and itself.

    ancestors [B, N, N], lengths [B], positions [S]
    The rows may be those of some nodes only, [B, M, N].
    """
    rows, size = ancestors.shape[1:]
    node = positions - lengths.unsqueeze(1)  # [B, S], the node at a position
    is_node = (node >= 0) & (node < size)
    index = node.clamp(min=0, max=size - 1).unsqueeze(1).expand(-1, rows, -1)
    in_tree = ancestors.long().gather(2, index) > 0
    return ((node < 0).unsqueeze(1) | (in_tree & is_node.unsqueeze(1))).unsqueeze(1)


class AcceptGraph(nn.Module):
    """From the target model's choices to the accepted path and the new tokens.

    length: P
    """

    def __init__(self, length: int):
        super().__init__()
        self.length = length

    def forward(self, inputs: dict[str, Tensor], past: list[Tensor]) -> tuple[Tensor, ...]:
        return self.accepted_path(inputs, inputs["next_tokens"])

    def accepted_path(self, inputs: dict[str, Tensor], choices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``accept`` for the tokens that the model chose after each node, [B, N] int64."""
        return accept(inputs["input_ids"], inputs["parents"], inputs["ancestors"], choices, self.length)


class SampledAcceptGraph(AcceptGraph):
    """As ``AcceptGraph`` for tokens that are drawn, one uniform number for each place of the path.

    A temperature of 0 takes the most probable token.
    """

    def forward(self, inputs: dict[str, Tensor], past: list[Tensor]) -> tuple[Tensor, ...]:
        uniforms = inputs["uniforms"].gather(1, inputs["depths"])
        filters = (inputs[name] for name in SAMPLING_FILTERS)
        return self.accepted(inputs, sample_tokens(inputs["logits"], uniforms, *filters))

    def accepted(self, inputs: dict[str, Tensor], choices: Tensor) -> tuple[Tensor, ...]:
        """The graph's outputs for the tokens that were drawn, [B, N] int64."""
        path, counts, tokens = self.accepted_path(inputs, choices)
        places = path.clamp(max=choices.shape[1] - 1)
        return path, counts, tokens, log_probs_of(inputs["logits"], choices).gather(1, places)


class CommitGraph(nn.Module):
    """Moves the path's keys and values behind the text, in place, and picks its features.

    write: ``scatter``, or ``scattered`` where PyTorch has to compute it
    """

    def __init__(self, write: Callable[[Tensor, Tensor, Tensor], Tensor] = scatter):
        super().__init__()
        self.write = write

    def forward(self, inputs: dict[str, Tensor], past: list[Tensor]) -> tuple[Tensor, ...]:
        path, lengths, features = inputs["path"], inputs["lengths"], inputs["features"]
        # Behind the path there may be more places than nodes; their features are never read.
        path_features = pick(features, path.clamp(max=features.shape[1] - 1))
        rows = (lengths.unsqueeze(1) + path).view(-1, 1, path.shape[1], 1)
        present = [
            self.write(cache, cache.gather(2, rows.expand(-1, cache.shape[1], -1, cache.shape[3])), lengths)
            for cache in past
        ]
        return path_features, *present

"""The torch modules of the step's weightless graphs, behind their contracts in ``export.step.contracts``."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from drafters.lattice import LatticeTensors
from drafters.layers import pick
from export.graphs.operators import scatter
from export.step.accept import accept
from export.step.search import TreeTensors, root_alone, search
from runtime.core.bundle import DrafterSpec


class PrepareGraph(nn.Module):
    """The positions and the mask of a parallel head's pass over P tokens of context and T frames.

    The frames follow the P new positions in the cache, as ``runtime.decode.proposers.parallel`` places them.
    """

    def __init__(self, spec: DrafterSpec, length: int):
        super().__init__()
        self.num_frames = spec.num_frames
        self.length = length

    def forward(self, inputs: dict[str, Tensor], past: list[Tensor]) -> tuple[Tensor, ...]:
        lengths = inputs["lengths"].unsqueeze(1)
        starts = lengths - inputs["counts"].unsqueeze(1)
        context_position_ids = starts + torch.arange(self.length)
        frame_position_ids = lengths + torch.arange(self.num_frames)
        if "positions" not in inputs:
            return context_position_ids, frame_position_ids
        positions = inputs["positions"]
        first_frame = starts + self.length
        is_frame = (positions >= first_frame) & (positions < first_frame + self.num_frames)
        mask = (is_frame | (positions < lengths)).view(-1, 1, 1, positions.shape[0])
        mask = mask.expand(-1, 1, self.num_frames, -1)
        return context_position_ids, frame_position_ids, mask, starts.squeeze(1)


class SearchGraph(nn.Module):
    """From a lattice to a tree of ``num_nodes`` drafts and the inputs of the target model's pass over it.

    With nodes it is not traced but put together from parts (``export.step.search_graph``), since that is
    faster; this module says what they compute.
    """

    def __init__(self, num_nodes: int, *, merges_repeats: bool = False):
        super().__init__()
        self.num_nodes = num_nodes
        self.merges_repeats = merges_repeats

    def forward(self, inputs: dict[str, Tensor], past: list[Tensor]) -> tuple[Tensor, ...]:
        anchor_ids = inputs["anchor_ids"]
        if self.num_nodes:
            tree = search(
                lattice_of(inputs), anchor_ids, merges_repeats=self.merges_repeats, num_nodes=self.num_nodes
            )
        else:
            tree = root_alone(anchor_ids)
        return search_outputs(tree, inputs["lengths"], inputs["positions"])


def lattice_of(inputs: Mapping[str, Tensor]) -> LatticeTensors:
    """The lattice among a graph's inputs."""
    found = [inputs.get(name) for name in LatticeTensors.__dataclass_fields__]
    tokens, log_probs, *others = found
    assert tokens is not None
    assert log_probs is not None
    return LatticeTensors(tokens, log_probs, *others)


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
        found = accept(
            inputs["input_ids"], inputs["parents"], inputs["ancestors"], inputs["next_tokens"], self.length
        )
        return found.path, found.counts, found.tokens


class CommitGraph(nn.Module):
    """Moves the path's keys and values behind the text, in place, and picks its features.

    write: ``scatter``, or ``scattered`` where PyTorch has to compute it
    """

    def __init__(self, write: Callable[[Tensor, Tensor, Tensor], Tensor] = scatter):
        super().__init__()
        self.write = write

    def forward(self, inputs: dict[str, Tensor], past: list[Tensor]) -> tuple[Tensor, ...]:
        path, lengths, features = inputs["path"], inputs["lengths"], inputs["features"]
        # Behind the path there may be more places than nodes; nobody reads their features.
        path_features = pick(features, path.clamp(max=features.shape[1] - 1))
        rows = (lengths.unsqueeze(1) + path).view(-1, 1, path.shape[1], 1)
        present = [
            self.write(cache, cache.gather(2, rows.expand(-1, cache.shape[1], -1, cache.shape[3])), lengths)
            for cache in past
        ]
        return path_features, *present

"""The passes of a step's graphs, and which array each of their tensors is.

An autoregressive head takes a pass for the root and one for every further level. Between them the graph
``expand`` chooses the nodes of the next level. The results of each pass stay in arrays of its depth, because
the search at the end chooses among all of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from runtime.core.bundle import DrafterSpec

# Where a head reads a step's context: the features of the last step's path, and the tokens after them.
CONTEXT = {"features": "path_features", "context_token_ids": "path_tokens"}
# The outputs of an autoregressive head for every node.
CHILDREN = ("child_tokens", "child_logprobs")
# Inputs that the head and the target model have under the same names, each with values of its own.
OWN_INPUTS = ("attn_mask", "write_index", "positions", "position_ids")


@dataclass(frozen=True)
class ArrayKey:
    """One array of a step. Tensors with the same key are the same memory, whatever their graphs.

    tensor: the name of a tensor that is stored there
    of_head: whether it is the draft head's own; the target model has another array of the same tensor
    """

    tensor: str
    of_head: bool = False

    @property
    def is_cache(self) -> bool:
        """Whether it holds the keys or values of a layer, [B, KH, S, D]."""
        return self.tensor.startswith("past_")


@dataclass(frozen=True)
class GraphPass:
    """One run of a graph.

    axes: sizes of its open axes but those of sequences and caches
    stored_as: the array's tensor, where a tensor of the graph is stored under the name of another graph's
    constants: values of inputs of one element that never change
    of_head: whether the graph reads the head's cache, mask and positions, and not the target model's
    """

    graph: str
    axes: Mapping[str, int] = field(default_factory=dict)
    stored_as: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, int] = field(default_factory=dict)
    of_head: bool = False

    def key(self, tensor: str) -> ArrayKey:
        """The array of a tensor. A cache is updated in place, so its output has the key of its input."""
        if tensor in self.stored_as:
            return ArrayKey(self.stored_as[tensor])
        key = ArrayKey(tensor.replace("present_", "past_"))
        is_own = self.of_head and (key.is_cache or tensor in OWN_INPUTS)
        return ArrayKey(key.tensor, of_head=is_own)


class HeadPasses(Protocol):
    """The passes of a draft head of one family."""

    def draft(self, num_nodes: int) -> Sequence[GraphPass]:
        """The passes that draft a tree of so many nodes; for 0 nodes, those that only read the context."""
        ...

    def read(self, num_tokens: int) -> GraphPass:
        """The pass over so many tokens of a prompt; its drafts are not used."""
        ...


@dataclass(frozen=True)
class ParallelPasses:
    """Of a head that drafts all frames in one pass.

    path_length: tokens that a step adds to the context at most
    """

    spec: DrafterSpec
    path_length: int

    def draft(self, num_nodes: int) -> Sequence[GraphPass]:
        axes = {"A": self.path_length, "T": self.spec.num_frames}
        return (
            GraphPass("prepare", of_head=True),
            GraphPass("drafter", axes, CONTEXT, of_head=True),
        )

    def read(self, num_tokens: int) -> GraphPass:
        return GraphPass("drafter", {"A": num_tokens, "T": 1}, of_head=True)


@dataclass(frozen=True)
class LevelPasses:
    """Of an autoregressive head, which drafts level by level.

    path_length: tokens that a step adds to the context at most
    """

    spec: DrafterSpec
    path_length: int

    def draft(self, num_nodes: int) -> Sequence[GraphPass]:
        passes = [GraphPass("prepare", of_head=True), self._level(0)]
        for depth in range(1, min(num_nodes, self.spec.num_frames)):
            passes += [self._expand(depth), self._level(depth)]
        return passes

    def read(self, num_tokens: int) -> GraphPass:
        return GraphPass("drafter", self._root_axes(num_tokens), of_head=True)

    def _level(self, depth: int) -> GraphPass:
        """The head's pass over the nodes of a depth; over the root it reads the new context too."""
        stored_as = {**CONTEXT, **_at_depth(CHILDREN, depth), "path_ids_0": "anchor_ids"}
        if depth:
            return GraphPass("drafter", self._level_axes(depth), stored_as, of_head=True)
        if self.spec.heads_per_depth:  # all levels read the root's state
            stored_as["new_states"] = "states"
        return GraphPass("drafter", self._root_axes(self.path_length), stored_as, of_head=True)

    def _expand(self, depth: int) -> GraphPass:
        """From the pass above to the nodes of a depth. The root's score and reach are 0, as new memory is."""
        stored_as = {
            **_at_depth((*CHILDREN, "frontier_scores", "reach"), depth - 1),
            **_at_depth(("chosen", "depth"), depth),
            "next_scores": f"frontier_scores_{depth}",
            "next_reach": f"reach_{depth}",
            "node_features": "new_states",
            "parent_features": "states",
            "paths": f"path_ids_{depth - 1}" if depth > 1 else "anchor_ids",
            "next_paths": f"path_ids_{depth}",
        }
        axes = {"W": self.spec.beam_width if depth > 1 else 1, "L": depth, "L1": depth + 1}
        constants = {} if self.spec.heads_per_depth else {"depth": depth}
        return GraphPass("expand", axes, stored_as, constants, of_head=True)

    def _root_axes(self, num_tokens: int) -> dict[str, int]:
        axes = {"A": num_tokens, "Q": 1, "N": 0, "P": 1, "M": 1}
        return axes | {f"M{depth}": int(depth == 0) for depth in range(self.spec.num_frames)}

    def _level_axes(self, depth: int) -> dict[str, int]:
        width = self.spec.beam_width
        states = 1 if self.spec.heads_per_depth else width
        axes = {"A": 0, "Q": 0, "N": states, "P": states, "M": width}
        return axes | {f"M{d}": width if d == depth else 0 for d in range(self.spec.num_frames)}


def _at_depth(tensors: Sequence[str], depth: int) -> dict[str, str]:
    """Tensors of a pass, each with the tensor of the search that reads the results of its depth."""
    return {tensor: f"{tensor}_{depth}" for tensor in tensors}

"""Which graphs a step on a device runs, one after another, for trees of every size.

An autoregressive head takes a pass for the root and one for every further level. Between them the graph
``expand`` chooses the nodes of the next. What each pass finds stays in arrays of its depth, since the search
at the end chooses among all of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from runtime.core.bundle import PARALLEL, DrafterSpec

# Where a head reads a step's context: the features of the last step's path, and the tokens after them.
CONTEXT = {"features": "path_features", "context_token_ids": "path_tokens"}
# What a pass of an autoregressive head returns for every node.
CHILDREN = ("child_tokens", "child_logprobs")


@dataclass(frozen=True)
class GraphPass:
    """One run of a graph.

    axes: sizes of its open axes but those of sequences and caches
    names: arrays of tensors that do not have the tensor's name
    constants: whole numbers that an input of one element always has
    """

    graph: str
    axes: Mapping[str, int] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, int] = field(default_factory=dict)


class DraftPasses(Protocol):
    def __call__(self, num_nodes: int) -> Sequence[GraphPass]:
        """What drafts for a tree of so many nodes; without nodes, what reads the context alone."""
        ...


class PromptPass(Protocol):
    def __call__(self, num_tokens: int) -> GraphPass:
        """The head's pass over so many tokens of a prompt; what it drafts is not used."""
        ...


@dataclass(frozen=True)
class HeadPlan:
    """The passes of a draft head.

    has_cache: whether the head keeps keys and values of its context; otherwise it reads no prompts
    behind: positions that its passes use behind the context
    """

    draft: DraftPasses
    read: PromptPass
    has_cache: bool
    behind: int


def head_plan(spec: DrafterSpec, *, path_length: int, has_cache: bool) -> HeadPlan:
    """The plan of a head of any family.

    path_length: tokens that a step adds to the context at most
    """
    if spec.family == PARALLEL:
        return HeadPlan(
            partial(_parallel_passes, spec, path_length),
            lambda num_tokens: GraphPass("drafter", {"A": num_tokens, "T": 1}),
            has_cache,
            path_length + spec.num_frames,
        )
    return HeadPlan(
        partial(_level_passes, spec, path_length),
        lambda num_tokens: GraphPass("drafter", _root_axes(spec, num_tokens)),
        has_cache,
        path_length + spec.beam_width * (spec.num_frames - 1),
    )


def _parallel_passes(spec: DrafterSpec, path_length: int, num_nodes: int) -> Sequence[GraphPass]:
    return (
        GraphPass("prepare"),
        GraphPass("drafter", {"A": path_length, "T": spec.num_frames}, CONTEXT),
    )


def _level_passes(spec: DrafterSpec, path_length: int, num_nodes: int) -> Sequence[GraphPass]:
    names = {**CONTEXT, **_numbered(CHILDREN, 0), "path_ids_0": "anchor_ids"}
    if spec.heads_per_depth:  # all levels read the root's state
        names["new_states"] = "states"
    passes = [GraphPass("prepare"), GraphPass("drafter", _root_axes(spec, path_length), names)]
    for depth in range(1, min(num_nodes, spec.num_frames)):
        passes.append(_expand_pass(spec, depth))
        names = {**CONTEXT, **_numbered(CHILDREN, depth), "path_ids_0": "anchor_ids"}
        passes.append(GraphPass("drafter", _level_axes(spec, depth), names))
    return passes


def _expand_pass(spec: DrafterSpec, depth: int) -> GraphPass:
    """From the pass above to the nodes of a depth. The root's score and its reach are zeros, as memory is."""
    names = {
        **_numbered((*CHILDREN, "frontier_scores", "reach"), depth - 1),
        **_numbered(("chosen", "depth"), depth),
        "next_scores": f"frontier_scores_{depth}",
        "next_reach": f"reach_{depth}",
        "node_features": "new_states",
        "parent_features": "states",
        "paths": f"path_ids_{depth - 1}" if depth > 1 else "anchor_ids",
        "next_paths": f"path_ids_{depth}",
    }
    nodes = spec.beam_width if depth > 1 else 1
    constants = {} if spec.heads_per_depth else {"depth": depth}
    return GraphPass("expand", {"W": nodes, "L": depth, "L1": depth + 1}, names, constants)


def _root_axes(spec: DrafterSpec, num_tokens: int) -> dict[str, int]:
    axes = {"A": num_tokens, "Q": 1, "N": 0, "P": 1, "M": 1}
    return axes | {f"M{depth}": int(depth == 0) for depth in range(spec.num_frames)}


def _level_axes(spec: DrafterSpec, depth: int) -> dict[str, int]:
    width = spec.beam_width
    states = 1 if spec.heads_per_depth else width
    axes = {"A": 0, "Q": 0, "N": states, "P": states, "M": width}
    return axes | {f"M{d}": width if d == depth else 0 for d in range(spec.num_frames)}


def _numbered(names: Sequence[str], depth: int) -> dict[str, str]:
    return {name: f"{name}_{depth}" for name in names}


@dataclass(frozen=True)
class StepPlan:
    """What the graphs of a bundle's steps are made for.

    nodes: sizes of a tree, ascending from 0
    path_length: P, new tokens of a step at most
    head: None for plain steps
    """

    nodes: tuple[int, ...]
    path_length: int
    head: HeadPlan | None

    def draft(self, nodes: int) -> Sequence[GraphPass]:
        """The head's part."""
        return self.head.draft(nodes) if self.head else ()

    def verify(self, nodes: int) -> tuple[GraphPass, GraphPass]:
        """The search, and the target model's pass over the tree that it finds."""
        axes = {"N": nodes + 1, "M": nodes + 1}
        return GraphPass(f"search_{nodes}"), GraphPass("backbone", axes, {"write_index": "lengths"})

    def accept(self, graph: str, nodes: int) -> GraphPass:
        """graph: ``accept`` or ``accept_sampled``"""
        return GraphPass(graph, {"N": nodes + 1})

    def commit(self, nodes: int) -> Sequence[GraphPass]:
        """Without a head there is no path to pack."""
        return (GraphPass("commit", {"N": nodes + 1}),) if self.head else ()

    def all_passes(self) -> list[GraphPass]:
        """Those of steps of every size."""
        return [
            each
            for nodes in self.nodes
            for each in (
                *self.draft(nodes),
                *self.verify(nodes),
                self.accept("accept", nodes),
                self.accept("accept_sampled", nodes),
                *self.commit(nodes),
            )
        ]

    def prompt_passes(self, num_tokens: int) -> list[GraphPass]:
        """Those over a part of a prompt."""
        backbone = GraphPass("backbone", {"N": num_tokens, "M": 1})
        return [backbone, self.head.read(num_tokens)] if self.head else [backbone]

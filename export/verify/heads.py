"""Built draft heads against PyTorch. Both kinds read a context in two portions, and draft after each.

A parallel head is compared with the head's own pass without a cache.

An autoregressive head drafts level by level, as it does in decoding. The draft is a path of nodes with one
sibling beside each node but the first. Siblings are read in the same pass, so the nodes of a pass have to be
kept apart. Every node is compared with the hidden state that ``unrolled_hidden`` computes for the whole
sequence of context, anchor and drafts.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from drafters.autoregressive import AutoregressiveDrafter
from drafters.lattice import lattice_tensors
from drafters.parallel import ParallelDrafter
from export.errors import ExportError
from export.verify.comparison import Tensors, check_labels, of_labels
from export.verify.runner import GraphRunner


def _portions(features: NDArray[np.float32]) -> tuple[tuple[int, int], tuple[int, int]]:
    """Where the two portions of a context [P, F*H] begin and end."""
    count = features.shape[0]
    return (0, count - 3), (count - 3, count)


@dataclass(frozen=True)
class ParallelReference:
    """A context in two portions, and what the head drafts after each.

    features [P, F*H]: the context
    anchors [2] int64: the token after each portion
    lattices: after each portion, the expected outputs by name; the second has the first frames only if the
        head can leave some out
    """

    features: NDArray[np.float32]
    anchors: NDArray[np.int64]
    lattices: tuple[Tensors, ...]


@torch.no_grad()
def parallel_reference(
    drafter: ParallelDrafter, features: NDArray[np.float32], *, width: int, seed: int = 0
) -> ParallelReference:
    """Run the head on a context [P, F*H], cut short and whole."""
    config = drafter.config
    anchors = np.random.default_rng(seed).integers(0, config.vocab_size, 2)
    counts = (config.num_frames, -(-config.num_frames // 2) if config.num_layers else config.num_frames)
    lattices = []
    for anchor, (_, length), count in zip(anchors, _portions(features), counts, strict=True):
        frames = torch.arange(length, length + count)[None]
        mask = torch.ones(1, 1, count, length + count, dtype=torch.bool)
        context, anchor_ids = torch.from_numpy(features[:length])[None], torch.tensor([[anchor]])
        hidden = drafter(context, torch.arange(length)[None], anchor_ids, frames, mask)
        lattice = lattice_tensors(drafter, hidden, anchor_ids[0], width=width)
        lattices.append({name: tensor[0].numpy() for name, tensor in lattice.present().items()})
    return ParallelReference(features, anchors, tuple(lattices))


def check_parallel(
    graph: GraphRunner, reference: ParallelReference, *, slack: float = 1.0
) -> dict[str, float]:
    """Largest absolute difference of the lattice: ``prefill`` and ``step``.

    slack: as of ``GraphRunner.difference``
    ``equal_argmax`` is the share of frames in which graph and reference prefer the same label.
    """
    found, equal = {}, []
    portions = _portions(reference.features)
    for name, (start, end), anchor, lattice in zip(
        ("prefill", "step"), portions, reference.anchors, reference.lattices, strict=True
    ):
        num_frames = lattice["frame_tokens"].shape[0]
        outputs = graph.run(
            features=reference.features[start:end],
            context_position_ids=np.arange(start, end),
            anchor_ids=np.array([anchor]),
            frame_position_ids=np.arange(end, end + num_frames),
            attn_mask=np.tile(np.arange(graph.capacity) < end + num_frames, (1, num_frames, 1)),
            write_index=np.array(start),
        )
        # The sorted probabilities are compared as they are, other tensors only for the labels that both have.
        what, tokens = f"drafter {name}", lattice["frame_tokens"]
        same = check_labels(f"{what} frame_tokens", outputs["frame_tokens"], tokens, graph.activations)
        equal += same[:, 0].tolist()
        found[name] = 0.0
        for key, expected in lattice.items():
            if key != "frame_tokens":
                pair = (of_labels(each, same) for each in (outputs[key], expected))
                found[name] = max(found[name], graph.difference(f"{what} {key}", *pair, slack=slack))
    return {**found, "equal_argmax": float(np.mean(equal))}


# Nodes of a level: the path's node and its sibling.
BRANCHES = 2
# Levels that are checked if one head serves all of them; their nodes must fit into the small cache.
LEVELS = 8


@dataclass(frozen=True)
class AutoregressiveReference:
    """Inputs, and the log-probabilities that are expected.

    features [P, F*H]: the context
    token_ids [P + 1]: the tokens of the context, and the anchor after it
    drafts [2, L-1, 2]: after each portion, the path's tokens and their siblings
    log_probs [2, L, 2, V]: after the anchor (twice the same), then after every draft
    """

    features: NDArray[np.float32]
    token_ids: NDArray[np.int64]
    drafts: NDArray[np.int64]
    log_probs: NDArray[np.float32]


@torch.no_grad()
def autoregressive_reference(
    drafter: AutoregressiveDrafter, features: NDArray[np.float32], seed: int = 0
) -> AutoregressiveReference:
    """Run the head unrolled on a context [P, F*H] with random tokens, cut short and whole."""
    random = np.random.default_rng(seed)
    config = drafter.config
    count, depth = features.shape[0], config.num_frames
    if not drafter.heads_per_depth:
        depth = min(depth, LEVELS)
    token_ids = random.integers(0, config.vocab_size, count + 1)
    drafts = random.integers(0, config.vocab_size, (2, depth - 1, BRANCHES))
    drafted = drafter.token_ids(torch.arange(config.label_count)).numpy()
    log_probs = np.full((2, depth, BRANCHES, config.vocab_size), -np.inf, np.float32)
    for portion, (_, end) in enumerate(_portions(features)):
        context = torch.from_numpy(features[:end])[None]
        # Each sibling ends a sequence of its own.
        for level in range(depth):
            for branch in range(BRANCHES):
                path = [*drafts[portion, : max(level - 1, 0), 0], *drafts[portion, level - 1 : level, branch]]
                tokens = torch.tensor([[*token_ids[: end + 1], *path, 0]])
                padded = F.pad(context, (0, 0, 0, level + 2))
                hidden = drafter.unrolled_hidden(
                    padded, tokens, torch.tensor([[end]]), tokens[:, None, end + 1 :]
                )
                found = drafter.logits(hidden[0, level]).log_softmax(-1)
                log_probs[portion, level, branch, drafted] = found.numpy()
    return AutoregressiveReference(features, token_ids, drafts, log_probs)


def check_autoregressive(graph: GraphRunner, reference: AutoregressiveReference) -> dict[str, float]:
    """Largest absolute differences of the children's log-probabilities: ``context`` and ``draft``.

    ``equal_argmax`` is the share of nodes after which graph and reference prefer the same token.
    """
    equal: list[bool] = []
    found = {"context": 0.0, "draft": 0.0}
    portions = _portions(reference.features)
    for (start, end), drafts, expected in zip(portions, reference.drafts, reference.log_probs, strict=True):
        outputs = _read_context(graph, reference, start, end)
        found["context"] = max(found["context"], _compare(graph, "context", outputs, expected[0, :1], equal))
        for level in range(1, expected.shape[0]):
            anchor = int(reference.token_ids[end])
            outputs = _draft_level(graph, outputs["new_states"], end, anchor, drafts[:level])
            found["draft"] = max(
                found["draft"], _compare(graph, f"level {level}", outputs, expected[level], equal)
            )
    return {**found, "equal_argmax": float(np.mean(equal))}


def _compare(
    graph: GraphRunner, what: str, outputs: Tensors, expected: NDArray[np.float32], equal: list[bool]
) -> float:
    """expected [M, V]: the best children's log-probabilities, and those of the very tokens returned."""
    tokens, found = outputs["child_tokens"], outputs["child_logprobs"]
    if tokens.shape[0] != expected.shape[0]:
        raise ExportError(f"drafter {what}: {expected.shape[0]} nodes are expected, got {tokens.shape[0]}")
    equal += (tokens[:, 0] == expected.argmax(-1)).tolist()
    best = -np.sort(-expected, axis=-1)[:, : found.shape[1]]
    return max(
        graph.difference(f"drafter {what} best children", found, best),
        graph.difference(f"drafter {what} children", np.take_along_axis(expected, tokens, -1), found),
    )


def _read_context(graph: GraphRunner, reference: AutoregressiveReference, start: int, end: int) -> Tensors:
    """The pass that reads the context from ``start`` to ``end`` and drafts after the anchor."""
    token_ids = reference.token_ids[start : end + 1]
    return graph.run(
        features=reference.features[start:end],
        context_token_ids=token_ids[1:],
        context_position_ids=np.arange(start, end),
        query_indices=np.array([end - start - 1]),
        attn_mask=(np.arange(graph.capacity) < end)[None, None],
        write_index=np.array(start),
        path_ids_0=token_ids[-1:, None],
    )


def _draft_level(
    graph: GraphRunner, states: NDArray[Any], length: int, anchor: int, drafts: NDArray[np.int64]
) -> Tensors:
    """The pass of the newest level of the drafts [d, 2], after a context of ``length`` positions.

    states [P, H]: what the last pass left; the first is the state of the nodes' common parent
    """
    depth = drafts.shape[0]
    first = length + BRANCHES * (depth - 1)
    mask = np.zeros((1, BRANCHES, graph.capacity), np.bool_)
    mask[..., :length] = True
    # The path's nodes are the first of their levels.
    mask[..., length:first:BRANCHES] = True
    mask[0, np.arange(BRANCHES), first + np.arange(BRANCHES)] = True
    path = [anchor, *drafts[:-1, 0].tolist()]
    shared = "token_ids" not in {tensor.name for tensor in graph.inputs}
    return graph.run(
        states=states[:1] if shared else np.repeat(states[:1], BRANCHES, axis=0),
        token_ids=drafts[-1],
        position_ids=np.full(BRANCHES, length - 1 + depth),
        attn_mask=mask[:, :0] if shared else mask,
        write_index=np.array(length if shared else first),
        **{f"path_ids_{depth}": np.array([[*path, token] for token in drafts[-1]])},
    )

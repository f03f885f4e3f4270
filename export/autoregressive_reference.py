"""A built sequential head against PyTorch: the unrolled pass of training is the reference.

Two context portions, each followed by a draft whose levels run through the graph as a decoder runs
them. The draft is a comb: a chain of nodes, and beside each but the first a sibling that is read in
the same pass, so that rows have to be kept apart. Every node of it is compared with the hidden
state that ``unrolled_hidden`` computes for the whole sequence of context, anchor and drafts.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from drafters.autoregressive import AutoregressiveDrafter
from export.errors import ExportError
from export.validate import CAPACITY, GraphRunner, difference
from runtime.bundle import GraphSpec

# Rows of a level: the chain's node and its sibling.
BRANCHES = 2
# Levels checked of a head for which all of them are alike: their rows must fit into the small cache.
LEVELS = 8


@dataclass(frozen=True)
class ChainReference:
    """What goes in, and the log-probabilities that must come out.

    features [P, F*H]: the context, the first ``split`` rows of which are read first
    token_ids [P + 1]: the tokens of the context, and the anchor after it
    drafts [2, L-1, 2]: after either portion, the chain's tokens and their siblings
    log_probs [2, L, 2, V]: after the anchor (twice the same), then after every draft
    """

    features: NDArray[np.float32]
    split: int
    token_ids: NDArray[np.int64]
    drafts: NDArray[np.int64]
    log_probs: NDArray[np.float32]


@torch.no_grad()
def autoregressive_reference(
    drafter: AutoregressiveDrafter, features: NDArray[np.float32], seed: int = 0
) -> ChainReference:
    """Run the head unrolled on a context [P, F*H] with random tokens, whole and cut short."""
    random = np.random.default_rng(seed)
    config = drafter.config
    count, depth = features.shape[0], config.num_frames
    if not drafter.heads_per_depth:
        depth = min(depth, LEVELS)
    token_ids = random.integers(0, config.vocab_size, count + 1)
    drafts = random.integers(0, config.vocab_size, (2, depth - 1, BRANCHES))
    split = count - 3
    found = np.empty((2, depth, BRANCHES, config.vocab_size), np.float32)
    for portion, end in enumerate((split, count)):
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
                found[portion, level, branch] = drafter.logits(hidden[0, level]).log_softmax(-1).numpy()
    return ChainReference(features, split, token_ids, drafts, found)


def check_autoregressive(path: Path, spec: GraphSpec, reference: ChainReference) -> dict[str, float]:
    """Largest absolute differences of the children's log-probabilities: ``context`` and ``draft``."""
    replay = _Replay(path, spec)
    found = {"context": 0.0, "draft": 0.0}
    portions = ((0, reference.split), (reference.split, reference.features.shape[0]))
    for (start, end), drafts, expected in zip(portions, reference.drafts, reference.log_probs, strict=True):
        outputs = replay.context(reference.features[start:end], reference.token_ids[start : end + 1])
        found["context"] = max(found["context"], _compare("context", outputs, expected[0, :1]))
        for level in range(1, expected.shape[0]):
            outputs = replay.level(outputs["new_states"], int(reference.token_ids[end]), drafts[:level])
            found["draft"] = max(found["draft"], _compare(f"level {level}", outputs, expected[level]))
    return found


def _compare(what: str, outputs: dict[str, NDArray[Any]], expected: NDArray[np.float32]) -> float:
    """expected [M, V]: the best children's log-probabilities, and those of the very tokens returned."""
    tokens, found = outputs["child_tokens"][0], outputs["child_logprobs"][0]
    if tokens.shape[0] != expected.shape[0]:
        raise ExportError(f"drafter {what}: {expected.shape[0]} rows are expected, got {tokens.shape[0]}")
    best = -np.sort(-expected, axis=-1)[:, : found.shape[1]]
    return max(
        difference(f"drafter {what} best children", found, best),
        difference(f"drafter {what} children", np.take_along_axis(expected, tokens, -1), found),
    )


class _Replay:
    """Passes through a graph with a small cache; what a pass does not read is empty."""

    def __init__(self, path: Path, spec: GraphSpec):
        self._graph = GraphRunner(path, spec)
        self._inputs = [tensor for tensor in spec.inputs if not tensor.name.startswith("past_")]
        self._length = 0

    def context(self, features: NDArray[np.float32], token_ids: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """Features [A, F*H] and the tokens [A + 1] of these positions and the next."""
        count, start = features.shape[0], self._length
        self._length += count
        return self._run(
            features=features,
            context_token_ids=token_ids[1:],
            context_position_ids=np.arange(start, self._length),
            query_indices=np.array([count - 1]),
            attn_mask=(np.arange(CAPACITY) < self._length)[None, None],
            write_index=np.array(start),
            path_ids_0=token_ids[-1:, None],
        )

    def level(self, states: NDArray[Any], anchor: int, drafts: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """The newest level of the drafts [d, 2], whose parents' states [1, P, H] the last pass left."""
        depth = drafts.shape[0]
        first = self._length + BRANCHES * (depth - 1)
        mask = np.zeros((1, BRANCHES, CAPACITY), np.bool_)
        mask[..., : self._length] = True
        # The chain's nodes are the first rows of their levels.
        mask[..., self._length : first : BRANCHES] = True
        mask[0, np.arange(BRANCHES), first + np.arange(BRANCHES)] = True
        chain = [anchor, *drafts[:-1, 0].tolist()]
        shared = "token_ids" not in {tensor.name for tensor in self._inputs}
        return self._run(
            states=states[0, :1] if shared else np.repeat(states[0, :1], BRANCHES, axis=0),
            token_ids=drafts[-1],
            position_ids=np.full(BRANCHES, self._length - 1 + depth),
            attn_mask=mask[:, :0] if shared else mask,
            write_index=np.array(self._length if shared else first),
            **{f"path_ids_{depth}": np.array([[*chain, token] for token in drafts[-1]])},
        )

    def _run(self, **given: NDArray[Any]) -> dict[str, NDArray[Any]]:
        inputs = {}
        for tensor in self._inputs:
            empty = [0 if isinstance(size, str) else size for size in tensor.shape[1:]]
            kind = {"float32": np.float32, "int64": np.int64, "bool": np.bool_}[tensor.dtype]
            inputs[tensor.name] = np.asarray(given.get(tensor.name, np.zeros(empty)), kind)[None]
        return self._graph.run(**inputs)

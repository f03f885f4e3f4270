"""What a verify pass costs on this machine, by the number of its rows."""

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from runtime.backbone import Backbone
from runtime.tree import TokenTree

# Of ``step_costs``; the whole takes about half a second.
ROUNDS = 10


def time_verify(
    backbone: Backbone, prompt: Sequence[int], sizes: Sequence[int], rounds: int
) -> dict[int, list[float]]:
    """Milliseconds of verify passes over a chain of n rows, by n; sizes take turns in every round."""
    token_ids = np.asarray(prompt, dtype=np.int64)
    for start in range(0, token_ids.size, backbone.prefill_chunk):
        backbone.prefill(token_ids[start : start + backbone.prefill_chunk], start)
    trees = {size: _chain(np.resize(token_ids, size)) for size in sizes}
    times: dict[int, list[float]] = {size: [] for size in sizes}
    # The largest first: the cache does not move after it.
    for size in sorted(sizes, reverse=True):
        backbone.load(trees[size], token_ids.size)
        backbone.verify()
    for _ in range(rounds):
        for size, tree in trees.items():
            backbone.load(tree, token_ids.size)
            begin = time.perf_counter_ns()
            backbone.verify()
            times[size].append((time.perf_counter_ns() - begin) / 1e6)
    return times


def step_costs(backbone: Backbone, *, num_nodes: int, step_ms: float, max_nodes: int) -> NDArray[np.float64]:
    """Milliseconds of a whole step with 0, 1, ..., ``max_nodes`` drafts: [max_nodes + 1].

    step_ms: of a step with ``num_nodes`` drafts, as measured while decoding. What it takes beside the verify
    pass is taken to be the same for every size. The backbone's sequence is lost.
    """
    backbone.reset()
    times = time_verify(backbone, [0], range(1, max_nodes + 2), ROUNDS)
    # More rows never cost less: what says so is noise.
    verify = np.maximum.accumulate([np.median(times[rows]) for rows in sorted(times)])
    return verify - verify[num_nodes] + max(step_ms, verify[num_nodes])


def _chain(tokens: NDArray[np.int64]) -> TokenTree:
    nodes = np.arange(tokens.size)
    return TokenTree(tokens, nodes - 1, nodes, np.zeros(tokens.size))

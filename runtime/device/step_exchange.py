"""What the host gives to a step of graphs, and makes of what it reads."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.core.token_tree import TokenTree
from runtime.decode.sampling import Acceptor
from runtime.decode.sequence import SequenceState
from runtime.decode.step import StepResult, step_result
from runtime.device.step_programs import ON_HOST


def who_accepts(acceptors: Sequence[Acceptor]) -> str:
    """The graph that can accept for all sequences, or ``ON_HOST`` if there is none."""
    if not any(acceptor.needs_logits for acceptor in acceptors):
        return "accept"
    return ON_HOST if any(acceptor.graph_sampling is None for acceptor in acceptors) else "accept_sampled"


def write_draws(acceptors: Sequence[Acceptor], draws: Mapping[str, NDArray[Any]]) -> None:
    """Write how every sequence draws its tokens, and its next numbers."""
    for index, acceptor in enumerate(acceptors):
        sampling = acceptor.graph_sampling
        assert sampling is not None
        for name in ("temperature", "top_k", "top_p", "min_p"):
            draws[name][index] = getattr(sampling, name)
        acceptor.fill_uniforms(draws["uniforms"][index])
    for values in draws.values():
        values[len(acceptors) :] = 0  # greedy, in slots without a sequence


def read_result(acceptors: Sequence[Acceptor], arrays: Mapping[str, NDArray[Any]]) -> StepResult:
    """Copies, because the next step brings its results to the same memory."""
    arrays = {name: values[: len(acceptors)] for name, values in arrays.items()}
    counts = arrays["new_counts"].copy()
    log_probs: list[tuple[float, ...]] = [()] * counts.size
    if "new_log_probs" in arrays:
        for index, (acceptor, count) in enumerate(zip(acceptors, counts.tolist(), strict=True)):
            acceptor.advance(count)
            if acceptor.graph_sampling and acceptor.graph_sampling.log_probs:
                log_probs[index] = tuple(arrays["new_log_probs"][index, :count].tolist())
    node_log_probs = arrays["node_log_probs"][:, 1:].astype(np.float64)
    return StepResult(arrays["new_tokens"].copy(), counts, tuple(log_probs), node_log_probs)


def accept_on_host(
    sequences: Sequence[SequenceState], results: Mapping[str, NDArray[Any]], path_length: int
) -> tuple[StepResult, NDArray[np.int64]]:
    """Let every sequence choose from the logits; also returns the nodes of the paths [B, P] for the device.

    results: what ``CHOSEN_FROM`` names, of at least as many slots as there are sequences
    path_length: P, new tokens of a step at most
    """
    trees, accepted = [], []
    for index, sequence in enumerate(sequences):
        found = {name: values[index] for name, values in results.items()}
        log_probs = found["node_log_probs"].astype(np.float64)
        tree = TokenTree(found["input_ids"], found["parents"], found["depths"], log_probs)
        trees.append(tree)
        accepted.append(sequence.acceptor.accept(tree, found["next_tokens"], found["logits"]))
    path = np.tile(np.arange(path_length), (len(sequences), 1))
    for row, acceptance in zip(path, accepted, strict=True):
        row[: acceptance.path.size] = acceptance.path
    return step_result(trees, accepted), path

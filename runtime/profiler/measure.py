"""Timing on real decoders: whole completions in every setting, and single verify passes."""

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from runtime.decoder import SpeculativeDecoder
from runtime.decoding.target_model import TargetModel
from runtime.engines.recorder import NullRecorder, StageRecorder
from runtime.profiler.runs import VANILLA, Run
from runtime.trees.token_tree import TokenTree

VERIFY_ROUNDS = 20
WARMUP_TOKENS = 32


def measure_runs(
    vanilla: SpeculativeDecoder,
    speculative: SpeculativeDecoder,
    prompts: Sequence[Sequence[int]],
    *,
    num_nodes: Sequence[int | str],
    max_new_tokens: int,
    repeats: int = 1,
    warmup: int = 0,
) -> list[Run]:
    """Decode every prompt in every setting, ``repeats`` times; the order of settings rotates.

    prompts: token ids
    warmup: so many prompts are first decoded untimed, up to 32 tokens each
    """
    settings: list[int | str] = [VANILLA, *num_nodes]

    def run(setting: int | str, prompt: int, max_new_tokens: int) -> Run:
        decoder = vanilla if setting == VANILLA else speculative
        if setting != VANILLA:
            decoder.num_nodes = setting
        return time_run(decoder, setting, prompt, prompts[prompt], max_new_tokens)

    for prompt in range(min(warmup, len(prompts))):
        for setting in settings:
            run(setting, prompt, min(max_new_tokens, WARMUP_TOKENS))
    runs = []
    order = [(repeat, prompt) for repeat in range(repeats) for prompt in range(len(prompts))]
    for repeat, prompt in tqdm(order, desc="profile", unit="prompt"):
        first = (prompt + repeat) % len(settings)
        for setting in settings[first:] + settings[:first]:
            runs.append(run(setting, prompt, max_new_tokens))
    return runs


def time_run(
    decoder: SpeculativeDecoder,
    setting: int | str,
    prompt: int,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
) -> Run:
    """Decode one prompt once, with every stage recorded."""
    decoder.batch.recorder = recorder = StageRecorder()
    token_ids: list[int] = []
    first = 0
    begin = end = time.perf_counter_ns()
    for chunk in decoder.stream(prompt_ids, max_new_tokens=max_new_tokens):
        end = time.perf_counter_ns()
        first = first or end
        token_ids += chunk.token_ids
    decoder.batch.recorder = NullRecorder()
    return Run(setting, prompt, len(prompt_ids), tuple(token_ids), begin, first, end, tuple(recorder.steps))


def time_verify(backbone: TargetModel, prompt: Sequence[int], sizes: Sequence[int]) -> dict[int, list[float]]:
    """Milliseconds of verify passes over a chain of n rows, by n; sizes take turns in every round."""
    token_ids = np.asarray(prompt, dtype=np.int64)
    for start in range(0, token_ids.size, backbone.prefill_chunk_size):
        backbone.prefill(token_ids[start : start + backbone.prefill_chunk_size], start)
    trees = {size: _chain(np.resize(token_ids, size)) for size in sizes}
    times: dict[int, list[float]] = {size: [] for size in sizes}
    # The largest first: the cache does not move after it.
    for size in sorted(sizes, reverse=True):
        backbone.load([trees[size]], [token_ids.size])
        backbone.verify()
    for _ in range(VERIFY_ROUNDS):
        for size, tree in trees.items():
            backbone.load([tree], [token_ids.size])
            begin = time.perf_counter_ns()
            backbone.verify()
            times[size].append((time.perf_counter_ns() - begin) / 1e6)
    return times


def _chain(tokens: NDArray[np.int64]) -> TokenTree:
    nodes = np.arange(tokens.size)
    return TokenTree(tokens, nodes - 1, nodes, np.zeros(tokens.size))

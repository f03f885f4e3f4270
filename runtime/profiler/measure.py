"""Timing on real decoders: whole completions in every setting, and single verify passes."""

import time
from collections.abc import Sequence

import numpy as np
from tqdm import tqdm

from runtime.decoder import SpeculativeDecoder
from runtime.decoding.recorder import StageRecorder, recording
from runtime.decoding.target_model import TargetModel, VerifyOutput
from runtime.errors import RequestError, UserError
from runtime.profiler.runs import PLAIN, Run
from runtime.text.prompts import Prompt
from runtime.trees.token_tree import TokenTree

VERIFY_ROUNDS = 20
WARMUP_TOKENS = 32


def encode_prompts(
    decoder: SpeculativeDecoder, prompts: Sequence[Prompt], *, max_new_tokens: int, where: str
) -> list[list[int]]:
    """Token ids of all prompts, each of which can be served.

    Raises UserError for one that cannot, before anything is measured; ``where`` names the file in it.
    """
    encoded = []
    for number, prompt in enumerate(prompts, 1):
        try:
            encoded.append(decoder.prompt_tokenizer.encode(prompt.text, raw=prompt.raw))
            # The call checks its arguments; nothing is decoded until it is iterated.
            decoder.stream(encoded[-1], max_new_tokens=max_new_tokens)
        except RequestError as error:
            raise UserError(f"{where} prompt {number}: {error}") from error
    return encoded


def measure_runs(
    plain: SpeculativeDecoder,
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
    settings: list[int | str] = [PLAIN, *num_nodes]

    def run(setting: int | str, prompt: int, max_new_tokens: int) -> Run:
        decoder = plain if setting == PLAIN else speculative
        if setting != PLAIN:
            decoder.num_nodes = setting
        return time_run(decoder, setting, prompt, prompts[prompt], max_new_tokens)

    for prompt in range(min(warmup, len(prompts))):
        for setting in settings:
            run(setting, prompt, min(max_new_tokens, WARMUP_TOKENS))
    runs = []
    order = [(repeat, prompt) for repeat in range(repeats) for prompt in range(len(prompts))]
    for repeat, prompt in tqdm(order, desc="profile", unit="prompt"):
        first = (prompt + repeat) % len(settings)
        runs += [run(setting, prompt, max_new_tokens) for setting in settings[first:] + settings[:first]]
    return runs


def time_run(
    decoder: SpeculativeDecoder,
    setting: int | str,
    prompt: int,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
) -> Run:
    """Decode one prompt once, with every stage recorded."""
    token_ids: list[int] = []
    first = 0
    with recording(decoder.batch, StageRecorder()) as recorder:
        begin = end = time.perf_counter_ns()
        for chunk in decoder.stream(prompt_ids, max_new_tokens=max_new_tokens):
            end = time.perf_counter_ns()
            first = first or end
            token_ids += chunk.token_ids
    return Run(setting, prompt, len(prompt_ids), tuple(token_ids), begin, first, end, tuple(recorder.steps))


def time_verify(
    target_model: TargetModel, prompt: Sequence[int], sizes: Sequence[int]
) -> dict[int, list[float]]:
    """Milliseconds of verify passes over a chain of n nodes, by n; sizes take turns in every round."""
    prefill(target_model, prompt)
    trees = {size: _chain(prompt, size) for size in sizes}
    times: dict[int, list[float]] = {size: [] for size in sizes}
    # The largest first, once and untimed: the cache does not move after it.
    for size in sorted(sizes, reverse=True):
        target_model.load([trees[size]], [len(prompt)])
        target_model.verify()
    for _ in range(VERIFY_ROUNDS):
        for size, tree in trees.items():
            target_model.load([tree], [len(prompt)])
            begin = time.perf_counter_ns()
            target_model.verify()
            times[size].append((time.perf_counter_ns() - begin) / 1e6)
    return times


def prefill(target_model: TargetModel, token_ids: Sequence[int], *, logits: bool = False) -> VerifyOutput:
    """Read token_ids [N], at least one, chunk by chunk; what the target model says after the last."""
    tokens, size = np.asarray(token_ids, dtype=np.int64), target_model.prefill_chunk
    for start in range(0, tokens.size, size):
        output = target_model.prefill(tokens[start : start + size], start, logits=logits)
    return output


def _chain(prompt: Sequence[int], size: int) -> TokenTree:
    nodes = np.arange(size)
    return TokenTree(np.resize(np.asarray(prompt, np.int64), size), nodes - 1, nodes, np.zeros(size))

"""Timing real decoders: whole completions in every setting."""

import time
from collections.abc import Sequence

from tqdm import tqdm

from runtime.decoder import SpeculativeDecoder
from runtime.runs import VANILLA, Run
from runtime.stages import NullRecorder, StageRecorder

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
    decoder.recorder = recorder = StageRecorder()
    token_ids: list[int] = []
    first = 0
    begin = end = time.perf_counter_ns()
    for chunk in decoder.stream(prompt_ids, max_new_tokens=max_new_tokens):
        end = time.perf_counter_ns()
        first = first or end
        token_ids += chunk.token_ids
    decoder.recorder = NullRecorder()
    return Run(setting, prompt, len(prompt_ids), tuple(token_ids), begin, first, end, tuple(recorder.steps))

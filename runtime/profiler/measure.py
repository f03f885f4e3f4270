"""What the profiler measures on real decoders: completions in every setting, verify passes, logit gaps."""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from tqdm import tqdm

from runtime.core.bundle import Bundle
from runtime.core.errors import UserError
from runtime.core.token_tree import TokenTree
from runtime.decode.budget import NodeBudget
from runtime.decode.step import HostStep
from runtime.decode.target_model import TargetModel
from runtime.decoder import SpeculativeDecoder
from runtime.engines.recorder import StageRecorder, recording
from runtime.load.host import load_target_model
from runtime.profiler.runs import Difference, Run, find_differences, plain_outputs

VERIFY_ROUNDS = 20
WARMUP_TOKENS = 32


def host_step(decoder: SpeculativeDecoder) -> HostStep:
    """Return the decoder's runner as the host's, whose parts can be measured one by one.

    Raises UserError for a bundle whose steps are of another kind.
    """
    runner = decoder.batch.runner
    if not isinstance(runner, HostStep):
        raise UserError(
            f"--bundle: the parts of a step are measured one by one, which a {type(runner).__name__} has not"
        )
    return runner


@dataclass(frozen=True)
class Setting:
    """A decoder and the budget of its steps; None is the decoder's own."""

    name: int | str
    decoder: SpeculativeDecoder
    budget: NodeBudget | None = None


def measure_runs(
    settings: Sequence[Setting],
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    repeats: int = 1,
    warmup: int = 0,
) -> list[Run]:
    """Decode every prompt in every setting, ``repeats`` times.

    prompts: token ids
    warmup: number of prompts that are first decoded untimed, up to 32 tokens each
    """
    for prompt_ids in prompts[:warmup]:
        run_in_turns(settings, prompt_ids, min(max_new_tokens, WARMUP_TOKENS))
    runs = []
    order = [(repeat, prompt) for repeat in range(repeats) for prompt in range(len(prompts))]
    for repeat, prompt in tqdm(order, desc="profile", unit="prompt"):
        runs += run_in_turns(settings, prompts[prompt], max_new_tokens, prompt=prompt, turn=prompt + repeat)
    return runs


def run_in_turns(
    settings: Sequence[Setting],
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    *,
    prompt: int = 0,
    turn: int = 0,
) -> list[Run]:
    """Decode one prompt in every setting and return the runs in the order of ``settings``.

    prompt: its number, which the runs hold; turn: with every turn another setting is the first
    """
    order = list(turns(len(settings), turn))
    runs = {index: time_run(settings[index], prompt_ids, max_new_tokens, prompt) for index in order}
    return [runs[index] for index in sorted(order)]


def turns(count: int, number: int) -> Iterator[int]:
    """Return the order of ``count`` settings in turn ``number``, which is a rotation.

    Successive turns begin far apart, so that a few prompts already spread over the whole cycle.
    Example: 5 settings begin with 0, 3, 1, 4, 2, 0, ...
    """
    stride = next(s for s in range(max(1, round(count * 0.618)), count + 1) if math.gcd(s, count) == 1)
    return ((number * stride + index) % count for index in range(count))


def time_run(
    setting: Setting, prompt_ids: Sequence[int], max_new_tokens: int, prompt: int = 0, *, stages: bool = True
) -> Run:
    """Decode one prompt once. stages: whether each stage of a step is recorded"""
    decoder = setting.decoder
    token_ids: list[int] = []
    first = 0
    with recording(decoder.batch.runner, StageRecorder(wants_stages=stages)) as recorder:
        begin = end = time.perf_counter_ns()
        for chunk in decoder.stream(prompt_ids, max_new_tokens=max_new_tokens, budget=setting.budget):
            end = time.perf_counter_ns()
            first = first or end
            token_ids += chunk.token_ids
    output, steps = tuple(token_ids), tuple(recorder.steps)
    return Run(setting.name, prompt, len(prompt_ids), output, begin, first, end, steps)


def compare_outputs(
    bundle: Bundle, prompts: Sequence[Sequence[int]], runs: Sequence[Run], *, num_threads: int | None = None
) -> list[Difference]:
    """Return ``find_differences`` with logit gaps, for which the target model reads the texts once more."""
    differences = find_differences(runs)
    if not differences:
        return []
    plain = plain_outputs(runs)
    target_model = load_target_model(bundle, max_nodes=1, features=False, num_threads=num_threads)
    for index, difference in enumerate(differences):
        tokens = [difference.plain_token, difference.token]
        if None not in tokens:
            prefix = [*prompts[difference.prompt], *plain[difference.prompt][: difference.position]]
            found = target_model.read(np.asarray(prefix, np.int64), logits=True)
            assert found.logits is not None
            logits = found.logits[0, 0].astype(np.float64)
            differences[index] = replace(difference, logit_gap=float(logits.max() - logits[tokens].min()))
    return differences


def time_verify(
    target_model: TargetModel, prompt: Sequence[int], sizes: Sequence[int]
) -> dict[int, list[float]]:
    """Measure verify passes over a chain of n nodes: milliseconds by n. Sizes take turns in every round."""
    target_model.read(np.asarray(prompt, np.int64))
    times: dict[int, list[float]] = {size: [] for size in sizes}

    def time_pass(size: int) -> float:
        recorder = StageRecorder()
        chain = TokenTree.chain(np.resize(np.asarray(prompt, np.int64), size))
        recorder.begin()
        target_model.verify([chain], [len(prompt)], logits=False, recorder=recorder)
        recorder.end(1, size, 0)
        return recorder.steps[0].stage_ms("verify")

    # An untimed round, the largest first, makes the cache as large as it gets.
    for size in sorted(sizes, reverse=True):
        time_pass(size)
    for _ in range(VERIFY_ROUNDS):
        for size in sizes:
            times[size].append(time_pass(size))
    return times

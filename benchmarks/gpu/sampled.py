"""Texts drawn with equal seeds: the same with every kind of step, and with the reference on the CPU."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.gpu.decoders import runner_of
from benchmarks.gpu.gate import PROMPTS, TOKENS, reference_of
from benchmarks.gpu.job import Job
from benchmarks.gpu.logit_gap import logits_after, tie_tolerance
from benchmarks.gpu.parts import FAILED, Part
from runtime.core.bundle import HOST_STEP, PLAIN
from runtime.decode.budget import FixedBudget
from runtime.decode.sampling import candidates, uniform
from runtime.decode.sampling_params import SamplingParams
from runtime.decoder import SpeculativeDecoder
from runtime.profiler.runs import Run, find_differences, plain_outputs

# Every filter of the graph that draws; the seed is the number of the prompt.
OPTIONS: dict[str, Any] = {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.02}
# A larger distance is no tie, however the type of the activations rounds.
MOST_DRAW_GAP = 0.1
EAGER, REFERENCE = "not captured", "reference on the CPU"
HEADER = ["steps", "equal", "ties", "mismatches"]


def add_sampled(job: Job, part: Part) -> None:
    """Compare drawn texts with those of plain steps on the device; one that is no tie fails the part."""
    prompts, count = job.prompts[:PROMPTS], min(TOKENS, job.max_new_tokens)
    runs: list[Run] = []
    *_, (_, method_of_last, nodes_of_last) = job.settings
    settings = [*job.settings, (EAGER, method_of_last, nodes_of_last)]
    for name, method, nodes in tqdm(settings, desc="sampled", unit="setting", leave=False):
        decoder = job.decoders.get(method)
        with _capture(decoder, wanted=name != EAGER):
            runs += _decode(decoder, prompts, nodes, name, count)
    names = [name for name, _, _ in settings]
    reference = reference_of(job)
    if reference is not None:
        names.append(REFERENCE)
        decoder = SpeculativeDecoder.from_bundle(
            reference.path,
            method=PLAIN,
            step=HOST_STEP,
            max_length=max(map(len, prompts)) + count,
            num_threads=job.decoders.num_threads,
            verify=False,
        )
        runs += _decode(decoder, prompts, 0, REFERENCE, count)
    tolerance = min(tie_tolerance(job.bundle), MOST_DRAW_GAP)
    plain = plain_outputs(runs)
    rows: list[list[str]] = [HEADER]
    data: list[dict[str, Any]] = []
    differences = find_differences(runs)
    gaps = {}
    for each in differences:
        tokens = [token for token in (each.plain_token, each.token) if token is not None]
        prefix = [*prompts[each.prompt], *plain[each.prompt][: each.position]]
        gap = draw_gap(job.decoders.get(PLAIN), prefix, tokens, each.prompt, each.position)
        gaps[each] = gap if len(tokens) == 2 else None
    for name in names:
        of_setting = [gaps[each] for each in differences if each.setting == name]
        ties = sum(gap is not None and gap <= tolerance for gap in of_setting)
        equal, wrong = len(prompts) - len(of_setting), len(of_setting) - ties
        rows.append([name, f"{equal}/{len(prompts)}", str(ties), str(wrong)])
        data.append({"setting": name, "equal": equal, "ties": ties, "mismatches": wrong})
    wrong = sum(row["mismatches"] for row in data)
    if wrong:
        part.status = FAILED
    equal = sum(row["equal"] for row in data)
    part.reason += (
        f"; sampled with equal seeds, {equal} of {len(data) * len(prompts)} texts are equal, {wrong} "
        f"differ in draws that are more than {tolerance:g} from the border of two tokens"
    )
    part.tables[f"{count} new tokens at most, sampled with equal seeds"] = rows
    part.data["sampled"] = {
        "rows": data,
        "options": OPTIONS,
        "draw_tolerance": tolerance,
        "differences": [
            {"setting": each.setting, "prompt": each.prompt, "position": each.position, "draw_gap": gap}
            for each, gap in gaps.items()
        ],
    }


def draw_gap(
    decoder: SpeculativeDecoder, prefix: Sequence[int], tokens: Sequence[int], seed: int, index: int
) -> float:
    """How far the number that draws is from the share of the worst of these tokens.

    Tokens have shares of [0, 1) in the order of their ids, as large as their probabilities.
    """
    scores = logits_after(decoder, prefix).astype(np.float64)
    ids, weights = candidates(scores, SamplingParams(**OPTIONS))
    ends = weights.cumsum() / weights.sum()
    number, worst = uniform(seed, index), 0.0
    for token in tokens:
        # A token that the filters leave out has no share, but a place between those of its neighbours.
        place = int(np.searchsorted(ids, token))
        low = float(ends[place - 1]) if place else 0.0
        high = float(ends[place]) if place < ids.size and ids[place] == token else low
        worst = max(worst, low - number, number - high)
    return worst


@contextmanager
def _capture(decoder: SpeculativeDecoder, *, wanted: bool) -> Iterator[None]:
    runner = runner_of(decoder)
    before = runner.capture
    runner.capture = before and wanted
    try:
        yield
    finally:
        runner.capture = before


def _decode(
    decoder: SpeculativeDecoder, prompts: Sequence[Sequence[int]], nodes: int, name: str, count: int
) -> list[Run]:
    """Every prompt, drawn with its own seed."""
    runs = []
    for seed, prompt in enumerate(prompts):
        chunks = decoder.stream(
            prompt,
            max_new_tokens=count,
            budget=FixedBudget(nodes),
            sampling=SamplingParams(**OPTIONS, seed=seed),
        )
        tokens = tuple(token for chunk in chunks for token in chunk.token_ids)
        runs.append(Run(name, seed, len(prompt), tokens, 0, 0, 0, ()))
    return runs

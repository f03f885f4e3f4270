"""Do plain and speculative steps on the device write the same texts, greedy and drawn with equal seeds?

The reference on the CPU draws the same texts too. Only greedy texts are timed.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.gpu.decoders import runner_of
from benchmarks.gpu.engine_gate import logit_gap, logits_after, tie_tolerance
from benchmarks.gpu.gate import PROMPTS, TOKENS, reference_of, runs_on_host
from benchmarks.gpu.job import Job
from benchmarks.gpu.parts import FAILED, PASSED, Part, Skip, cell
from runtime.core.bundle import HOST_STEP, PLAIN
from runtime.decode.acceptance import candidates, uniform
from runtime.decode.budget import FixedBudget
from runtime.decode.sampling_params import SamplingParams
from runtime.decoder import SpeculativeDecoder
from runtime.engines.recorder import StageRecorder, recording
from runtime.profiler.report import acceptance_length, ms_per_token
from runtime.profiler.runs import Difference, Run, find_differences, plain_outputs

GREEDY_HEADER = ["steps", "equal", "ties", "mismatches", "tokens/step", "tokens/s", "speedup"]
# Every filter of the graph that draws; the seed is the number of the prompt.
OPTIONS: dict[str, Any] = {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.02}
# A larger distance is no tie, however the type of the activations rounds.
MOST_DRAW_GAP = 0.1
EAGER, REFERENCE = "not captured", "reference on the CPU"
SAMPLED_HEADER = ["steps", "equal", "ties", "mismatches"]


def measure(job: Job) -> Part:
    """Sets ``job.num_nodes`` to the fastest size of a tree."""
    if not job.has_head:
        raise Skip("the bundle has no steps that draft")
    runs: dict[str, list[Run]] = {}
    for name, method, nodes in tqdm(job.settings, desc="lossless", unit="setting", leave=False):
        decoder = job.decoders.get(method)
        # A text of every size captures its steps, so that none of those that are timed has to.
        decode(decoder, job.prompts[0], nodes, name, 0, min(job.max_new_tokens, 16))
        runs[name] = [
            decode(decoder, prompt, nodes, name, index, job.max_new_tokens)
            for index, prompt in enumerate(job.prompts)
        ]
    found = [run for each in runs.values() for run in each]
    differences = with_gaps(job, find_differences(found), plain_outputs(found))
    tolerance = tie_tolerance(job.bundle)
    rows: list[list[str]] = [GREEDY_HEADER]
    data: list[dict[str, Any]] = []
    timed = {name: [run for run in each if run.num_steps] for name, each in runs.items()}
    speeds = {name: 1e3 / ms_per_token(each) for name, each in timed.items() if each}
    for name, _, nodes in job.settings:
        of_setting = [each for each in differences if each.setting == name]
        ties = sum(each.logit_gap is not None and each.logit_gap <= tolerance for each in of_setting)
        row: dict[str, Any] = {
            "setting": name,
            "num_nodes": nodes,
            "prompts": len(job.prompts),
            "equal": len(job.prompts) - len(of_setting),
            "ties": ties,
            "mismatches": len(of_setting) - ties,
            "tokens_per_step": acceptance_length(timed[name]) if timed[name] else None,
            "tokens_per_second": speeds.get(name),
            "speedup": speeds[name] / speeds[PLAIN] if name in speeds and PLAIN in speeds else None,
        }
        data.append(row)
        counts = [f"{row['equal']}/{row['prompts']}", str(ties), str(row["mismatches"])]
        rows.append(
            [name, *counts, *(cell(row[key]) for key in ("tokens_per_step", "tokens_per_second", "speedup"))]
        )
    fastest = max((row for row in data if row["num_nodes"]), key=lambda row: row["tokens_per_second"] or 0)
    job.num_nodes = fastest["num_nodes"]
    wrong = sum(row["mismatches"] for row in data)
    reason = (
        f"{sum(row['equal'] for row in data)} of {sum(row['prompts'] for row in data)} texts are equal; "
        f"{wrong} differ in tokens whose logits are more than {tolerance:g} apart"
    )
    part = Part(
        FAILED if wrong else PASSED,
        reason,
        tables={f"{job.max_new_tokens} new tokens at most, greedy": rows},
        data={
            "rows": data,
            "tie_tolerance": tolerance,
            "max_new_tokens": job.max_new_tokens,
            "differences": [vars(each) for each in differences],
        },
    )
    add_sampled(job, part)
    return part


def decode(
    decoder: SpeculativeDecoder, prompt: Sequence[int], nodes: int, name: str, index: int, max_new_tokens: int
) -> Run:
    """One prompt, decoded as users decode it: captured steps, the end-of-text token ends it."""
    tokens: list[int] = []
    first = 0
    with recording(runner_of(decoder), StageRecorder(wants_stages=False)) as recorder:
        begin = end = time.perf_counter_ns()
        for chunk in decoder.stream(prompt, max_new_tokens=max_new_tokens, budget=FixedBudget(nodes)):
            end = time.perf_counter_ns()
            first = first or end
            tokens += chunk.token_ids
    return Run(name, index, len(prompt), tuple(tokens), begin, first, end, tuple(recorder.steps))


def with_gaps(
    job: Job, differences: Sequence[Difference], plain: dict[int, tuple[int, ...]]
) -> list[Difference]:
    """The differences with the gaps of the two tokens' logits."""
    found = []
    for difference in differences:
        tokens = [t for t in (difference.plain_token, difference.token) if t is not None]
        if len(tokens) == 2:
            prefix = [*job.prompts[difference.prompt], *plain[difference.prompt][: difference.position]]
            gap = logit_gap(job.decoders.get(PLAIN), prefix, tokens)
            found.append(replace(difference, logit_gap=gap))
        else:
            found.append(difference)
    return found


def add_sampled(job: Job, part: Part) -> None:
    """Compare drawn texts with those of plain steps on the device; one that is no tie fails the part."""
    prompts, count = job.prompts[:PROMPTS], min(TOKENS, job.max_new_tokens)
    runs: list[Run] = []
    *_, (_, method_of_last, nodes_of_last) = job.settings
    settings = [*job.settings, (EAGER, method_of_last, nodes_of_last)]
    for name, method, nodes in tqdm(settings, desc="sampled", unit="setting", leave=False):
        decoder = job.decoders.get(method)
        with _capture(decoder, wanted=name != EAGER):
            runs += _decode_sampled(decoder, prompts, nodes, name, count)
    names = [name for name, _, _ in settings]
    reference = reference_of(job)
    if reference is not None and runs_on_host(reference):
        names.append(REFERENCE)
        decoder = SpeculativeDecoder.from_bundle(
            reference.path,
            method=PLAIN,
            step=HOST_STEP,
            max_length=max(map(len, prompts)) + count,
            num_threads=job.decoders.num_threads,
            verify=False,
        )
        runs += _decode_sampled(decoder, prompts, 0, REFERENCE, count)
    tolerance = min(tie_tolerance(job.bundle), MOST_DRAW_GAP)
    plain = plain_outputs(runs)
    rows: list[list[str]] = [SAMPLED_HEADER]
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


def _decode_sampled(
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

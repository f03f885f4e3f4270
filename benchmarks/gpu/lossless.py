"""The same prompts with plain and with speculative steps on the device: are the tokens the same?

Only greedy texts are timed; those of ``benchmarks.gpu.sampled`` are compared alone.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tqdm import tqdm

from benchmarks.gpu.decoders import runner_of
from benchmarks.gpu.job import Job
from benchmarks.gpu.logit_gap import logit_gap, tie_tolerance
from benchmarks.gpu.parts import FAILED, PASSED, Part, Skip, cell
from benchmarks.gpu.sampled import add_sampled
from runtime.core.bundle import PLAIN
from runtime.decode.budget import FixedBudget
from runtime.decoder import SpeculativeDecoder
from runtime.engines.recorder import StageRecorder, recording
from runtime.profiler.report import acceptance_length, ms_per_token
from runtime.profiler.runs import Difference, Run, find_differences, plain_outputs

HEADER = ["steps", "equal", "ties", "mismatches", "tokens/step", "tokens/s", "speedup"]


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
    rows: list[list[str]] = [HEADER]
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

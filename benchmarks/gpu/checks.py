"""Whether the device computes what a reference on the CPU computes, and all kinds of steps the same texts."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.gpu.decoders import Skip, runner_of
from benchmarks.gpu.engine_gate import (
    Found,
    activations,
    check_engines,
    logit_gap,
    logits_after,
    tie_tolerance,
)
from benchmarks.gpu.job import Job
from benchmarks.gpu.report import FAILED, PASSED, UNCHECKED, Part, cell
from export.verify.comparison import TOLERANCES
from runtime.core.bundle import HOST_STEP, MAX_NUM_NODES, PLAIN, Bundle
from runtime.core.token_tree import TokenTree
from runtime.decode.acceptance import candidates, uniform
from runtime.decode.budget import FixedBudget
from runtime.decode.sampling_params import SamplingParams
from runtime.decode.target_model import TargetModel
from runtime.decoder import SpeculativeDecoder
from runtime.engines.recorder import NullRecorder
from runtime.load.host import load_target_model
from runtime.profiler.measure import Setting, time_run
from runtime.profiler.report import acceptance_length, ms_per_token
from runtime.profiler.runs import Difference, Run, find_differences, plain_outputs

# A reference in float32 on a CPU is slow; these are enough to find an engine that computes something else.
PROMPTS, TOKENS = 4, 32
GREEDY_HEADER = ["steps", "equal", "ties", "mismatches", "tokens/step", "tokens/s", "speedup"]
# Every filter of the graph that draws; the seed is the number of the prompt.
OPTIONS: dict[str, Any] = {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.02}
# A larger distance is no tie, however the type of the activations rounds.
MOST_DRAW_GAP = 0.1
EAGER, REFERENCE = "not captured", "reference on the CPU"
SAMPLED_HEADER = ["steps", "equal", "ties", "mismatches"]


def gate(job: Job) -> Part:
    """Compare every engine with the reference; without one, show what the export compared.

    A part that leaves an engine unchecked does not pass.
    """
    part = Part(PASSED)
    validation = job.bundle.manifest.validation
    plan = job.bundle.manifest.engine_plan
    at_export = {name: checks for name, checks in validation.items() if name.endswith(".engine") or not plan}
    what = "plans" if plan else "ONNX graphs on the CPU"
    reasons = []
    unchecked = set(job.bundle.manifest.graphs)
    if at_export:
        part.tables[f"At export: {what}, largest difference from PyTorch"] = _table(at_export)
        part.data["at_export"] = at_export
        # The export refuses a larger difference than its limits, so that a bundle has none.
        reasons.append(f"{len(at_export)} {what} were within the limits of the export")
        if plan or not job.facts.is_gpu:
            unchecked -= {name.removesuffix(".engine") for name in at_export}
    reference = reference_of(job)
    if reference is not None:
        found = _compare_engines(job, reference, part)
        reasons.append(part.data["engines"]["summary"])
        unchecked -= {name for name, each in found.items() if each.passes}
        if runs_on_host(reference):
            _compare_tokens(job, reference, part)
            reasons.append(part.data["with_reference"]["summary"])
    if unchecked:
        if part.status == PASSED:
            part.status = UNCHECKED
        reasons.insert(0, f"NOT CHECKED: {', '.join(sorted(unchecked))}")
        if reference is None:
            reasons.append("--reference takes a bundle of the same model for ONNX Runtime")
    part.data["unchecked"] = sorted(unchecked)
    part.reason = "; ".join(reasons)
    return part


def reference_of(job: Job) -> Bundle | None:
    """What the device is compared with: --reference or, of ONNX files that a GPU runs, the same on a CPU."""
    if job.reference is not None:
        return Bundle.load(job.reference, verify=False)
    bundle = job.bundle
    runs_elsewhere = bundle.manifest.engine_plan is None and job.facts.is_gpu
    return bundle if runs_elsewhere and activations(bundle) != "bfloat16" else None


def runs_on_host(reference: Bundle) -> bool:
    """Whether the host can run whole steps of a reference, whose caches it keeps in float32."""
    return activations(reference) == "float32"


def _table(compared: Mapping[str, Mapping[str, float]]) -> list[list[str]]:
    rows = [["graph", "check", "value"]]
    for name, checks in compared.items():
        rows += [[name, check, f"{value:.2e}"] for check, value in checks.items()]
    return rows


def _compare_engines(job: Job, reference: Bundle, part: Part) -> dict[str, Found]:
    """Every engine of the device on inputs of the reference's own steps."""
    # The engines are loaded a second time, and the device may have no memory for both.
    job.decoders.close()
    found = check_engines(job.bundle, reference, job.decoders.device, job.prompts, job.decoders.num_threads)
    rows = [["graph", "passes", "shapes", "largest relative difference", "result"]]
    for name, each in found.items():
        result = "; ".join(each.problems) or ("equal" if each.passes else "not in the reference, NOT CHECKED")
        rows.append([name, str(each.passes), str(len(each.shapes)), f"{each.worst:.2e}", result])
    tolerance = TOLERANCES[activations(job.bundle)]
    caption = f"Engines against {reference.path.name} on ONNX Runtime, same inputs; {tolerance:g} allowed"
    part.tables[caption] = rows
    wrong = [name for name, each in found.items() if each.problems]
    others = sorted(reference.manifest.graphs.keys() - found.keys())
    checked = sum(each.passes > 0 for each in found.values())
    summary = f"{checked - len(wrong)} of {len(found)} engines compute what the reference computes"
    if wrong:
        part.status = FAILED
        summary += f", WRONG: {', '.join(wrong)}"
    if others:
        summary += f" ({', '.join(others)} only the reference has)"
    part.data["engines"] = {
        "summary": summary,
        "tolerance": tolerance,
        "only_in_reference": others,
        "rows": [
            {"graph": name, "passes": each.passes, "worst": each.worst, "problems": each.problems}
            for name, each in found.items()
        ],
    }
    return found


def _compare_tokens(job: Job, reference: Bundle, part: Part) -> None:
    """The reference reads the device's greedy texts; every token has to be as good as its best."""
    prompts = job.prompts[:PROMPTS]
    count = min(TOKENS, job.max_new_tokens, MAX_NUM_NODES)
    decoder = job.decoders.get(PLAIN)
    model = load_target_model(
        reference,
        max_nodes=count,
        features=False,
        max_num_seqs=1,
        max_length=max(map(len, prompts)) + count,
    )
    same, total, worst = 0, 0, 0.0
    for prompt in tqdm(prompts, desc="gate", unit="prompt", leave=False):
        chunks = decoder.stream(prompt, max_new_tokens=count)
        tokens = [token for chunk in chunks for token in chunk.token_ids]
        gaps = gaps_below_best(model, list(prompt), tokens)
        same += int((gaps == 0).sum())
        total += gaps.size
        worst = max(worst, float(gaps.max()))
    tolerance = TOLERANCES[activations(job.bundle)]
    if not worst <= tolerance:
        part.status = FAILED
    rows = [
        ["tokens of the device", str(total)],
        ["the reference prefers the same", str(same)],
        ["furthest below the reference's best logit, relative", cell(worst, 6)],
        ["allowed", f"{tolerance:g}"],
    ]
    part.tables[f"With {reference.path.name} on ONNX Runtime"] = [["what", "value"], *rows]
    part.data["with_reference"] = {
        "bundle": str(reference.path),
        "tokens": total,
        "same": same,
        "worst": worst,
        "tolerance": tolerance,
        "summary": f"the reference prefers {same} of {total} tokens of the device, the worst is {worst:.2e} "
        f"below its best ({tolerance:g} allowed)",
    }


def gaps_below_best(model: TargetModel, prompt: list[int], tokens: list[int]) -> np.ndarray:
    """[N] how far each of N tokens is below the model's best logit there, relative to the largest logit."""
    first = model.read(np.array(prompt, np.int64), logits=True).logits_of(0)
    assert first is not None
    # The next pass writes to the same memory.
    logits = first[:1].copy()
    if len(tokens) > 1:
        # A chain of nodes: every token is the only child of the one before it.
        nodes = np.arange(len(tokens) - 1)
        chain = TokenTree(np.array(tokens[:-1], np.int64), nodes - 1, nodes, np.zeros(nodes.size))
        found = model.verify([chain], [len(prompt)], logits=True, recorder=NullRecorder()).logits_of(0)
        assert found is not None
        logits = np.concatenate([logits, found[: nodes.size]])
    best = logits.max(axis=1)
    chosen = logits[np.arange(len(tokens)), tokens]
    scale = np.maximum(1.0, np.abs(logits).max(axis=1))
    return np.asarray((best - chosen) / scale, np.float64)


def lossless(job: Job) -> Part:
    """Whether plain and speculative steps write the same texts, greedy and drawn with equal seeds.

    The reference on the CPU draws the same texts too. Only greedy texts are timed. Sets ``job.num_nodes`` to
    the fastest size of a tree.
    """
    if not job.has_head:
        raise Skip("the bundle has no steps that draft")
    runs: dict[str, list[Run]] = {}
    for name, method, nodes in tqdm(job.settings, desc="lossless", unit="setting", leave=False):
        setting = Setting(name, job.decoders.get(method), FixedBudget(nodes))
        # A text of every size captures its steps, so that none of those that are timed has to.
        time_run(setting, job.prompts[0], min(job.max_new_tokens, 16), stages=False)
        runs[name] = [
            time_run(setting, prompt, job.max_new_tokens, index, stages=False)
            for index, prompt in enumerate(job.prompts)
        ]
    found = [run for each in runs.values() for run in each]
    differences = [
        replace(difference, logit_gap=logit_gap(job.decoders.get(PLAIN), prefix, tokens))
        if len(tokens) == 2
        else difference
        for difference, prefix, tokens in tokens_of_differences(job, found)
    ]
    tolerance = tie_tolerance(job.bundle)
    rows: list[list[str]] = [GREEDY_HEADER]
    data: list[dict[str, Any]] = []
    timed = {name: [run for run in each if run.num_steps] for name, each in runs.items()}
    speeds = {name: 1e3 / ms_per_token(each) for name, each in timed.items() if each}
    for name, _, nodes in job.settings:
        gaps = [each.logit_gap for each in differences if each.setting == name]
        row = counted(name, len(job.prompts), gaps, tolerance)
        row |= {
            "num_nodes": nodes,
            "prompts": len(job.prompts),
            "tokens_per_step": acceptance_length(timed[name]) if timed[name] else None,
            "tokens_per_second": speeds.get(name),
            "speedup": speeds[name] / speeds[PLAIN] if name in speeds and PLAIN in speeds else None,
        }
        data.append(row)
        counts = [f"{row['equal']}/{row['prompts']}", str(row["ties"]), str(row["mismatches"])]
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


def tokens_of_differences(job: Job, runs: Sequence[Run]) -> Iterator[tuple[Difference, list[int], list[int]]]:
    """Where texts differ from plain ones: the tokens before, and the two that differ, or one at an end."""
    plain = plain_outputs(runs)
    for difference in find_differences(runs):
        prefix = [*job.prompts[difference.prompt], *plain[difference.prompt][: difference.position]]
        yield difference, prefix, [t for t in (difference.plain_token, difference.token) if t is not None]


def counted(name: str, prompts: int, gaps: Sequence[float | None], tolerance: float) -> dict[str, Any]:
    """How many texts of a setting are plain ones. gaps: of each that is not; None at an end"""
    ties = sum(gap is not None and gap <= tolerance for gap in gaps)
    equal = prompts - len(gaps)
    return {"setting": name, "equal": equal, "ties": ties, "mismatches": len(gaps) - ties}


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
    gaps = {
        each: draw_gap(job.decoders.get(PLAIN), prefix, tokens, each.prompt, each.position)
        if len(tokens) == 2
        else None
        for each, prefix, tokens in tokens_of_differences(job, runs)
    }
    data = [
        counted(name, len(prompts), [gap for each, gap in gaps.items() if each.setting == name], tolerance)
        for name in names
    ]
    rows = [
        [row["setting"], f"{row['equal']}/{len(prompts)}", str(row["ties"]), str(row["mismatches"])]
        for row in data
    ]
    wrong = sum(row["mismatches"] for row in data)
    if wrong:
        part.status = FAILED
    equal = sum(row["equal"] for row in data)
    part.reason += (
        f"; sampled with equal seeds, {equal} of {len(data) * len(prompts)} texts are equal, {wrong} "
        f"differ in draws that are more than {tolerance:g} from the border of two tokens"
    )
    part.tables[f"{count} new tokens at most, sampled with equal seeds"] = [SAMPLED_HEADER, *rows]
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

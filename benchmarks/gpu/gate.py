"""Whether the device computes what the reference on the CPU computes: every engine, and whole texts."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from tqdm import tqdm

from benchmarks.gpu.engine_gate import Found, activations, check_engines, check_reference
from benchmarks.gpu.job import Job
from benchmarks.gpu.parts import FAILED, PASSED, UNCHECKED, Part, cell
from export.verify.comparison import TOLERANCES
from runtime.core.bundle import MAX_NUM_NODES, PLAIN, Bundle
from runtime.core.token_tree import TokenTree
from runtime.decode.target_model import TargetModel
from runtime.engines.ort_wheel import check_installed
from runtime.engines.recorder import NullRecorder
from runtime.load.host import load_target_model

# A reference in float32 on a CPU is slow; these are enough to find an engine that computes something else.
PROMPTS, TOKENS = 4, 32


def measure(job: Job) -> Part:
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
            _compare(job, reference, part)
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


def load_reference(path: Path, bundle: Bundle) -> None:
    """Raises UserError for a reference that cannot be one of this bundle, before anything is measured."""
    check_installed()
    check_reference(bundle, Bundle.load(path))


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


def _compare(job: Job, reference: Bundle, part: Part) -> None:
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

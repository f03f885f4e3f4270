"""Whether the device computes what the reference on the CPU computes."""

from collections.abc import Mapping

import numpy as np
from tqdm import tqdm

from benchmarks.gpu.job import Job
from benchmarks.gpu.logit_gap import activations
from benchmarks.gpu.parts import FAILED, PASSED, Part, Skip, cell
from runtime.bundle import MAX_NUM_NODES, PLAIN, Bundle
from runtime.decoding.target_model import TargetModel
from runtime.engines.recorder import NullRecorder
from runtime.errors import UserError
from runtime.load import load_target_model
from runtime.trees.token_tree import TokenTree

# How far below the reference's best logit a token of the device may be, relative to that logit: what the
# export allows a graph of this type to differ from PyTorch.
TOLERANCES = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}
# A reference in float32 on a CPU is slow; these are enough to find an engine that computes something else.
PROMPTS, TOKENS = 4, 32


def measure(job: Job) -> Part:
    """Show what the export compared and, with a reference, compare the device's tokens with it."""
    part = Part()
    validation = job.bundle.manifest.validation
    engines = {name: checks for name, checks in validation.items() if name.endswith(".engine")}
    compared = engines if job.bundle.manifest.engine_plan else validation
    what = "plans" if job.bundle.manifest.engine_plan else "ONNX graphs on the CPU"
    reasons = []
    if compared:
        part.tables[f"At export: {what}, largest difference from PyTorch"] = _table(compared)
        part.data["at_export"] = compared
        part.status = PASSED
        # The export refuses a larger difference than its limits, so that a bundle has none.
        reasons.append(f"{len(compared)} {what} were within the limits of the export")
    if job.reference is not None:
        _compare(job, Bundle.load(job.reference), part)
        reasons.append(part.data["with_reference"]["summary"])
    if not reasons:
        raise Skip(
            "NOT CHECKED: the export could not run these plans; --reference takes a bundle of the same model "
            "for ONNX Runtime"
        )
    part.reason = "; ".join(reasons)
    return part


def _table(compared: Mapping[str, Mapping[str, float]]) -> list[list[str]]:
    rows = [["graph", "check", "value"]]
    for name, checks in compared.items():
        rows += [[name, check, f"{value:.2e}"] for check, value in checks.items()]
    return rows


def _compare(job: Job, reference: Bundle, part: Part) -> None:
    """The reference reads the device's greedy texts; every token has to be as good as its best."""
    if reference.manifest.engine_plan is not None:
        raise UserError(f"--reference: must be a bundle for ONNX Runtime, got {reference.manifest.target}")
    if reference.manifest.model.vocab_size != job.bundle.manifest.model.vocab_size:
        raise UserError(f"--reference: {reference.path} holds another model, its vocabulary differs")
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
    part.status = PASSED if worst <= tolerance else FAILED
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

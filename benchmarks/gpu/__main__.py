"""Steps on a device, measured in one go: right or wrong, how fast, and where the time goes.

    python -m benchmarks.gpu --bundle engines/ --out build/gpu
    python -m benchmarks.gpu --bundle engines/ --reference onnx/ --prompts prompts.jsonl --out build/gpu
    python -m benchmarks.gpu --bundle onnx/ --device cpu --out build/gpu
    python -m benchmarks.gpu --quick --bundle engines/ --out build/quick

Writes gpu.json, gpu.md and gpu.html anew after every part, so that no measurement is lost. A part that fails
says so in the report, and the others go on. The bundle has the graphs of steps on a device
(--step-nodes of the export).
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.arguments import Parser, names, numbers
from benchmarks.gpu import checks, peers, quick, step_times
from benchmarks.gpu.decoders import Decoders, Limits, check_device, most_context
from benchmarks.gpu.engine_gate import check_reference
from benchmarks.gpu.job import Job, device_facts, encoded_prompts
from benchmarks.gpu.report import Part, as_markdown, as_page, is_bad, run_part
from benchmarks.report import write_report
from runtime.core.bundle import Bundle
from runtime.core.cli import at_least, positive
from runtime.core.errors import UserError
from runtime.engines.ort_wheel import check_installed

# In the order of the report. Verifications come first, in case the time is short.
PARTS: dict[str, Callable[[Job], Part]] = {
    "gate": checks.gate,
    "lossless": checks.lossless,
    "bandwidth": step_times.bandwidth,
    "tree_sizes": step_times.tree_sizes,
    "stages": step_times.stages,
    "host_gap": step_times.host_gap,
    "batches": step_times.batches,
    "peers": peers.measure,
}
CHECKS = ("gate", "lossless")
# Draft nodes of the measurements that have one size, until the fastest size is known.
USUAL_NODES = 16


def main(argv: list[str] | None = None) -> int:
    """Command line; 0, 1 when a check does not pass, 2 for input that cannot be used, 130 for Ctrl-C."""
    arguments = sys.argv[1:] if argv is None else argv
    if "--quick" in arguments:
        return quick.main(arguments, main)
    parser = Parser("benchmarks.gpu", __doc__)
    parser.add("--quick", action="store_true", help="a first run in stages; with --help for its options")
    parser.add("--bundle", help="engine bundle with the graphs of steps on a device")
    parser.add("--prompts", required=False, default=(), help="jsonl; default: eight prompts of its own")
    parser.add("--max-prompts", "--max-new-tokens", "--threads")
    parser.add("--device", help="cuda:0, cuda:1, ... or cpu (default: what the bundle's target runs on)")
    parser.add("--reference", type=Path, help="bundle of the same model for ONNX Runtime, for the gate")
    parser.add("--bandwidth", type=positive, help="GB/s of the device's memory, if the driver does not know")
    parser.add("--steps", type=at_least(5), default=100, help="steps of one measurement")
    parser.add("--seconds", type=positive, default=3.0, help="after which fewer steps are enough")
    parser.add("--minutes", type=positive, default=9.0, help="after which no measurement is begun")
    parser.add("--batches", type=numbers(at_least(1)), default="1,4,16", help="sequences at a time")
    parser.add("--contexts", type=numbers(at_least(1)), default="512,4096,16384", help="tokens of a sequence")
    parser.add("--peer-model", type=Path, help="Hugging Face model directory, for the other programs")
    parser.add("--parts", type=names(PARTS), default=",".join(PARTS), help="what is measured")
    parser.add("--out", help="directory of gpu.json, gpu.md and gpu.html")
    return parser.run(measure, argv)


def measure(args: argparse.Namespace) -> int:
    """Measure all parts, writing the report after each; 1 when a check fails."""
    began = time.monotonic()
    bundle = Bundle.load(args.bundle)
    manifest, plan = bundle.manifest, bundle.manifest.engine_plan
    if not manifest.step_nodes:
        raise UserError(f"--bundle: {args.bundle} has no graphs of steps; export it with --step-nodes")
    device = check_device(bundle, args.device)
    if args.reference is not None and "gate" in args.parts:
        check_installed()
        check_reference(bundle, Bundle.load(args.reference))
    prompts = encoded_prompts(bundle, args.prompts, args.max_prompts)
    longest = max(map(len, prompts)) + args.max_new_tokens
    most = most_context(bundle)
    if longest > most:
        raise UserError(
            f"--max-new-tokens: the longest prompt needs {longest} positions, the bundle has {most}"
        )
    decoders = Decoders(
        bundle,
        device,
        max_num_seqs=min(max(args.batches), plan.max_num_seqs) if plan else max(args.batches),
        max_length=max(longest, *(length for length in (1, *args.contexts) if length <= most)),
        num_threads=args.threads,
    )
    drafts = [size for size in manifest.step_nodes if size]
    usual = [size for size in drafts if size <= USUAL_NODES]
    job = Job(
        bundle=bundle,
        decoders=decoders,
        facts=device_facts(device, args.bandwidth),
        prompts=prompts,
        limits=Limits(args.steps, args.seconds),
        max_new_tokens=args.max_new_tokens,
        deadline=began + 60 * args.minutes,
        batches=args.batches,
        contexts=args.contexts,
        num_nodes=max(usual) if usual else min(drafts),
        reference=args.reference,
        peer_model=args.peer_model,
    )
    parts: dict[str, Part] = {}
    try:
        for name in tqdm(args.parts, desc="gpu", unit="part"):
            parts[name] = run_part(partial(_measure_part, name, job), after_error=decoders.close)
            write(args, job, parts)
    finally:
        decoders.close()
    print(as_markdown(_title(job), job.facts, parts))
    return 1 if is_bad(parts, CHECKS) else 0


def write(args: argparse.Namespace, job: Job, parts: dict[str, Part]) -> None:
    """Write the report of the parts so far."""
    settings: dict[str, Any] = {
        key: str(value) if isinstance(value, Path) else value
        for key, value in vars(args).items()
        if key not in ("prompts", "command")
    }
    report = {
        "device": asdict(job.facts),
        "parts": {name: part.as_json() for name, part in parts.items()},
        "settings": {**settings, "prompts": [str(path) for path in args.prompts]},
        "prompt_tokens": [len(prompt) for prompt in job.prompts],
    }
    title = _title(job)
    texts = {
        "gpu.md": as_markdown(title, job.facts, parts),
        "gpu.html": as_page(title, job.facts, parts, args.command, job.bundle, args.threads),
    }
    write_report(args, "gpu.json", report, bundle=job.bundle, texts=texts)


def _measure_part(name: str, job: Job) -> Part:
    # Verifications are never left out for lack of time.
    if name not in CHECKS:
        job.check_time()
    return PARTS[name](job)


def _title(job: Job) -> str:
    manifest = job.bundle.manifest
    where = "a GPU" if job.facts.is_gpu else "the CPU"
    head = f" with a {manifest.drafter.drafter_type} draft head" if manifest.drafter else ""
    return f"{manifest.model.name}{head} on {where}, {manifest.target}, {manifest.precision}"


if __name__ == "__main__":
    raise SystemExit(main())

"""Time and peak memory of exporting a large random model, and proof that the bundle decodes.

    python -m benchmarks.experiments.export_memory --out build/export_memory
    python -m benchmarks.experiments.export_memory --layers 4 --out build/export_memory
    python -m benchmarks.experiments.export_memory --out build/export_memory \
        --build-flags "--target tensorrt-rtx --gpu sm89 --precision int4"

The default is a Llama of TinyLlama's shape (1.1 billion parameters, 4.4 GB in float32). It is exported
by ``export/build_engines.py`` in a process of its own, whose memory is watched. Resident memory counts
the pages of mapped weight files, which the system can take back; private memory is what the export itself
holds. A bundle for ONNX Runtime also has to decode. The last line is one JSON object.
"""

import argparse
import contextlib
import multiprocessing
import shutil
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from benchmarks.arguments import Parser
from benchmarks.experiments.random_model import save_random_model
from benchmarks.report import print_result, write_report
from runtime.core.bundle import Bundle
from runtime.core.cli import at_least
from runtime.decoder import SpeculativeDecoder

ROOT = Path(__file__).parents[2]
NEW_TOKENS = 8
# Limits for the export of the default model: seconds, and resident memory in sizes of its weights.
MAX_SECONDS, MAX_RATIO = 600.0, 3.0


def main(argv: list[str] | None = None) -> int:
    """Command line; 0, 1 when a limit is passed, 2 for input that cannot be used, 130 for Ctrl-C."""
    parser = Parser("benchmarks.experiments.export_memory", __doc__)
    parser.add("--layers", type=at_least(1), default=22, help="decoder layers")
    parser.add("--build-flags", default="", help="flags for export/build_engines.py")
    parser.add("--out", help="directory for the bundle and export_memory.json")
    return parser.run(measure, argv)


def measure(args: argparse.Namespace) -> int:
    """Write the model, export it, decode with it, write and print the result."""
    args.out.mkdir(parents=True, exist_ok=True)
    directory = args.out.resolve() / "bundle"
    with tempfile.TemporaryDirectory(dir=args.out) as scratch:
        model = Path(scratch).resolve() / "model"
        # A process of its own, so that this one's memory stays free for the export.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            weights = pool.submit(write_model, model, args.layers).result()
        cost = export(model, directory, args.build_flags.split())
    try:
        result = describe(args, directory, weights, cost)
    finally:
        shutil.rmtree(directory)
    write_report(args, "export_memory.json", result)
    print_result(result)
    return 0 if result["passed"] else 1


def describe(
    args: argparse.Namespace, directory: Path, weights: int, cost: dict[str, float]
) -> dict[str, Any]:
    """The result: the settings, the cost and what the bundle is. A bundle for ONNX Runtime decodes."""
    bundle = Bundle.load(directory, verify=False)  # the decoder verifies the files
    result: dict[str, Any] = {
        "layers": args.layers,
        "build_flags": args.build_flags,
        "weights_bytes": weights,
        "engine_bytes": sum(
            record.size
            for name, record in bundle.manifest.files.items()
            if name.endswith((".data", ".engine"))
        ),
        **cost,
        "peak_rss_over_weights": round(cost["peak_rss_bytes"] / weights, 3),
        "peak_private_over_weights": round(cost["peak_private_bytes"] / weights, 3),
        "validation": bundle.manifest.validation,
        "passed": cost["export_seconds"] < MAX_SECONDS and cost["peak_rss_bytes"] < MAX_RATIO * weights,
    }
    if bundle.manifest.engine_plan:
        result["memory"] = bundle.manifest.engine_plan.memory
    else:
        result |= decode(directory)
        result["passed"] = result["passed"] and result["decoded_tokens"] == NEW_TOKENS
    return result


def write_model(directory: Path, layers: int) -> int:
    """Write a random Llama of TinyLlama's shape and a byte tokenizer; returns its bytes."""
    model = save_random_model(
        directory,
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=4,
        max_position_embeddings=2048,
    )
    return sum(p.numel() * p.element_size() for p in model.parameters())


def decode(bundle: Path) -> dict[str, float]:
    """Load the bundle and decode a few tokens."""
    began = time.perf_counter()
    decoder = SpeculativeDecoder.from_bundle(bundle, method="plain")
    loaded = time.perf_counter()
    chunks = list(decoder.stream(range(32), max_new_tokens=NEW_TOKENS, stop_token_ids=()))
    return {
        "load_seconds": round(loaded - began, 1),
        "decode_seconds": round(time.perf_counter() - loaded, 1),
        "decoded_tokens": sum(len(chunk.token_ids) for chunk in chunks),
    }


def export(model: Path, out: Path, flags: list[str]) -> dict[str, float]:
    """Run the exporter in a process of its own and measure its time and memory."""
    command = [sys.executable, "export/build_engines.py", "--model", str(model), "--out", str(out)]
    command += flags
    began, cpu_seconds, resident, private = time.perf_counter(), 0.0, 0, 0
    with psutil.Popen(command, cwd=ROOT) as child:
        while child.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                memory, times = child.memory_info(), child.cpu_times()
                resident = max(resident, memory.rss)
                private = max(private, memory.rss - memory.shared)
                cpu_seconds = times.user + times.system
            time.sleep(0.05)
    if child.returncode:
        raise SystemExit(f"the export failed with code {child.returncode}")
    return {
        "export_seconds": round(time.perf_counter() - began, 1),
        "export_cpu_seconds": round(cpu_seconds, 1),
        "peak_rss_bytes": resident,
        "peak_private_bytes": private,
    }


if __name__ == "__main__":
    raise SystemExit(main())

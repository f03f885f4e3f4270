"""``benchmarks.experiments.step_equality`` of the code for GPUs, on a device of memory.

    python -m tests.step_equality_on_memory --bundle build/demo/bundle --prompts a.jsonl --batch 3

The bundle is one for ONNX Runtime, in float32, with the graphs of device steps.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import pytest

from benchmarks.experiments import step_equality
from tests.engine_bundles import as_engine_bundle, device_of_memory

MEMORY = 2**34
MAX_CONTEXT = 1024


def main(argv: list[str]) -> int:
    """Every argument but the bundle is that of ``step_equality``."""
    parser = argparse.ArgumentParser(description=__doc__, add_help=False)
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=1)
    args, others = parser.parse_known_args(argv)
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as monkeypatch:
        engines = as_engine_bundle(
            args.bundle, Path(directory) / "bundle", max_num_seqs=args.batch, max_context=MAX_CONTEXT
        )
        device_of_memory(monkeypatch, engines).memory_limit = MEMORY
        bundles = ["--bundle", str(engines), "--reference", str(args.bundle)]
        return step_equality.main([*bundles, "--batch", str(args.batch), *others])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

"""A first run on a GPU in stages, each in a process of its own, for a machine that one has for minutes.

    python -m benchmarks.gpu --quick --bundle engines/ --out build/quick
    python -m benchmarks.gpu --quick --bundle engines/ --device cpu --small --out build/quick

smoke      memory, copies, capture, replay and a refused allocation, by PyTorch and by the CUDA runtime
gate       every engine of the bundle against ONNX Runtime on the CPU, and equal texts
kernels    whether the driver loads the project's own kernels, which the gate compares with their graphs
steps      steps of the bundle by stage and by size of tree
shapes     passes in the shape of a 7B model with random weights, by batch, context and draft nodes

A stage writes OUT/STAGE.json as it goes. One that fails, hangs or crashes leaves the others alone;
OUT/quick.json says how each ended. The bundle is one of the target torch. Nothing is fetched.
"""

import argparse
import contextlib
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.arguments import Parser, names
from benchmarks.gpu.decoders import Skip
from benchmarks.gpu.report import ERROR, MEASURED, SKIPPED
from runtime.core.cli import at_least, positive
from runtime.core.errors import DeviceError, DeviceMemoryError, UserError
from runtime.device.device import CPU

# Of every stage the share of the time; what one leaves is the next ones'.
STAGES = {"smoke": 0.12, "gate": 0.35, "kernels": 0.08, "steps": 0.2, "shapes": 0.25}
# What the stages that run parts of ``benchmarks.gpu`` have in their own directory.
REPORT = "gpu.json"


def main(argv: list[str], measure: Callable[[list[str]], int]) -> int:
    """Command line; 0, 1 if a stage failed, 2 for input that cannot be used, 130 for Ctrl-C.

    measure: the command without ``--quick``, which some stages run
    """
    parser = Parser("benchmarks.gpu", __doc__)
    parser.add("--quick", action="store_true", help="this first run in stages")
    parser.add("--bundle", help="engine bundle of the target torch with the graphs of steps")
    parser.add("--device", default="cuda:0", help="cuda:0, cuda:1, ... or cpu (default: cuda:0)")
    parser.add("--small", action="store_true", help="a small shape in place of 7B, to rehearse on a CPU")
    parser.add("--minutes", type=positive, default=8.5, help="for all stages together (default: 8.5)")
    parser.add("--threads", type=at_least(1), help="of the CPU")
    parser.add("--stages", type=names(STAGES), default=",".join(STAGES), help="which of them")
    parser.add("--stage", choices=STAGES, help="run this one in this process")
    parser.add("--until", type=float, help="with --stage, the reading of the monotonic clock when it ends")
    parser.add("--out", help="directory of the results")
    parser.set_defaults(measure=measure)
    return parser.run(run, argv)


def run(args: argparse.Namespace) -> int:
    """Run all stages, or one."""
    args.out.mkdir(parents=True, exist_ok=True)
    if args.stage:
        return _run_stage(args)
    end, shares = time.monotonic() + 60 * args.minutes, sum(STAGES[name] for name in args.stages)
    found: dict[str, Any] = {}
    for name in args.stages:
        limit = max(1.0, (end - time.monotonic()) * STAGES[name] / shares)
        shares -= STAGES[name]
        # An earlier run may have left its results in the same directory.
        for old in (args.out / f"{name}.json", args.out / name / REPORT):
            old.unlink(missing_ok=True)
        found[name] = _in_process(args, name, limit)
        print(f"{name}: {found[name]['status']} {found[name]['reason']}", flush=True)
        (args.out / "quick.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return int(any(each["status"] == ERROR for each in found.values()))


def _in_process(args: argparse.Namespace, name: str, limit: float) -> dict[str, Any]:
    """How a stage ended: its status, the reason, and its seconds."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--quick", "--stage", name]
    command += ["--bundle", str(args.bundle), "--device", args.device, "--out", str(args.out)]
    began, log = time.monotonic(), args.out / f"{name}.log"
    # The process counts what it takes to start, and all processes have the same clock.
    command += ["--until", str(began + limit), *(["--small"] if args.small else [])]
    command += ["--threads", str(args.threads)] if args.threads else []
    with log.open("w", encoding="utf-8") as stream:
        try:
            # A stage ends by itself shortly before; this is for one that hangs.
            status = subprocess.run(
                command, stdout=stream, stderr=stream, timeout=limit + 5, check=False
            ).returncode
            problem = f"ended with status {status}"
        except subprocess.TimeoutExpired:
            status, problem = -1, f"was stopped after {limit + 5:.0f} s"
    seconds = round(time.monotonic() - began, 1)
    with contextlib.suppress(OSError, ValueError):
        written = json.loads((args.out / f"{name}.json").read_text(encoding="utf-8"))
        if status in (0, 1) and written["status"] != "running":
            return {"status": written["status"], "reason": written["reason"], "seconds": seconds}
    last = log.read_text(encoding="utf-8").strip().splitlines()[-1:]
    ended = {"status": ERROR, "reason": ": ".join([problem, *last])}
    Results(args.out / f"{name}.json").write(**_parts(args.out / name), **ended)
    return {**ended, "seconds": seconds}


def _parts(out: Path) -> dict[str, Any]:
    """The parts of ``benchmarks.gpu`` that are finished, by name; none where it wrote no report yet."""
    with contextlib.suppress(OSError, ValueError):
        parts: dict[str, Any] = json.loads((out / REPORT).read_text(encoding="utf-8"))["parts"]
        return parts
    return {}


class Results:
    """What a stage has found so far, in its file from the first moment."""

    def __init__(self, path: Path):
        self._path = path
        self.values: dict[str, Any] = {"status": "running", "reason": ""}
        with contextlib.suppress(OSError, ValueError):
            self.values = json.loads(path.read_text(encoding="utf-8"))
        self.write()

    def write(self, **values: Any) -> None:
        self.values |= values
        self._path.write_text(json.dumps(self.values, indent=2) + "\n", encoding="utf-8")


def _run_stage(args: argparse.Namespace) -> int:
    if args.until is None:
        args.until = time.monotonic() + 60 * args.minutes
    results = Results(args.out / f"{args.stage}.json")
    try:
        MEASURES[args.stage](args, results)
        results.write(status=MEASURED)
    except Skip as skip:
        results.write(status=SKIPPED, reason=str(skip))
    except Exception as error:
        results.write(status=ERROR, reason=f"{type(error).__name__}: {error}")
        raise
    return 0


def smoke(args: argparse.Namespace, results: Results) -> None:
    """What the code for devices asks of a driver, in small."""
    from runtime.device.pytorch.device import open_torch_device

    opened: dict[str, Callable[[], Any]] = {"torch": lambda: open_torch_device(args.device, args.threads)}
    if args.device != "cpu" and importlib.util.find_spec("cuda") is not None:
        from runtime.device.cuda import open_cuda_device

        opened["cuda"] = lambda: open_cuda_device(args.device)
    problems = []
    for name, open_device in opened.items():
        try:
            results.write(**{name: _use(open_device())})
        except (DeviceError, AssertionError) as error:
            problems.append(f"{name}: {error}")
            results.write(**{name: {"error": str(error)}})
    if problems:
        raise DeviceError("; ".join(problems))


def _use(device: Any) -> dict[str, Any]:
    """Allocate, copy, capture, replay, and fail to allocate. Raises AssertionError for a wrong value."""
    import numpy as np

    done: dict[str, Any] = {}
    try:
        first, second = (device.allocate((4, 256), "float32") for _ in range(2))
        host, back = (device.host_array((4, 256), "float32") for _ in range(2))

        def work() -> None:
            device.upload(host, first)
            device.copy_blocks(first, second, count=4, size=512, pitch=1024)
            device.copy(first.rows(0, 1), second.rows(3, 4))
            device.download(second, back)

        def check(what: str, launch: Callable[[], None]) -> None:
            host[...] = np.random.default_rng(len(done)).random(host.shape)
            begin = device.mark()
            launch()
            end = device.mark()
            device.synchronize()
            expected = np.where(np.arange(256) < 128, host, 0)
            expected[3] = host[0]
            assert np.array_equal(back, expected), f"{what} gave other values"
            done[what] = {"ms": device.milliseconds(begin, end)}

        check("copies", work)
        captured = device.capture(work)
        for count in range(3):
            check(f"replay {count}", captured)
        if getattr(device, "is_gpu", False):
            free, total = device.free_memory()
            done["memory"] = {"free": free, "total": total}
            try:
                device.allocate((2 * total,), "bool")
                raise AssertionError("twice the GPU's memory was allocated")
            except DeviceMemoryError as error:
                done["refused"] = str(error)
            check("after a refusal", captured)
        return done
    finally:
        device.close()


def gate(args: argparse.Namespace, results: Results) -> None:
    """The checks of ``benchmarks.gpu`` on the bundle."""
    # On a CPU too the engines are compared, with ONNX Runtime's of the same files.
    settings = ["--reference", str(args.bundle), "--max-prompts", "1" if args.small else "4"]
    _measure(args, results, "gate,lossless", *settings)


def kernels(args: argparse.Namespace, results: Results) -> None:
    """Load the kernels. With them on a GPU, the gate compares them in place of the step-logic graphs."""
    from runtime.device.device import as_gpu
    from runtime.device.kernels.driver import CudaKernels, load_driver

    driver = None if args.device == CPU else load_driver()
    if driver is None:
        raise Skip("kernels need a GPU and cuda-bindings")
    from runtime.device.pytorch.device import open_torch_device  # imports torch

    device = open_torch_device(args.device, args.threads)
    try:
        gpu = as_gpu(device)
        assert gpu is not None
        results.write(shared_bytes=CudaKernels(driver, gpu).max_shared_bytes)
    finally:
        device.close()


def steps(args: argparse.Namespace, results: Results) -> None:
    """Times of the bundle's own steps."""
    settings = ["--batches", "1,4,16", "--contexts", "512,2048", "--seconds", "1", "--max-prompts", "4"]
    if args.small:
        settings = ["--batches", "1,2", "--contexts", "64", "--steps", "5", "--seconds", "0.2"]
        settings += ["--max-prompts", "1"]
    _measure(args, results, "bandwidth,tree_sizes,stages,host_gap,batches", *settings)


def _measure(args: argparse.Namespace, results: Results, parts: str, *settings: str) -> None:
    """Parts of ``benchmarks.gpu``, whose own files are in a directory of the stage."""
    out = args.out / args.stage
    command = ["--bundle", str(args.bundle), "--device", args.device, "--out", str(out), "--parts", parts]
    minutes = max(args.until - time.monotonic(), 1.0) / 60
    command += ["--max-new-tokens", "16" if args.small else "48", "--minutes", str(minutes), *settings]
    command += ["--threads", str(args.threads)] if args.threads else []
    status = args.measure(command)
    results.write(**_parts(out))
    if status:
        raise UserError(f"benchmarks.gpu ended with status {status}; {out}.log and {out}/gpu.md say why")


def shapes(args: argparse.Namespace, results: Results) -> None:
    """Every pass of a step in the shape of a large model, captured where the device captures."""
    from benchmarks.gpu.shapes import measure

    measure(args, results.write)


MEASURES: dict[str, Callable[[argparse.Namespace, Results], None]] = {
    "smoke": smoke,
    "gate": gate,
    "kernels": kernels,
    "steps": steps,
    "shapes": shapes,
}

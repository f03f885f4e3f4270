"""Compiles the step-logic graphs (without weights) of every kind of draft head.

    python -m benchmarks.experiments.step_table --out build/step_table

They are compiled in fp16 for 1 to 8 sequences with TensorRT for RTX, which needs no GPU, for the random heads
of ``benchmarks.experiments.compile_table``. Writes step_table.json and a table of layers, seconds and plan
sizes. Layers are those of the network that the compiler parsed; in brackets, how many of them compute
something, and how many of these are not elementwise. Kernels cannot be counted, because no engine can be
loaded without a GPU.
"""

import argparse
import contextlib
import io
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from tqdm import tqdm

from benchmarks.arguments import Parser, names
from benchmarks.experiments.compile_table import HEADS, MAX_BATCH, write_random
from benchmarks.report import markdown_table, write_report
from export.errors import ExportError
from export.forms import graph_forms
from export.graphs.contracts import target_model_contract
from export.heads import prepare_drafter
from export.options import Options
from export.quantisation.precision import Precision
from export.source import load_source
from export.step.build import write_step_graphs
from export.trt.compiler import compile_engine, load_library
from export.trt.plan import backbone_capacity, draft_plan, drafter_capacity, step_profiles

STEP_NODES = (0, 4, 8, 16, 32)
# Layers that name constants and shapes, or give a tensor another shape: no kernel works for them.
WITHOUT_WORK = ("CONSTANT", "SHAPE", "SHUFFLE", "SQUEEZE", "UNSQUEEZE", "IDENTITY", "ATTENTION_OUTPUT")
# Layers that compute every element of a tensor by itself, which compilers join with their neighbours.
ELEMENTWISE = ("CAST", "ELEMENTWISE", "UNARY", "ACTIVATION", "SELECT", "FILL", "SLICE", "DEQUANTIZE")


def main(argv: list[str] | None = None) -> int:
    """Command line; 0, 1 when a graph did not compile, 2 for input that cannot be used, 130 for Ctrl-C."""
    parser = Parser("benchmarks.experiments.step_table", __doc__)
    parser.add("--heads", type=names(HEADS), default=",".join(HEADS), help="a comma list")
    parser.add("--gpu", default="sm89", help="to compile for (default sm89)")
    parser.add("--out", help="directory for step_table.json and step_table.md")
    return parser.run(measure, argv)


def measure(args: argparse.Namespace) -> int:
    """Compile the step-logic graphs of every head, write and print the table."""
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for head in tqdm(args.heads, desc="heads"):
            rows += _compile_steps(Path(scratch) / head, head, args.gpu)
    graphs = list(dict.fromkeys(row["graph"] for row in rows))
    cells: dict[str, dict[str, str]] = {}
    for row in rows:
        cell = row["result"]
        if cell == "built":
            layers = f"{row['layers']} layers ({row['working']}, {row['not_elementwise']})"
            cell = f"{layers}, {row['seconds']:.1f} s, {row['plan_mib']:.1f} MiB"
        cells.setdefault(row["graph"], {})[row["head"]] = cell
    table = markdown_table(
        ("graph", *args.heads),
        ([graph, *(cells[graph].get(head, "") for head in args.heads)] for graph in graphs),
    )
    write_report(args, "step_table.json", {"rows": rows}, texts={"step_table.md": table + "\n"})
    print(table)
    return 0 if all(row["result"] == "built" for row in rows) else 1


def _compile_steps(directory: Path, head: str, gpu: str) -> list[dict[str, Any]]:
    source = load_source(*write_random(directory, head))
    assert source.drafter is not None
    config, options = source.drafter.config, Options(precision="fp16", gpus=(gpu,), max_batch=MAX_BATCH)
    plan = replace(draft_plan(source.spec, options), max_nodes=STEP_NODES[-1])
    half = Precision("float16")
    forms = graph_forms(
        source,
        options,
        half,
        half,
        backbone_capacity=backbone_capacity(plan, config),
        drafter_capacity=drafter_capacity(plan, config, options),
        sliced=("backbone", "drafter"),
    )
    library, prepared = load_library("tensorrt-rtx"), prepare_drafter(source.drafter, options)
    contract, rows = target_model_contract(source.spec), []
    with contextlib.redirect_stderr(io.StringIO()):
        arguments = (directory, forms, source.spec, contract, prepared.on_device, STEP_NODES)
        for graph in write_step_graphs(*arguments):
            written, path = graph.written, graph.written.path
            profiles = step_profiles(plan, config, options, written.contract, path.stem)
            row: dict[str, Any] = {"head": head, "frames": config.num_frames, "graph": path.stem}
            began = time.perf_counter()
            try:
                engine = compile_engine(library, path, written.contract, profiles, capabilities=(gpu,))
            except ExportError as error:
                rows.append({**row, "result": str(error)})
                continue
            rows.append(
                {
                    **row,
                    **count_layers(engine.layers),
                    "seconds": time.perf_counter() - began,
                    "plan_mib": engine.plan.nbytes / 2**20,
                    "activation_mib": engine.activation_bytes / 2**20,
                    "result": "built",
                }
            )
    return rows


def count_layers(kinds: Mapping[str, int]) -> dict[str, int]:
    """All layers, those that compute something, and those of these that are not elementwise.

    Example: {"CONSTANT": 3, "CAST": 2, "TOPK": 1} -> layers 6, working 3, not_elementwise 1
    """
    working = {kind: count for kind, count in kinds.items() if kind not in WITHOUT_WORK}
    return {
        "layers": sum(kinds.values()),
        "working": sum(working.values()),
        "not_elementwise": sum(count for kind, count in working.items() if kind not in ELEMENTWISE),
    }


if __name__ == "__main__":
    raise SystemExit(main())

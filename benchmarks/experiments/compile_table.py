"""Compiles the graphs of every family of target models and every kind of draft head in every precision.

    python -m benchmarks.experiments.compile_table --out build/compile_table
    python -m benchmarks.experiments.compile_table --out build/compile_table \\
        --graphs gemma2,eagle --precisions fp16

``export/build_engines.py`` builds small random models for one kind of GPU with TensorRT for RTX, which works
on a machine without a GPU. A family is built without a head, and a head with a random Llama, because the two
graphs of a bundle do not depend on each other. Writes compile_table.json and a table of plan sizes, seconds,
and differences from PyTorch of the graph that was compiled.
"""

import argparse
import contextlib
import io
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.arguments import Parser, names
from benchmarks.experiments.random_model import random_head, save_tokenizer
from benchmarks.report import markdown_table, write_report
from drafters.target_models import MODEL_FAMILIES
from export.build_engines import build
from export.errors import ExportError
from export.options import Options
from export.quantisation.precision import PRECISIONS

SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
# Settings that show what is special about a family, if its default configuration does not at these sizes.
SETTINGS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 8},
    "mixtral": {"sliding_window": 8, "num_local_experts": 4},
    "qwen3": {"head_dim": 32},
    "qwen3_moe": {"head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "gemma2": {"head_dim": 32, "sliding_window": 8},
    "gemma3_text": {
        "head_dim": 32,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "smollm3": {"no_rope_layers": [1, 0]},
    # By default its attention scores are not scaled down, which random weights make very large.
    "granite": {"embedding_multiplier": 3.0, "attention_multiplier": 0.25, "logits_scaling": 5.0},
}
HEADS: dict[str, dict[str, Any]] = {
    "ctc": {"num_frames": 12, "transition": "mlp", "frame_start": "fused"},
    "ctc-paper": {},
    "block": {"drafter_type": "block"},
    "markov": {"drafter_type": "block", "transition": "markov"},
    "medusa": {"drafter_type": "medusa", "trunk": "residual", "num_layers": 0, "own_lm_head": True},
    "hydra": {"drafter_type": "hydra", "num_layers": 0},
    "hydra++": {"drafter_type": "hydra", "num_layers": 1, "head_depth": 2},
    "eagle": {"drafter_type": "eagle"},
}
MAX_BATCH = 8
COLUMNS = ("graph", "precision", "plan MiB", "seconds", "largest difference", "same preference", "result")


def main(argv: list[str] | None = None) -> int:
    """Command line; 0, 1 when a graph did not compile, 2 for input that cannot be used, 130 for Ctrl-C."""
    parser = Parser("benchmarks.experiments.compile_table", __doc__)
    graphs = [*MODEL_FAMILIES, *HEADS]
    parser.add("--graphs", type=names(graphs), default=",".join(graphs), help="families and heads")
    parser.add("--precisions", type=names(PRECISIONS), default=",".join(PRECISIONS), help="a comma list")
    parser.add("--gpu", default="sm89", help="to compile for (default sm89)")
    parser.add("--out", help="directory for compile_table.json and compile_table.md")
    return parser.run(measure, argv)


def measure(args: argparse.Namespace) -> int:
    """Build every graph, write and print the table."""
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for graph in tqdm(args.graphs, desc="graphs"):
            model, head = write_random(Path(scratch) / graph, graph)
            rows += [_build(graph, precision, model, head, args.gpu) for precision in args.precisions]
    table = markdown_table(COLUMNS, ([str(row[column]) for column in COLUMNS] for row in rows))
    write_report(args, "compile_table.json", {"rows": rows}, texts={"compile_table.md": table + "\n"})
    print(table)
    return 0 if all(row["result"] == "built" for row in rows) else 1


def write_random(directory: Path, graph: str) -> tuple[Path, Path | None]:
    """A random model, and a random head if the graph is one."""
    torch.manual_seed(0)
    kind = graph if graph in MODEL_FAMILIES else "llama"
    config = AutoConfig.for_model(kind, **{**SIZES, **SETTINGS.get(kind, {})})
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(directory / "model")
    save_tokenizer(directory / "model")
    if graph in MODEL_FAMILIES:
        return directory / "model", None
    head = random_head(model, **{"drafter_type": "ctc", "num_frames": 4, **HEADS[graph]})
    with torch.no_grad():
        for parameter in head.parameters():
            # Many parameters start at zero, where they would have no effect.
            parameter.add_(torch.randn_like(parameter) * 0.1)
    head.save_pretrained(directory / "head")
    return directory / "model", directory / "head"


def _build(graph: str, precision: str, model: Path, head: Path | None, gpu: str) -> dict[str, Any]:
    name = "drafter" if head else "backbone"
    row: dict[str, Any] = {"graph": graph, "precision": precision}
    began = time.perf_counter()
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            bundle = build(
                model,
                model.parent / "bundle",
                drafter_dir=head,
                target_name="tensorrt-rtx",
                options=Options(precision=precision, gpus=(gpu,), max_batch=MAX_BATCH),
            )
    except ExportError as error:
        return {**dict.fromkeys(COLUMNS, ""), **row, "result": str(error)}
    differences = dict(bundle.manifest.validation[name])
    same = differences.pop("equal_argmax")
    size = bundle.manifest.files[f"{name}.engine"].size
    return {
        **row,
        "plan MiB": round(size / 2**20, 1),
        "seconds": round(time.perf_counter() - began, 1),
        "largest difference": f"{max(differences.values()):.1e}",
        "same preference": f"{same:.0%}",
        "result": "built",
    }


if __name__ == "__main__":
    raise SystemExit(main())

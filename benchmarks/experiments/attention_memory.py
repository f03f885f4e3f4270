"""The activations that NVIDIA's builder reports of attention, by how it reads keys and values.

    python -m benchmarks.experiments.attention_memory --out build/attention_memory
    python -m benchmarks.experiments.attention_memory --sequences 1 --nodes 64 --out build/attention_memory

Two layers of a random Llama with 32 query heads and 8 key heads of 128 are exported and compiled by TensorRT
for RTX, which works on a machine without a GPU. Passes of several sequences, and of a prompt's chunk, are in
one engine. Passes read their caches in place, or the part in use, which is sliced off. Writes
attention_memory.json and a table in MiB.
"""

import argparse
import contextlib
import io
import tempfile
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.arguments import Parser
from benchmarks.report import markdown_table, write_report
from export.forms import GraphForm
from export.graphs.contracts import target_model_contract
from export.graphs.modules import TargetModelGraph
from export.options import FUSED, GROUPED
from export.pipeline import write_graph
from export.quantisation.precision import Precision
from export.trt.compiler import compile_engine, load_library
from export.trt.plan import backbone_capacity, backbone_profiles, read_bounds
from runtime.core.bundle import EnginePlan, ModelSpec
from runtime.core.cli import at_least

LAYERS, HIDDEN, VOCABULARY, HEADS, KV_HEADS, HEAD_DIM = 2, 512, 256, 32, 8, 128
READ = (512, 1024, 2048, 4096)
CHUNK = 512
FORMS = (
    ("fused, in place", FUSED, False),
    ("fused, a part", FUSED, True),
    ("grouped, a part", GROUPED, True),
)


def main(argv: list[str] | None = None) -> int:
    """Command line; 0, 2 for input that cannot be used, 130 for Ctrl-C."""
    parser = Parser("benchmarks.experiments.attention_memory", __doc__)
    parser.add("--sequences", type=at_least(1), default=16, help="that decode together (default %(default)s)")
    parser.add("--nodes", type=at_least(1), default=32, help="draft nodes of a step (default %(default)s)")
    parser.add("--context", type=at_least(1), default=8192, help="positions of a sequence")
    parser.add("--gpu", default="sm89", help="to compile for (default sm89)")
    parser.add("--out", help="directory for attention_memory.json and attention_memory.md")
    return parser.run(measure, argv)


def measure(args: argparse.Namespace) -> int:
    """Compile every form for every number of positions, write and print the table."""
    plan = EnginePlan(args.context, args.sequences, args.nodes, min(CHUNK, args.context))
    capacity = backbone_capacity(plan, None)
    read = [*(count for count in READ if count < args.context), capacity]
    rows = []
    for name, form, sliced in tqdm(FORMS, desc="forms", leave=False):
        lengths = read if sliced else [capacity]
        found = [f"{size / 2**20:.1f}" for size in activations(plan, form, lengths, args.gpu, sliced=sliced)]
        # In place, the memory is the same whatever is in use.
        rows.append([name, *(found if sliced else found * len(read))])
    table = markdown_table(["attention", *map(str, read)], rows)
    write_report(args, "attention_memory.json", {"rows": rows}, texts={"attention_memory.md": table + "\n"})
    print(table)
    return 0


def activations(plan: EnginePlan, form: str, read: list[int], gpu: str, *, sliced: bool) -> list[int]:
    """Bytes for engines whose passes read at most so many positions."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=plan.max_context,
    )
    spec = ModelSpec(
        "random",
        "llama",
        VOCABULARY,
        HIDDEN,
        LAYERS,
        KV_HEADS,
        HEAD_DIM,
        plan.max_context,
        HIDDEN,
        (),
        None,
        "",
        "",
    )
    module = TargetModelGraph(LlamaForCausalLM(config).eval(), (1,), plan.max_context, form)
    written_as = GraphForm(Precision("float16"), "float16", backbone_capacity(plan, None), sliced=sliced)
    found = []
    with tempfile.TemporaryDirectory() as directory, contextlib.redirect_stderr(io.StringIO()):
        path = Path(directory) / "backbone.onnx"
        graph, _ = write_graph(module, target_model_contract(spec), path, written_as, lambda _: None)
        for count in read:
            profiles = backbone_profiles(plan, None, graph.contract)
            if sliced:
                profiles = tuple({**each, "R": read_bounds(count)} for each in profiles)
            library = load_library("tensorrt-rtx")
            engine = compile_engine(library, path, graph.contract, profiles, capabilities=(gpu,))
            found.append(engine.activation_bytes)
    module.close()
    return found


if __name__ == "__main__":
    raise SystemExit(main())

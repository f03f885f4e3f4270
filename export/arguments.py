"""The arguments of ``export.build_engines``: every field of ``Options`` has one of its name."""

import argparse
import os
from pathlib import Path

from export.options import STREAM_PASSES, VERIFY_PASS, Options
from export.precision import PRECISIONS
from export.targets import DEFAULT_HEAD_PRECISION, TARGETS, VLLM
from runtime.core.cli import Parser


def parser(doc: str | None) -> argparse.ArgumentParser:
    """The command's parser; ``doc`` is its description, with examples."""
    found = Parser("build_engines", "export.build_engines", doc)
    _add_inputs(found.add_argument_group("model, head and result"))
    _add_weights(found.add_argument_group("weights"))
    _add_engine(found.add_argument_group("engines of a GPU, and steps on a device"))
    _add_drafting(found.add_argument_group("drafting"))
    found.set_defaults(parallel=len(os.sched_getaffinity(0)) > 1)
    return found


def _add_inputs(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--model", type=Path, required=True, help="Hugging Face model directory, or OWNER/NAME")
    text = "draft head directory; without it the bundle decodes plainly"
    add("--drafter", type=Path, help=text)
    text = "bundle directory; an earlier bundle is replaced"
    add("--out", type=Path, required=True, help=text)
    text = f"auto (default) or one of: {', '.join((*TARGETS, VLLM))} (writes a draft directory)"
    add("--target", default="auto", help=text)
    add("--max-context", type=int, help="serve at most this many positions")
    text = "take a draft head of another model of the same sizes: fewer drafts are accepted"
    add("--force", action="store_true", help=text)


def _add_weights(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--precision",
        choices=PRECISIONS,
        default=Options.precision,
        help=f"precision of the target model's weights (default {Options.precision}); int8, int4 and "
        "fp8 quantise them, which changes what the model says",
    )
    add(
        "--drafter-precision",
        choices=PRECISIONS,
        default=Options.drafter_precision,
        help=f"precision of the draft head's weights, which never changes the output (default: "
        f"{DEFAULT_HEAD_PRECISION} for ONNX Runtime, the target model's for streams and TensorRT)",
    )
    add(
        "--activations",
        choices=("fp16", "bf16"),
        default=Options.activations,
        help="of a TensorRT engine with quantised weights (default fp16)",
    )
    add(
        "--keep-lm-head",
        action="store_true",
        help="do not quantise the target model's LM head: better texts, more memory traffic",
    )
    add(
        "--quantize-embedding",
        action="store_true",
        help="store the token embedding in int8, with one scale for each token: smaller files, less memory",
    )
    text = "text file on which the perplexity of a quantised model is measured (default: English prose)"
    add("--quality-text", type=Path, help=text)


def _add_engine(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--attention",
        choices=("fused", "grouped", "primitive"),
        default=Options.attention,
        help="fused (default): one Attention operator; grouped: the same, with query heads that share keys "
        "as rows of one head; primitive: MatMul, Where and Softmax, which a model that caps its scores "
        "softly always has",
    )
    add(
        "--gpu",
        dest="gpus",
        type=lambda text: tuple(dict.fromkeys(text.split(","))),
        default=Options.gpus,
        help="GPUs that tensorrt-rtx compiles for, such as sm89 or sm80,sm120",
    )
    add(
        "--max-batch",
        type=int,
        default=Options.max_batch,
        help=f"sequences that a TensorRT engine decodes together at most (default {Options.max_batch})",
    )
    add(
        "--max-nodes",
        type=int,
        default=Options.max_nodes,
        help="draft nodes that a TensorRT engine verifies in a step at most (default 64 for one sequence, 16 "
        "for several)",
    )
    text = "GiB of the GPU; larger TensorRT engines with their caches are refused"
    add("--gpu-memory", type=float, default=Options.gpu_memory, help=text)
    add(
        "--step-nodes",
        type=_sizes,
        default=Options.step_nodes,
        help="draft nodes of the steps that a device can run by itself, such as 8,16,32, or none (default: "
        "none for onnxruntime; for TensorRT 4,16,64 up to --max-nodes)",
    )
    text = "file in which TensorRT keeps what it measured, for later builds"
    add("--timing-cache", type=Path, default=Options.timing_cache, help=text)


def _add_drafting(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--top-k",
        type=int,
        default=Options.top_k,
        help=f"labels of a frame, or children of a node (default {Options.top_k}); a head with a "
        "transition keeps at most the labels that its transition may move",
    )
    add(
        "--beam-width",
        type=int,
        default=Options.beam_width,
        help=f"nodes of a level that a hydra or eagle head expands at most (default {Options.beam_width})",
    )
    add(
        "--min-level-probability",
        type=float,
        default=Options.min_level_probability,
        help="a hydra or eagle head drafts no level that is reached with less than this probability "
        f"(default {Options.min_level_probability})",
    )
    text = "of speculative streams: draft in the pass that verifies (default), or in a pass of their own"
    add("--stream-pass", choices=STREAM_PASSES, default=VERIFY_PASS, help=text)
    text = "of streams in the verify pass: drafts that go on to the upper layers (default: all)"
    add("--kept-nodes", type=int, default=Options.kept_nodes, help=text)


def _sizes(text: str) -> tuple[int, ...]:
    try:
        return () if text == "none" else tuple(map(int, text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be whole numbers with commas between, or none; got {text!r}"
        ) from None

"""Build an engine bundle from a Hugging Face model and, if there is one, its draft head.

    python -m export.build_engines --model MODEL_DIR --drafter heads/ctc --out engines/
    python -m export.build_engines --model MODEL_DIR --out engines/ --precision int8 --drafter heads/ctc

The graphs are compared with PyTorch before the bundle is put in its place.
"""

import argparse
import dataclasses
import importlib.metadata
import os
import platform
import sys
import time
from pathlib import Path

from export.bundle_writer import bundle_directory, file_records
from export.inputs import check_inputs
from export.options import Options
from export.precision import PRECISIONS
from export.targets import TARGETS, resolve
from runtime.bundle import MANIFEST_NAME, TOKENIZER_NAME, Bundle, BundleManifest
from runtime.cli import Parser, exit_status

GENERATION_CONFIG_NAME = "generation_config.json"
# Packages whose versions a bundle records.
PACKAGES = ("ctc-speculator", "torch", "transformers", "onnx", "onnxscript", "onnxruntime", "tokenizers")


def build(
    model_dir: Path,
    out: Path,
    *,
    drafter_dir: Path | None = None,
    target_name: str = "auto",
    options: Options | None = None,
    max_context: int | None = None,
) -> Bundle:
    """Write the bundle ``out`` and return it. Raises UserError; leaves nothing half-written."""
    from export.source import load_source, save_tokenizer  # imports torch and Transformers

    options = options or Options()
    target = resolve(target_name, options)
    began = time.perf_counter()

    def progress(message: str) -> None:
        print(f"[{time.perf_counter() - began:6.1f} s] {message}", file=sys.stderr, flush=True)

    with bundle_directory(out) as scratch:
        progress(f"loading {model_dir}")
        source = load_source(model_dir, drafter_dir, max_context=max_context)
        save_tokenizer(source, scratch / TOKENIZER_NAME)
        # save_pretrained refuses some published configurations, among them Llama 2's.
        source.model.generation_config.to_json_file(scratch / GENERATION_CONFIG_NAME)
        built = target.build(source, scratch, options, progress)
        progress("hashing")
        manifest = BundleManifest(
            target=target.name,
            precision=options.precision,
            model=source.spec,
            drafter=built.drafter,
            graphs={name: graph.file.written.contract for name, graph in built.graphs.items()},
            files=file_records(scratch),
            versions={
                "python": platform.python_version(),
                **{name: importlib.metadata.version(name) for name in PACKAGES},
            },
            validation={
                **{name: graph.differences for name, graph in built.graphs.items()},
                **built.engine_validation,
            },
            quality=dataclasses.asdict(built.quality) if built.quality else None,
            engine_plan=built.engine_plan,
            step_nodes=built.step_nodes,
        )
        (scratch / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8")
    _report(manifest)
    progress(f"wrote {out}")
    return Bundle.load(out, verify=False)


def _report(manifest: BundleManifest) -> None:
    for graph, differences in manifest.validation.items():
        for check, value in differences.items():
            if check == "equal_argmax":
                print(f"positions where PyTorch and the {graph} prefer the same token: {value:.0%}")
            else:
                print(f"largest difference from PyTorch, {graph} {check}: {value:.2e}")
    quality = manifest.quality
    if quality:
        print(
            f"quantisation, on {quality['num_tokens']} tokens of {quality['text']}: perplexity "
            f"{quality['perplexity']:.3f}, in float32 {quality['perplexity_fp32']:.3f}; "
            f"{quality['same_greedy']:.1%} of the greedy tokens are the same"
        )


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    options = Options(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Options)})

    def command() -> int:
        resolve(args.target, options)
        check_inputs(args.model, args.drafter, args.out)
        from export.graphs.trace import silence_libraries

        silence_libraries()
        build(
            args.model,
            args.out,
            drafter_dir=args.drafter,
            target_name=args.target,
            options=options,
            max_context=args.max_context,
        )
        return 0

    return exit_status("build_engines", command, interrupted="interrupted, nothing was written")


def _sizes(text: str) -> tuple[int, ...]:
    try:
        return () if text == "none" else tuple(map(int, text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be whole numbers with commas between, or none; got {text!r}"
        ) from None


def _parser() -> argparse.ArgumentParser:
    """Every field of ``Options`` has an argument of its name."""
    parser = Parser("build_engines", "export.build_engines", __doc__)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face model directory")
    parser.add_argument(
        "--drafter", type=Path, help="draft head directory; without it the bundle decodes plainly"
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="bundle directory; an earlier bundle is replaced"
    )
    parser.add_argument("--target", default="auto", help=f"auto (default) or one of: {', '.join(TARGETS)}")
    parser.add_argument(
        "--precision",
        choices=PRECISIONS,
        default=Options.precision,
        help=f"precision of the target model's weights (default {Options.precision}); int8, int4 and "
        "fp8 quantise them, which changes what the model says",
    )
    parser.add_argument(
        "--drafter-precision",
        choices=PRECISIONS,
        default=Options.drafter_precision,
        help="precision of the draft head's weights (default: the target model's); the output is the same "
        "with any",
    )
    parser.add_argument(
        "--activations",
        choices=("fp16", "bf16"),
        default=Options.activations,
        help="of a TensorRT engine with quantised weights (default fp16)",
    )
    parser.add_argument(
        "--keep-lm-head",
        action="store_true",
        help="do not quantise the target model's LM head: better texts, more memory traffic",
    )
    parser.add_argument(
        "--quantize-embedding",
        action="store_true",
        help="store the token embedding in int8, with one scale for each token: smaller files, less memory",
    )
    parser.add_argument(
        "--gpu",
        dest="gpus",
        type=lambda text: tuple(dict.fromkeys(text.split(","))),
        default=Options.gpus,
        help="GPUs that tensorrt-rtx compiles for, such as sm89 or sm80,sm120",
    )
    parser.add_argument(
        "--max-batch",
        type=int,
        default=Options.max_batch,
        help=f"sequences that a TensorRT engine decodes together at most (default {Options.max_batch})",
    )
    parser.add_argument(
        "--max-nodes",
        type=int,
        default=Options.max_nodes,
        help="draft nodes that a TensorRT engine verifies in a step at most (default 64 for one sequence, 16 "
        "for several)",
    )
    text = "GiB of the GPU; larger TensorRT engines with their caches are refused"
    parser.add_argument("--gpu-memory", type=float, default=Options.gpu_memory, help=text)
    parser.add_argument(
        "--step-nodes",
        type=_sizes,
        default=Options.step_nodes,
        help="draft nodes of the steps that a device can run by itself, such as 8,16,32, or none (default: "
        "none for onnxruntime; for TensorRT 4,16,64 up to --max-nodes)",
    )
    parser.add_argument(
        "--timing-cache",
        type=Path,
        default=Options.timing_cache,
        help="file in which TensorRT keeps what it measured, for later builds",
    )
    parser.add_argument(
        "--quality-text",
        type=Path,
        help="text file on which the perplexity of a quantised model is measured (default: a page of English "
        "prose)",
    )
    parser.add_argument(
        "--attention",
        choices=("fused", "grouped", "primitive"),
        default=Options.attention,
        help="fused (default): one Attention operator; grouped: the same, with query heads that share keys "
        "as rows of one head; primitive: MatMul, Where and Softmax, which a model that caps its scores "
        "softly always has",
    )
    parser.add_argument(
        "--top-k",
        type=int,
        default=Options.top_k,
        help=f"labels of a frame, or children of a node (default {Options.top_k}); a head with a "
        "transition keeps at most the labels that its transition may move",
    )
    parser.add_argument(
        "--beam-width",
        type=int,
        default=Options.beam_width,
        help=f"nodes of a level that a hydra or eagle head expands at most (default {Options.beam_width})",
    )
    parser.add_argument(
        "--min-level-probability",
        type=float,
        default=Options.min_level_probability,
        help="a hydra or eagle head drafts no level that is reached with less than this probability "
        f"(default {Options.min_level_probability})",
    )
    text = "of speculative streams: drafts that go on to the upper layers (default: all)"
    parser.add_argument("--kept-nodes", type=int, default=Options.kept_nodes, help=text)
    parser.add_argument("--max-context", type=int, help="serve at most this many positions")
    parser.set_defaults(parallel=len(os.sched_getaffinity(0)) > 1)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())

"""Build an engine bundle from a Hugging Face model and, if there is one, its draft head.

    python -m export.build_engines --model MODEL_DIR --drafter heads/ctc --out engines/
    python -m export.build_engines --model MODEL_DIR --out engines/ --precision int8 --drafter heads/ctc
    python -m export.build_engines --model MODEL_DIR --drafter heads/ctc --out draft/ --target vllm

The graphs are compared with PyTorch before the bundle is put in its place. ``python export/build_engines.py``
is the same command.
"""

import argparse
import dataclasses
import pkgutil
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

from drafters.target_models import GENERATION_CONFIG
from export.directories import bundle_directory, check_inputs, draft_record_name, file_records, identity
from export.errors import ExportError
from export.options import (
    ATTENTION,
    INT8_SCALES,
    LM_HEADS,
    NUM_DRAFTS,
    STREAM_PASSES,
    TREE_TARGET,
    DraftOrder,
    Options,
)
from export.quantisation.precision import BLOCK_SIZES, PRECISIONS
from export.targets import (
    DEFAULT_HEAD_PRECISION,
    DRAFT_TARGETS,
    TARGETS,
    check_head_options,
    resolve,
    with_head_precision,
)
from runtime.core.bundle import MANIFEST_NAME, Bundle, BundleManifest
from runtime.core.cli import Parser, exit_status
from runtime.core.system import available_cores, installed_versions


def build(
    model_dir: Path,
    out: Path,
    *,
    drafter_dir: Path | None = None,
    target_name: str = "auto",
    options: Options | None = None,
    max_context: int | None = None,
    any_base: bool = False,
) -> Bundle:
    """Write the bundle ``out`` and return it. Raises UserError; leaves nothing half-written.

    any_base: as for ``load_source``
    """
    options = options or Options()
    check_inputs(model_dir, drafter_dir, out, MANIFEST_NAME, options)
    from export.quantisation.quality import CALIBRATION, QUALITY, read_text
    from export.source import load_source, save_tokenizer  # imports torch and Transformers

    for text, path in ((QUALITY, options.quality_text), (CALIBRATION, options.calibration_text)):
        read_text(text, path)  # a missing file shows before anything is loaded
    target = resolve(target_name, options)
    options = target.with_defaults(options)
    progress = _clock()
    with bundle_directory(out) as scratch:
        progress(f"loading {model_dir}")
        source = load_source(model_dir, drafter_dir, max_context=max_context, any_base=any_base)
        save_tokenizer(source, scratch)
        # save_pretrained refuses some published configurations, among them Llama 2's.
        source.model.generation_config.to_json_file(scratch / GENERATION_CONFIG)
        built = target.build(source, scratch, options, progress)
        progress("hashing")
        manifest = BundleManifest(
            target=target.name,
            precision=options.precision,
            model=source.spec,
            drafter=built.drafter,
            graphs={name: file.written.contract for name, file in built.graphs.items()},
            files=file_records(scratch),
            versions={"python": platform.python_version(), **installed_versions()},
            validation=built.differences,
            quality=built.quality,
            engine_plan=built.engine_plan,
            step_nodes=built.step_nodes,
            row_invariant=target.row_invariant(options),
            int8_products=target.int8_products(options),
        )
        (scratch / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8")
        Bundle.load(scratch, verify=False)  # refuses a manifest that could not be read
    report(manifest)
    progress(f"wrote {out}")
    return Bundle.load(out, verify=False)


def report(manifest: BundleManifest) -> None:
    """Tell the user of a new bundle that a template is missing, and print the differences and the quality."""
    if not manifest.model.prompt_prefix + manifest.model.prompt_suffix:
        print("the tokenizer has no chat template, so prompts are given to the model as plain text")
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
        from export.quantisation.quality import warning  # imports torch

        text = warning(quality["same_greedy"], manifest.precision)
        if text:
            print(text, file=sys.stderr)


def main(argv: list[str] | None = None) -> int:
    args = parser(__doc__).parse_args(argv)
    given = Options(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Options)})
    before = identity(args.out)

    def command() -> int:
        if args.target in DRAFT_TARGETS:
            check_inputs(args.model, args.drafter, args.out, draft_record_name(args.target), given)
            inputs = args.model, args.out, args.drafter, given
            order = DraftOrder(*inputs, args.max_context, args.num_nodes, any_base=args.force)
            pkgutil.resolve_name(DRAFT_TARGETS[args.target])(order, _clock())
            return 0
        if args.num_nodes is not None:
            raise ExportError(f"--num-nodes: is for --target {TREE_TARGET}; a bundle is told when it is run")
        options = with_head_precision(given, args.drafter)
        resolve(args.target, options)
        check_inputs(args.model, args.drafter, args.out, MANIFEST_NAME, given)  # before torch is imported
        check_head_options(given, args.drafter)
        if args.force and args.drafter is None:
            raise ExportError("--force: is for a draft head, got no --drafter")
        from export.graphs.trace import silence_libraries  # imports torch

        silence_libraries()
        build(
            args.model,
            args.out,
            drafter_dir=args.drafter,
            target_name=args.target,
            options=options,
            max_context=args.max_context,
            any_base=args.force,
        )
        return 0

    def interrupted() -> str:
        written = "nothing was written" if identity(args.out) == before else f"{args.out} is complete"
        return f"interrupted, {written}"

    return exit_status("build_engines", command, interrupted=interrupted)


def _clock() -> Callable[[str], None]:
    """Prints messages on stderr with the seconds since now."""
    began = time.perf_counter()

    def progress(message: str) -> None:
        print(f"[{time.perf_counter() - began:6.1f} s] {message}", file=sys.stderr, flush=True)

    return progress


def parser(doc: str | None) -> argparse.ArgumentParser:
    """The command's parser, with a flag for every field of ``Options`` but ``parallel``.

    doc: the description, with examples
    """
    found = Parser("build_engines", "export.build_engines", doc)
    _add_inputs(found.add_argument_group("model, head and result"))
    _add_weights(found.add_argument_group("weights"))
    _add_engine(found.add_argument_group("engines of a GPU, and steps on a device"))
    _add_drafting(found.add_argument_group("drafting"))
    found.set_defaults(**vars(Options(parallel=available_cores() > 1)))
    return found


def _add_inputs(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--model", type=Path, required=True, help="Hugging Face directory, OWNER/NAME, or GGUF file")
    text = "draft head directory; without it the bundle decodes plainly"
    add("--drafter", type=Path, help=text)
    text = "bundle directory; an earlier bundle is replaced"
    add("--out", type=Path, required=True, help=text)
    text = (
        f"auto (default) or one of: {', '.join(TARGETS)}; {', '.join(DRAFT_TARGETS)} (write a draft "
        "directory for that engine)"
    )
    add("--target", default="auto", help=text)
    add("--max-context", type=int, help="serve at most this many positions")
    text = f"--target {TREE_TARGET}: verify trees of N drafts (default: a chain of at most {NUM_DRAFTS})"
    add("--num-nodes", type=int, metavar="N", help=text)
    text = "take a draft head of another model of the same sizes: fewer drafts are accepted"
    add("--force", action="store_true", help=text)


def _add_weights(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--precision",
        choices=PRECISIONS,
        help=f"precision of the target model's weights (default {Options.precision}); int8, int4 and "
        "fp8 quantise them, which changes what the model says",
    )
    add(
        "--drafter-precision",
        choices=PRECISIONS,
        help=f"precision of the draft head's weights, which never changes the output (default: "
        f"{DEFAULT_HEAD_PRECISION}, for streams the target model's)",
    )
    add(
        "--activations",
        choices=("fp16", "bf16"),
        help="of engines of TensorRT and torch with quantised weights (default: fp16; bf16 beside weights in "
        "bf16, and for torch fp32 beside fp32)",
    )
    add(
        "--lm-head",
        choices=LM_HEADS,
        help="precision of the target model's LM head beside quantised weights: same as theirs, int8 beside "
        "int4 (ONNX Runtime, the default there), or float: better texts, more memory traffic",
    )
    text = "store the token embedding in int8, with one scale for each token: smaller files, less memory"
    add("--quantize-embedding", action="store_true", help=text)
    add(
        "--float-products",
        action="store_true",
        help="ONNX Runtime: compute products with quantised weights in float32, not with activations in "
        "int8: slower, and closer to the float model",
    )
    add(
        "--int8-scales",
        choices=INT8_SCALES,
        help="ONNX Runtime, --precision int8: what shares a scale. columns (default): a column of "
        "weights, a row of activations; prompts, drafts and many sequences cost least. blocks: 64 weights, "
        "64 activations; one token at a time is faster on some processors",
    )
    add(
        "--int4-block-size",
        type=int,
        choices=BLOCK_SIZES[::-1],
        help="ONNX Runtime, --precision int4: rows of the weights that share a scale (default 32). Larger "
        "blocks take less memory, and less time for several rows, and lose more; matrices whose rows are no "
        "multiple of a block take the next smaller one",
    )
    text = "text file on which the perplexity of a quantised model is measured (default: English prose)"
    add("--quality-text", type=Path, help=text)
    text = (
        "text file by whose activations weights in int4 are rounded and quantised products smoothed "
        "(default: a mixed text)"
    )
    add("--calibration-text", type=Path, help=text)


def _add_engine(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--attention",
        choices=ATTENTION,
        help="of the target model. invariant (default for ONNX Runtime): products whose sums do not depend "
        "on what a pass computes beside a token; fused (default for TensorRT): one Attention operator; "
        "grouped: the same, with query heads that share keys as rows of one head; primitive: MatMul, Where "
        "and Softmax, which a model that caps its scores softly has in place of the last two",
    )
    text = "GPUs that tensorrt-rtx compiles for, such as sm89 or sm80,sm120"
    add("--gpu", dest="gpus", type=lambda given: tuple(dict.fromkeys(given.split(","))), help=text)
    text = f"sequences that a TensorRT engine decodes together at most (default {Options.max_batch})"
    add("--max-batch", type=int, help=text)
    add(
        "--max-nodes",
        type=int,
        help="draft nodes that a TensorRT engine verifies in a step at most (default 64 for one sequence, 16 "
        "for several)",
    )
    text = "GiB of the GPU; larger TensorRT engines with their caches are refused"
    add("--gpu-memory", type=float, help=text)
    add(
        "--step-nodes",
        type=_sizes,
        help="draft nodes of the steps that a device can run by itself, such as 8,16,32, or none (default: "
        "none for onnxruntime; for TensorRT 4,16,64 up to --max-nodes)",
    )
    text = "file in which TensorRT keeps what it measured, for later builds"
    add("--timing-cache", type=Path, help=text)


def _add_drafting(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--top-k",
        type=int,
        help=f"labels of a frame, or children of a node (default {Options.top_k}); a head with a "
        "transition keeps at most the labels that its transition may move",
    )
    text = f"nodes of a level that a hydra or eagle head expands at most (default {Options.beam_width})"
    add("--beam-width", type=int, help=text)
    add(
        "--min-level-probability",
        type=float,
        help="a hydra or eagle head drafts no level that is reached with less than this probability "
        f"(default {Options.min_level_probability})",
    )
    text = "of speculative streams: draft in the pass that verifies (default), or in a pass of their own"
    add("--stream-pass", choices=STREAM_PASSES, help=text)
    text = "of streams in the verify pass: drafts that go on to the upper layers (default: all)"
    add("--kept-nodes", type=int, help=text)


def _sizes(text: str) -> tuple[int, ...]:
    try:
        return () if text == "none" else tuple(map(int, text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be whole numbers with commas between, or none; got {text!r}"
        ) from None


if __name__ == "__main__":
    raise SystemExit(main())

"""Build an engine bundle from a Hugging Face model and, if there is one, its draft head.

python export/build_engines.py --model MODEL_DIR --drafter heads/ctc --out engines/
python export/build_engines.py --model MODEL_DIR --out engines/ --target onnxruntime
"""

import argparse
import importlib.metadata
import logging
import platform
import sys
import time
import warnings
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from export.bundle_writer import bundle_directory, file_records
from export.options import DRAFTER_PRECISIONS, Options
from export.source import load_source
from export.targets import TARGETS, resolve
from runtime.bundle import (
    DEFAULT_BEAM_WIDTH,
    DEFAULT_MIN_LEVEL_PROBABILITY,
    MANIFEST_NAME,
    TOKENIZER_NAME,
    Bundle,
    BundleManifest,
)
from runtime.errors import UserError

GENERATION_CONFIG_NAME = "generation_config.json"
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
    """Write the bundle ``out`` and return it verified. Raises UserError; leaves nothing half-written."""
    options = options or Options()
    target = resolve(target_name, options.precision)
    began = time.perf_counter()

    def progress(message: str) -> None:
        print(f"[{time.perf_counter() - began:6.1f} s] {message}", file=sys.stderr, flush=True)

    with bundle_directory(out) as scratch:
        progress(f"loading {model_dir}")
        source = load_source(model_dir, drafter_dir, max_context=max_context)
        source.tokenizer.backend_tokenizer.save(str(scratch / TOKENIZER_NAME))
        # Not save_pretrained: it refuses some published configurations, Llama 2's among them.
        source.model.generation_config.to_json_file(scratch / GENERATION_CONFIG_NAME)
        built = target.build(source, scratch, options, progress)
        progress("hashing")
        manifest = BundleManifest(
            target=target.name,
            precision=options.precision,
            model=source.spec,
            drafter=built.drafter,
            graphs=built.graphs,
            files=file_records(scratch),
            versions={
                "python": platform.python_version(),
                **{name: importlib.metadata.version(name) for name in PACKAGES},
            },
            validation=built.validation,
        )
        (scratch / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8")
    for graph, differences in built.validation.items():
        for check, value in differences.items():
            print(f"largest difference from PyTorch, {graph} {check}: {value:.2e}")
    progress(f"wrote {out}")
    return Bundle.load(out, verify=False)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face model directory")
    parser.add_argument(
        "--drafter", type=Path, help="draft head directory; without it the bundle decodes plainly"
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="bundle directory; an earlier bundle is replaced"
    )
    parser.add_argument("--target", default="auto", help=f"auto (default) or one of: {', '.join(TARGETS)}")
    parser.add_argument("--precision", default="fp32", help="precision of the weights (default fp32)")
    parser.add_argument(
        "--drafter-precision",
        choices=DRAFTER_PRECISIONS,
        default="fp32",
        help="of the draft head's matrices (default fp32); the output is the same with any",
    )
    parser.add_argument(
        "--attention",
        choices=("op", "primitive"),
        default="op",
        help="one Attention operator (default), or MatMul, Where and Softmax",
    )
    parser.add_argument(
        "--top-k",
        type=int,
        default=Options.top_k,
        help=f"labels kept a frame (default {Options.top_k}); of a head with a transition at most "
        "those that it may move",
    )
    parser.add_argument(
        "--beam-width",
        type=int,
        default=DEFAULT_BEAM_WIDTH,
        help=f"nodes of a level that a hydra or eagle head expands at most (default {DEFAULT_BEAM_WIDTH})",
    )
    parser.add_argument(
        "--min-level-probability",
        type=float,
        default=DEFAULT_MIN_LEVEL_PROBABILITY,
        help="a hydra or eagle head drafts no level that is reached with less than this probability "
        f"(default {DEFAULT_MIN_LEVEL_PROBABILITY})",
    )
    parser.add_argument("--max-context", type=int, help="serve at most this many positions")
    args = parser.parse_args(argv)
    # The exporter's own chatter says nothing about the user's model.
    warnings.filterwarnings("ignore", category=FutureWarning)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    disable_progress_bar()
    try:
        build(
            args.model,
            args.out,
            drafter_dir=args.drafter,
            target_name=args.target,
            options=Options(
                precision=args.precision,
                attention=args.attention,
                top_k=args.top_k,
                beam_width=args.beam_width,
                min_level_probability=args.min_level_probability,
                drafter_precision=args.drafter_precision,
            ),
            max_context=args.max_context,
        )
    except UserError as error:
        print(f"build_engines: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("build_engines: interrupted, nothing was written", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

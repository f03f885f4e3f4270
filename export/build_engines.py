"""Build an engine bundle from a Hugging Face model and, if there is one, its draft head.

    python -m export.build_engines --model MODEL_DIR --drafter heads/ctc --out engines/
    python -m export.build_engines --model MODEL_DIR --out engines/ --precision int8 --drafter heads/ctc
    python -m export.build_engines --model MODEL_DIR --drafter heads/ctc --out draft/ --target vllm

The graphs are compared with PyTorch before the bundle is put in its place. ``python export/build_engines.py``
is the same command.
"""

import dataclasses
import importlib.metadata
import platform
from pathlib import Path

from export.arguments import parser
from export.bundle_writer import bundle_directory, file_records
from export.inputs import check_inputs
from export.options import Options
from export.progress import clock
from export.targets import VLLM, VLLM_RECORD_NAME, resolve, with_head_precision
from runtime.core.bundle import MANIFEST_NAME, Bundle, BundleManifest
from runtime.core.cli import exit_status

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
    any_base: bool = False,
) -> Bundle:
    """Write the bundle ``out`` and return it. Raises UserError; leaves nothing half-written.

    any_base: as for ``load_source``
    """
    from export.source import load_source, save_tokenizer  # imports torch and Transformers

    options = options or Options()
    target = resolve(target_name, options)
    progress = clock()
    with bundle_directory(out) as scratch:
        progress(f"loading {model_dir}")
        source = load_source(model_dir, drafter_dir, max_context=max_context, any_base=any_base)
        save_tokenizer(source, scratch)
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
    report(manifest)
    progress(f"wrote {out}")
    return Bundle.load(out, verify=False)


def report(manifest: BundleManifest) -> None:
    """Print what the user of a new bundle should know: a missing template, the differences, the quality."""
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


def main(argv: list[str] | None = None) -> int:
    args = parser(__doc__).parse_args(argv)
    given = Options(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Options)})

    def command() -> int:
        if args.target == VLLM:
            check_inputs(args.model, args.drafter, args.out, VLLM_RECORD_NAME)
            from export.vllm_target import build_vllm  # imports torch

            build_vllm(args.model, args.out, args.drafter, given, max_context=args.max_context)
            return 0
        options = with_head_precision(given, args.target, args.drafter)
        resolve(args.target, options)
        check_inputs(args.model, args.drafter, args.out, MANIFEST_NAME)
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

    return exit_status("build_engines", command, interrupted="interrupted, nothing was written")


if __name__ == "__main__":
    raise SystemExit(main())

"""How many parameters draft heads add to a target model, counted from settings alone.

    python -m benchmarks.experiments.parameters --heads demo/heads.toml demo/streams.toml

The heads are those of training's TOML files, at the sizes of Vicuna-7B unless ``--sizes`` names another
model's config.json. Nothing is downloaded or allocated.
"""

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

from benchmarks.arguments import Parser, read_json
from benchmarks.report import markdown_table
from drafters.build import count_extra_parameters, count_trained_parameters
from drafters.config import DrafterConfig, DrafterConfigError, HeadSettings
from runtime.core.errors import UserError
from training.head_config import HeadConfig, read_heads

VICUNA_7B = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
SETTINGS = [field.name for field in fields(HeadSettings)]


def main(argv: list[str] | None = None) -> int:
    parser = Parser("benchmarks.experiments.parameters", __doc__)
    parser.add("--heads", nargs="+", type=Path, required=True, metavar="TOML", help="settings of heads")
    parser.add("--sizes", type=Path, help="config.json of a model (default: the sizes of Vicuna-7B)")
    return parser.run(count, argv)


def count(args: argparse.Namespace) -> int:
    """Print a table of all heads."""
    sizes = read_sizes(args.sizes) if args.sizes else model_sizes(VICUNA_7B)
    rows = []
    for path in args.heads:
        for head in read_heads(path):
            try:
                config = head_config(head, sizes)
            except DrafterConfigError as error:
                raise UserError(f"--heads: {path}: head {head.name!r}: {error}") from error
            trained, extra = count_trained_parameters(config), count_extra_parameters(config)
            rows.append([f"`{head.name}`", config.drafter_type, f"{trained:,}", f"{extra:,}"])
    print(markdown_table(["head", "type", "trained", "needed to decode"], rows))
    return 0


def read_sizes(path: Path) -> dict[str, Any]:
    """The sizes of a model by the names of ``DrafterConfig``. Raises UserError naming what is wrong."""
    values = read_json(path, "--sizes")
    missing = [name for name in VICUNA_7B if name not in values]
    if missing:
        raise UserError(f"--sizes: {path} must be a model's config.json; {missing[0]} is missing")
    return model_sizes(values)


def model_sizes(values: dict[str, Any]) -> dict[str, Any]:
    """The sizes in the values of a model's config.json."""
    heads = values["num_attention_heads"]
    return {
        "vocab_size": values["vocab_size"],
        "hidden_size": values["hidden_size"],
        "intermediate_size": values["intermediate_size"],
        "base_num_layers": values["num_hidden_layers"],
        "num_heads": heads,
        "num_kv_heads": values.get("num_key_value_heads") or heads,
        "head_dim": values.get("head_dim") or values["hidden_size"] // heads,
    }


def head_config(head: HeadConfig, sizes: dict[str, Any]) -> DrafterConfig:
    """The head at a model's sizes."""
    settings = {name: getattr(head, name) for name in SETTINGS}
    settings["intermediate_size"] = head.intermediate_size or sizes["intermediate_size"]
    layers = head.default_target_layers(sizes["base_num_layers"])
    return DrafterConfig(**sizes | settings, target_layer_ids=layers)


if __name__ == "__main__":
    raise SystemExit(main())

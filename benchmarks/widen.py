"""Embed a small Llama in a larger shape, so that it says the same and costs as much as a large model.

    python -m benchmarks.widen --model demo/backbone --drafter demo/heads/ctc --out build/wide \\
        --hidden-size 2048 --intermediate-size 5632 --layers 22 --heads 32 --kv-heads 4

Writes OUT/model and, with a draft head, OUT/head. The text, and how many drafts are accepted, are then those
of a trained model, while every pass reads as many weights as the large shape has. A model that is as large
as those that people use takes weeks to train.

The new dimensions of the residual stream are always zero. RMSNorm divides by the mean square over all
dimensions, which falls by r = old size / new size. So its weight is multiplied by sqrt(r), its epsilon by
r. New heads and MLP units have random weights wherever they read, and zeros where they write; new layers read
values and gates from the new dimensions alone, which are zero. A new query head belongs to a new key head, or
is an additional one of an old key head.
"""

import argparse
import dataclasses
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.arguments import Parser
from drafters.build import build_drafter, load_drafter
from drafters.config import DrafterConfigError
from drafters.layers import RMSNorm
from runtime.core.cli import at_least
from runtime.core.errors import UserError

# Files of the tokenizer and of its chat template, which the larger model shares.
COPIED = ("tokenizer*", "special_tokens_map.json", "chat_template.jinja", "generation_config.json")
# Flags by the name in the model's configuration.
SIZES = {
    "hidden_size": "--hidden-size",
    "intermediate_size": "--intermediate-size",
    "num_hidden_layers": "--layers",
    "num_attention_heads": "--heads",
    "num_key_value_heads": "--kv-heads",
}


def main(argv: list[str] | None = None) -> int:
    parser = Parser("benchmarks.widen", __doc__)
    parser.add("--model", type=Path, required=True, help="Hugging Face directory of a Llama")
    parser.add("--drafter", type=Path, help="draft head of the model, which is widened too")
    for name, flag in SIZES.items():
        parser.add(flag, type=at_least(1), dest=name, help=f"new {name} (default: the model's)")
    parser.add("--out", help="directory of the larger model and head")
    return parser.run(run, argv)


def run(args: argparse.Namespace) -> int:
    from transformers import AutoModelForCausalLM

    if not (args.model / "config.json").is_file():
        raise UserError(f"--model: {args.model} has no config.json; expected a Hugging Face model directory")
    model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    sizes = {name: getattr(args, name) for name in SIZES if getattr(args, name) is not None}
    wide = widen_model(model, sizes)
    wide.save_pretrained(args.out / "model", max_shard_size="2GB")
    for pattern in COPIED:
        for file in args.model.glob(pattern):
            shutil.copy(file, args.out / "model")
    count = sum(parameter.numel() for parameter in wide.parameters())
    print(f"wrote {args.out / 'model'}: {count / 1e6:.0f} million parameters")
    if args.drafter:
        try:
            head = load_drafter(args.drafter)
        except DrafterConfigError as error:
            raise UserError(f"--drafter: {error}") from error
        widen_head(head, model.config, wide.config).save_pretrained(args.out / "head")
        print(f"wrote {args.out / 'head'}")
    return 0


@torch.no_grad()
def widen_model(model: Any, sizes: dict[str, int]) -> Any:
    """A Llama of new sizes, by their names in the configuration, whose logits are those of ``model``.

    Raises UserError for another model type, and for a shape into which the model does not fit.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    old = model.config
    _check(old, sizes)
    values = {**old.to_dict(), **sizes, "head_dim": _head_dim(old)}
    new: Any = AutoConfig.for_model(**values)
    new.rms_norm_eps = old.rms_norm_eps * old.hidden_size / new.hidden_size
    torch.manual_seed(0)
    # Every weight is random at first; what must be zero or the model's own is set below.
    wide: Any = AutoModelForCausalLM.from_config(new, dtype=torch.float32)
    hidden, inner = old.hidden_size, old.intermediate_size
    queries = _query_rows(old, new)
    keys = torch.arange(old.num_key_value_heads * _head_dim(old))
    scale = (hidden / new.hidden_size) ** 0.5
    _put(wide.model.embed_tokens.weight, model.model.embed_tokens.weight, rest=0)
    if not new.tie_word_embeddings:
        _put(wide.lm_head.weight, model.lm_head.weight)
    _put(wide.model.norm.weight, model.model.norm.weight * scale)
    for number, layer in enumerate(wide.model.layers):
        if number < old.num_hidden_layers or hidden == new.hidden_size:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        else:
            # Equal matrices, such as zeros, would be stored and read once.
            layer.self_attn.v_proj.weight[:, :hidden] = 0
            layer.mlp.gate_proj.weight[:, :hidden] = 0
    for narrow, layer in zip(model.model.layers, wide.model.layers, strict=False):
        _put(layer.input_layernorm.weight, narrow.input_layernorm.weight * scale)
        _put(layer.post_attention_layernorm.weight, narrow.post_attention_layernorm.weight * scale)
        given, attention = narrow.self_attn, layer.self_attn
        attention.q_proj.weight[queries, :hidden] = given.q_proj.weight
        attention.k_proj.weight[keys, :hidden] = given.k_proj.weight
        attention.v_proj.weight[keys, :hidden] = given.v_proj.weight
        attention.o_proj.weight[torch.arange(hidden)[:, None], queries] = given.o_proj.weight
        layer.mlp.gate_proj.weight[:inner, :hidden] = narrow.mlp.gate_proj.weight
        layer.mlp.up_proj.weight[:inner, :hidden] = narrow.mlp.up_proj.weight
        layer.mlp.down_proj.weight[:hidden, :inner] = narrow.mlp.down_proj.weight
    wide.generation_config = model.generation_config
    return wide.eval()


@torch.no_grad()
def widen_head(head: Any, old: Any, new: Any) -> Any:
    """A draft head for the larger model that drafts what ``head`` drafts for the smaller one.

    old, new: configurations of the two models
    It has as many layers, heads and MLP units as before. Only the hidden size grows, which is the model's;
    everything new in it is zero. Raises UserError for streams, which run through the model's last layers.
    """
    config = head.config
    if config.trunk_type.borrows_layers:
        raise UserError("--drafter: streams run through the model's last layers and cannot be widened")
    if config.hidden_size != old.hidden_size:
        raise UserError(
            f"--drafter: hidden_size must be the model's {old.hidden_size}, got {config.hidden_size}"
        )
    ratio = old.hidden_size / new.hidden_size
    changes: dict[str, Any] = {
        "hidden_size": new.hidden_size,
        "base_num_layers": new.num_hidden_layers,
        "rms_norm_eps": config.rms_norm_eps * ratio,
        "base_model": "model",
        # The digest is of the smaller model.
        "base_weights": "",
    }
    wide = build_drafter(dataclasses.replace(config, **changes))
    norms = {f"{name}.weight" for name, module in wide.named_modules() if isinstance(module, RMSNorm)}
    state = head.state_dict()
    for name, target in wide.state_dict().items():
        is_norm = name in norms and target.shape != state[name].shape
        _embed_blocks(target, state[name] * ratio**0.5 if is_norm else state[name], old.hidden_size)
    return wide.eval()


def _check(old: Any, sizes: dict[str, int]) -> None:
    if old.model_type != "llama":
        raise UserError(f"--model: expected a model of type llama, got {old.model_type}")
    if old.attention_bias or old.mlp_bias:
        raise UserError("--model: a Llama with biases cannot be widened")
    for name, size in sizes.items():
        if size < getattr(old, name):
            raise UserError(f"{SIZES[name]}: must be at least the model's {getattr(old, name)}, got {size}")
    heads = sizes.get("num_attention_heads", old.num_attention_heads)
    key_heads = sizes.get("num_key_value_heads", old.num_key_value_heads)
    least = old.num_attention_heads // old.num_key_value_heads
    if heads % key_heads or heads // key_heads < least:
        raise UserError(
            f"--heads: must be a multiple of --kv-heads {key_heads}, of at least {least} times as many, "
            f"got {heads}"
        )
    hidden = sizes.get("hidden_size", old.hidden_size)
    # Transformers refuses another shape, although the width of a head is given.
    if hidden % heads:
        raise UserError(f"--hidden-size: must be a multiple of --heads {heads}, got {hidden}")


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _query_rows(old: Any, new: Any) -> Tensor:
    """The rows of the old query heads in the new projection: each head stays with its key head."""
    heads = torch.arange(old.num_attention_heads)
    before = old.num_attention_heads // old.num_key_value_heads
    after = new.num_attention_heads // new.num_key_value_heads
    width = _head_dim(old)
    return ((heads // before * after + heads % before)[:, None] * width + torch.arange(width)).flatten()


def _put(target: Tensor, source: Tensor, rest: float | None = None) -> None:
    """Copy into the beginning of the last axis; fill what follows with ``rest``, if that is given."""
    if rest is not None:
        target.fill_(rest)
    target[..., : source.shape[-1]] = source


def _embed_blocks(target: Tensor, source: Tensor, hidden: int) -> None:
    """Copy blocks of ``hidden`` into larger blocks along every axis that has grown, with zeros elsewhere.

    Example: an axis of 3 layers' features, 3 * hidden, becomes 3 larger blocks, each begun by an old one.
    """
    target.zero_()
    index = []
    for before, after in zip(source.shape, target.shape, strict=True):
        places = torch.arange(before)
        if before != after:
            blocks = before // hidden
            places = places // hidden * (after // blocks) + places % hidden
        index.append(places)
    target[torch.meshgrid(*index, indexing="ij")] = source.to(target.dtype)


if __name__ == "__main__":
    raise SystemExit(main())

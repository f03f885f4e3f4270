"""A draft head as a directory that an engine of others loads beside the target model.

    OUT/config.json          the fields of Qwen3's configuration, which every engine knows, and our own
    OUT/model.safetensors    the head's weights, by the names of ``integrations.frames``

Modules named after an engine add what that engine is told: ``export.vllm_target`` and its neighbours. Before
the model's weights are loaded, they raise ExportError for a head or a target model that the engine cannot
use, and for options of engines of our own. They leave nothing half-written.

A ``block`` head with the trunk ``dspark`` and a ``markov`` transition is written in DSpark's form (arXiv
2607.05147), which engines load without a plug-in: the weights have DSpark's names, ``architectures`` is
``Qwen3DSparkModel``, every slot of a block predicts a token, and the embedding and the LM head are the
target's. The transition becomes two tables of the whole vocabulary. Here it moves only the best
``num_candidates`` labels of a frame, and so does vLLM, which is given this number as ``dspark_draft_topk``.
SGLang, TensorRT-LLM and TensorRT Edge-LLM move all labels.

A head with the trunk ``dflash`` is written in DFlash's form (arXiv 2602.06036): the same without tables, with
``architectures`` of ``DFlashDraftModel``, and the first slot of a block, the anchor's, predicts nothing.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafters.base import Drafter, save_tensors
from drafters.checkpoints.gguf_file import is_gguf
from drafters.checkpoints.loading import load_config
from drafters.config import DrafterConfig, DrafterConfigError
from drafters.model_files import local_model
from drafters.parallel import ParallelDrafter
from export.directories import bundle_directory, draft_record_name
from export.errors import ExportError
from export.options import TREE_TARGET, DraftOrder, Options, flag_of
from export.pipeline import Progress
from export.source import Source, load_source, refusing
from integrations.draft_directory import ARCHITECTURE, CHAIN, KEY, head_problem
from runtime.core.system import OURS, installed_versions

DSPARK_ARCHITECTURE, DFLASH_ARCHITECTURE = "Qwen3DSparkModel", "DFlashDraftModel"
# DSpark's names of the modules of a head, and of those of a layer.
MODULES = {
    "context.feature_proj": "fc",
    "context.context_norm": "hidden_norm",
    "norm": "norm",
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "o_proj": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "gate_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "down_proj": "mlp.down_proj",
    "input_norm": "input_layernorm",
    "post_norm": "post_attention_layernorm",
}


def dspark_problem(head: DrafterConfig, engine: str, *, whole_vocabulary: bool) -> str | None:
    """Why a head with the trunk ``dspark`` or ``dflash`` cannot be written in that form, or None.

    whole_vocabulary: the engine takes the target model's whole LM head
    """
    is_dflash = head.trunk_type.silent_start
    if head.draft_vocab_size is not None and (whole_vocabulary or is_dflash):
        form = "DFlash" if is_dflash else engine
        return f"draft_vocab_size: {form} drafts from the whole vocabulary, got {head.draft_vocab_size}"
    if not is_dflash and head.transition != "markov":
        return f"transition: expected 'markov', which DSpark has, got {head.transition!r}"
    return None


def dspark_weights(head: ParallelDrafter) -> dict[str, Tensor]:
    """The head's weights by DSpark's names.

    With a draft vocabulary of L tokens also ``lm_head.weight`` [L, H], the rows of the target's LM head, and
    ``d2t`` [L] int64: what is added to a label to get its token.
    """
    weights = {}
    for name, value in head.state_dict().items():
        if name == "draft_token_ids" or name.startswith("transition."):
            continue
        module, _, kind = name.rpartition(".")
        if module.startswith("layers."):
            _, layer, part = module.split(".")
            weights[f"layers.{layer}.{MODULES[part]}.{kind}"] = value
        else:
            weights[f"{MODULES[module]}.{kind}"] = value
    if head.transition is None:
        return weights
    with torch.no_grad():
        weights["markov_head.markov_w1.weight"] = head.transition.of_previous(
            torch.arange(head.config.vocab_size), head.embed_tokens
        )
        weights["markov_head.markov_w2.weight"] = head.transition.right(head.draft_lm_head)
    if head.draft_token_ids is not None:
        weights["lm_head.weight"] = head.draft_lm_head
        weights["d2t"] = head.draft_token_ids - torch.arange(head.config.label_count)
    return weights


def dspark_config(head: DrafterConfig) -> dict[str, Any]:
    """The fields of ``config.json`` beside the head's sizes."""
    layers = {"target_layer_ids": list(head.target_layer_ids), "mask_token_id": head.mask_token_id}
    shared = {
        "architectures": [DFLASH_ARCHITECTURE],
        "dflash_config": {**layers, "causal": False},
        "block_size": head.num_frames,
        "num_target_layers": head.base_num_layers,
    }
    if head.trunk_type.silent_start:
        return shared
    return {
        **shared,
        "architectures": [DSPARK_ARCHITECTURE],
        **layers,
        "draft_vocab_size": head.label_count,
        "markov_rank": head.transition_size,
        "markov_head_type": "vanilla",
        "enable_confidence_head": False,
        "sample_from_anchor": True,
    }


def check_head(
    order: DraftOrder, *, target: str, engine: str, whole_vocabulary: bool = True
) -> tuple[DrafterConfig, int]:
    """The head that a draft directory is made of, and the labels of a frame that its search reads.

    target, engine: the value of ``--target``, and the engine's name
    whole_vocabulary: as of ``dspark_problem``
    Raises ExportError, before any weights are loaded, for a head that cannot draft there, and for options of
    engines of our own.
    """
    drafter_dir, options = order.drafter_dir, order.options
    if drafter_dir is None:
        raise ExportError(f"--drafter: expected a draft head, which --target {target} is all about, got none")
    if order.num_nodes is not None and target != TREE_TARGET:
        raise ExportError(f"--num-nodes: is for --target {TREE_TARGET}; {engine} verifies a chain")
    default = Options(top_k=options.top_k, parallel=options.parallel)
    if options != default:
        name = next(n for n, value in vars(options).items() if value != getattr(default, n))
        raise ExportError(
            f"{flag_of(name)}: is for engines; {engine} loads the model itself, and its own options say how"
        )
    with refusing("--drafter", DrafterConfigError):
        head = DrafterConfig.load(drafter_dir)
    problem = head_problem(head)
    if head.trunk_type.has_mask_token:
        problem = dspark_problem(head, engine, whole_vocabulary=whole_vocabulary)
    if problem:
        raise ExportError(f"--drafter: {drafter_dir}: {problem}")
    # In DSpark's form the anchor has no frame.
    if head.num_frames < 2 and (not head.trunk_type.has_mask_token or head.trunk_type.silent_start):
        problem = f"num_frames: expected at least 2, for the anchor and one draft, got {head.num_frames}"
        raise ExportError(f"--drafter: {drafter_dir}: {problem}")
    options.check_head(head)
    return head, head.frame_top_k(options.top_k)


def check_target(model: Path, *, engine: str, model_types: Sequence[str]) -> Path:
    """The target model's directory.

    model_types: of the models whose hidden states the engine gives to a draft model
    Raises ExportError, before any weights are loaded, for a model that the engine cannot read or draft for.
    """
    if is_gguf(model):
        raise ExportError(f"--model: expected a directory, which {engine} reads, got {model}")
    with refusing("--model"):
        directory = local_model(model)
        model_type = load_config(directory).model_type
    if model_type not in model_types:
        raise ExportError(
            f"--model: {model}: model_type: expected {' or '.join(model_types)}, whose hidden states "
            f"{engine} gives to a draft model, got {model_type!r}"
        )
    return directory


@contextmanager
def new_draft(order: DraftOrder, target: str, progress: Progress) -> Iterator[tuple[Path, Source]]:
    """A scratch directory that replaces ``order.out``, and the model with its head, which are loaded."""
    with bundle_directory(order.out, draft_record_name(target)) as scratch:
        progress(f"loading {order.model_dir}")
        inputs = order.model_dir, order.drafter_dir
        yield scratch, load_source(*inputs, max_context=order.max_context, any_base=order.any_base)


def write_draft(directory: Path, source: Source, config: dict[str, Any], dtype: torch.dtype) -> None:
    """Write the head's weights in ``dtype`` and a configuration."""
    assert isinstance(source.drafter, ParallelDrafter)
    save_tensors(draft_weights(source.drafter, dtype), directory / "model.safetensors", {"format": "pt"})
    write_json(directory / "config.json", config)


def model_dtype(model_dir: Path) -> torch.dtype:
    """The number format of the target model's checkpoint, in which a head is written too."""
    return getattr(load_config(local_model(model_dir)), "dtype", None) or torch.float32


def draft_weights(head: ParallelDrafter, dtype: torch.dtype) -> dict[str, Tensor]:
    """The head's weights by the names of ``integrations.frames``; a transition as tables of labels.

    Those of a head with the trunk ``dspark`` have DSpark's names.
    """
    weights = {name: value for name, value in head.state_dict().items() if not name.startswith("transition.")}
    transition = head.transition
    if head.config.trunk_type.has_mask_token:
        weights = dspark_weights(head)
    elif transition is not None:
        labels = torch.arange(head.config.vocab_size)
        with torch.no_grad():
            weights["tables.previous.weight"] = transition.of_previous(labels, head.embed_tokens)
            weights["tables.following.weight"] = transition.right(head.lm_head)
            blank = transition.blank_vector()
        if blank is not None:
            weights["tables.blank"] = blank
        if transition.frame is not None:
            weights["tables.frame.weight"] = transition.frame.weight
    return {
        name: (value.detach().to(dtype) if value.is_floating_point() else value).contiguous()
        for name, value in weights.items()
    }


def draft_config(source: Source, top_k: int, shape: str = CHAIN) -> dict[str, Any]:
    """The contents of ``config.json`` that every engine reads, and our own settings."""
    assert isinstance(source.drafter, Drafter)
    head = source.drafter.config
    sizes = {
        # The engines know the settings of this type; the field ``architectures`` selects the module.
        "model_type": "qwen3",
        "vocab_size": head.vocab_size,
        "hidden_size": head.hidden_size,
        "intermediate_size": head.intermediate_size,
        "num_hidden_layers": head.num_layers,
        "num_attention_heads": head.num_heads,
        "num_key_value_heads": head.num_kv_heads,
        "head_dim": head.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": head.rms_norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": head.rope_theta},
        "max_position_embeddings": source.model.config.max_position_embeddings,
        "layer_types": ["full_attention"] * head.num_layers,
        "tie_word_embeddings": False,
    }
    if head.trunk_type.has_mask_token:
        return sizes | dspark_config(head)
    return sizes | {
        "architectures": [ARCHITECTURE],
        # Any token may be the mask token, because the head embeds the anchor alone.
        "dflash_config": {
            "target_layer_ids": list(head.target_layer_ids),
            "mask_token_id": 0,
            "causal": False,
        },
        KEY: {"head": head.to_dict(), "top_k": top_k, "shape": shape},
    }


def write_record(directory: Path, target: str, order: DraftOrder, arguments: dict[str, Any]) -> None:
    """Write how a directory was made, and the arguments with which an engine serves it."""
    assert order.drafter_dir is not None
    drafter = str(order.drafter_dir.resolve())
    record = {**installed_versions((OURS,)), "drafter": drafter, "arguments": arguments}
    write_json(directory / draft_record_name(target), record)


def write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")

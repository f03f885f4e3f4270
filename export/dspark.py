"""A draft directory in DSpark's form (arXiv 2607.05147), which engines of others load without a plug-in.

OUT/config.json          ``architectures`` is ``Qwen3DSparkModel``; every slot of a block predicts a token
OUT/model.safetensors    the head's weights by DSpark's names; the embedding and the LM head are the target's

A head with the trunk ``dflash`` is written in DFlash's form (arXiv 2602.06036): the same without tables, with
``architectures`` of ``DFlashDraftModel``, and the first slot of a block, the anchor's, predicts nothing.

DSpark's form is written for ``block`` heads with the trunk ``dspark`` and a ``markov`` transition, which
becomes two tables of the whole vocabulary. Here the transition moves only the best ``num_candidates`` labels
of a frame, and so does vLLM, which is given this number as ``dspark_draft_topk``. SGLang, TensorRT-LLM and
TensorRT Edge-LLM move all labels.
"""

from typing import Any

import torch
from torch import Tensor

from drafters.config import DrafterConfig
from drafters.parallel import ParallelDrafter

ARCHITECTURE, DFLASH_ARCHITECTURE = "Qwen3DSparkModel", "DFlashDraftModel"
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


def dspark_problem(head: DrafterConfig) -> str | None:
    """Why a head with the trunk ``dspark`` or ``dflash`` cannot be written in that form, or None."""
    if head.trunk_type.silent_start:
        if head.draft_vocab_size is not None:
            return f"draft_vocab_size: DFlash drafts from the whole vocabulary, got {head.draft_vocab_size}"
        return None
    if head.transition != "markov":
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
        "architectures": [ARCHITECTURE],
        **layers,
        "draft_vocab_size": head.label_count,
        "markov_rank": head.transition_size,
        "markov_head_type": "vanilla",
        "enable_confidence_head": False,
        "sample_from_anchor": True,
    }

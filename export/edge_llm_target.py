"""A draft directory that NVIDIA's TensorRT Edge-LLM builds engines from without a plug-in.

A head with the trunk ``dspark`` is a checkpoint, which Edge-LLM's own exporter reads:

OUT/config.json, model.safetensors   what --draft-model-dir names (``export.draft_directory``)
OUT/edge_llm_draft.json              how the directory was made, and the arguments of the engine's builder

A head with the trunk ``attention`` is a graph in the form of Edge-LLM's DFlash drafts:

OUT/model.onnx, model.onnx.data      what Edge-LLM's exporter would write (``export.graphs.dflash``)
OUT/config.json                      what it would write beside the graph, for the builder and the runtime
OUT/edge_llm_draft.json              as above, with the arguments of Edge-LLM's exporter for the target model
"""

from pathlib import Path
from typing import Any

import onnx_ir as ir

from drafters.attention import AttentionFrames
from export import draft_directory as draft
from export.errors import ExportError
from export.graphs.dflash import trace_draft
from export.graphs.trace import silence_libraries
from export.options import DraftOrder
from export.pipeline import Progress
from export.source import Source

TARGET = "edge-llm"
ENGINE = "TensorRT Edge-LLM"
# The release whose exporter wrote graphs with these tensors and settings here; the builder reads it.
VERSION = "0.11.0"
# Target models whose graphs the engine's exporter wrote here, with hidden states equal to ours.
TARGET_MODEL_TYPES = ("llama", "qwen3")


def build_edge_llm(order: DraftOrder, progress: Progress) -> None:
    """Write a draft directory; ``export.draft_directory`` says what is refused."""
    if order.max_context is not None:
        raise ExportError(f"--max-context: is for engines; {ENGINE}'s builder has an option of its own")
    head, top_k = draft.check_head(order, target=TARGET, engine=ENGINE)
    trunk = head.trunk_type
    if trunk.silent_start:
        raise ExportError(
            f"--drafter: {order.drafter_dir}: trunk: expected 'attention' or 'dspark', got {head.trunk!r}"
        )
    is_dspark = trunk.has_mask_token
    if not is_dspark and head.attention_window is not None:
        raise ExportError(
            f"--drafter: {order.drafter_dir}: attention_window: expected none, because attention over blocks "
            f"has none in {ENGINE}, got {head.attention_window}"
        )
    model_dir = draft.check_target(order.model_dir, engine=ENGINE, model_types=TARGET_MODEL_TYPES)
    with draft.new_draft(order, TARGET, progress) as (scratch, source):
        model, out = str(model_dir.resolve()), str(order.out.resolve())
        if is_dspark:
            progress("writing the head's weights")
            dtype = draft.model_dtype(order.model_dir)
            draft.write_draft(scratch, source, draft.draft_config(source, top_k), dtype)
            arguments = {"model_dir": model, "draft_model_dir": out, "spec_type": "dspark"}
            flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in arguments.items())
            command = f"tensorrt-edgellm-build {flags} --engine-dir ENGINES"
        else:
            silence_libraries()
            progress("tracing the draft head")
            write_graph(scratch, source, top_k)
            arguments = {"model_dir": model, "dflash_draft_dir": out}
            command = f"tensorrt-edgellm-export {model} GRAPHS --dflash-base --dflash-draft-dir {out}"
        draft.write_record(scratch, TARGET, order, arguments)
    progress(f"wrote {order.out}; {command}")


def write_graph(directory: Path, source: Source, top_k: int) -> None:
    """Write the draft graph of a head with attention, and its configuration."""
    assert isinstance(source.drafter, AttentionFrames)
    path = directory / "model.onnx"
    ir.save(trace_draft(source.drafter, top_k), path, external_data=f"{path.name}.data")
    draft.write_json(directory / "config.json", dflash_config(source))


def dflash_config(source: Source) -> dict[str, Any]:
    """What Edge-LLM's exporter writes beside a DFlash draft of these sizes."""
    assert source.drafter is not None
    head = source.drafter.config
    return {
        "model": "qwen3",
        "spec_decode_type": "dflash",
        "engine_role": "draft",
        "edgellm_version": VERSION,
        "vocab_size": head.vocab_size,
        "hidden_size": head.hidden_size,
        "intermediate_size": head.intermediate_size,
        "num_hidden_layers": head.num_layers,
        "num_attention_heads": head.num_heads,
        "num_key_value_heads": head.num_kv_heads,
        "head_dim": head.head_dim,
        "max_position_embeddings": source.model.config.max_position_embeddings,
        "rope_theta": head.rope_theta,
        "rope_scaling": {"rope_theta": head.rope_theta, "rope_type": "default", "type": "default"},
        "partial_rotary_factor": 1.0,
        "num_deepstack_features": 0,
        "use_vision_bidirectional_attention": False,
        "rms_norm_eps": head.rms_norm_eps,
        "attention_scaling": head.head_dim**-0.5,
        "ple_enabled": False,
        "num_ple_inputs": 0,
        "ple_hidden_size": 0,
        "dflash_config": {
            "version": 1,
            "target_layer_ids": list(head.target_layer_ids),
            # Every token of a block is a frame, so that a step has one draft less than the head has frames.
            "block_size": head.num_frames,
            # Any token may be the mask token, because the head embeds the anchor alone.
            "mask_token_id": 0,
            "supports_probabilistic_sampling": False,
        },
        "draft_vocab_size": head.vocab_size,
        "base_model_hidden_size": head.feature_size,
        "kv_cache_dtype": "fp16",
    }

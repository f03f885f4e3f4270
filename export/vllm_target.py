"""A draft directory for vLLM's method ``dflash``, which ``integrations.vllm`` makes a draft model.

OUT/config.json, model.safetensors   what --speculative-config names as its model
OUT/vllm_draft.json                  how the directory was made, and how it is served
OUT/triton/NAME/                     a model of Triton's vLLM backend with the same settings
"""

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from drafters.base import Drafter
from drafters.checkpoints.loading import load_config
from drafters.config import DrafterConfig, DrafterConfigError
from drafters.lattice import frame_top_k
from drafters.model_files import local_model
from drafters.parallel import ParallelDrafter
from export.directories import bundle_directory
from export.errors import ExportError
from export.options import Options
from export.pipeline import Progress
from export.source import Source, load_source
from export.targets import VLLM_RECORD_NAME
from integrations.vllm.plugin import ARCHITECTURE
from integrations.vllm.settings import KEY, head_problem

# Drafts of a step, as in the runtime; fewer where a head has fewer frames.
NUM_DRAFTS = 8
TRITON_CONFIG = """\
backend: "vllm"
instance_group [
  {
    count: 1
    kind: KIND_MODEL
  }
]
"""


def build_vllm(
    model_dir: Path,
    out: Path,
    drafter_dir: Path | None,
    options: Options,
    progress: Progress,
    *,
    max_context: int | None = None,
) -> None:
    """Write the draft directory ``out``.

    Raises ExportError for a head that cannot draft in vLLM, before the model's weights are loaded, and for
    options that are of engines; leaves nothing half-written.
    """
    if drafter_dir is None:
        raise ExportError("--drafter: expected a draft head, which --target vllm is all about, got none")
    if max_context is not None:
        raise ExportError("--max-context: is for engines; vLLM has --max-model-len")
    default = Options(top_k=options.top_k, parallel=options.parallel)
    if options != default:
        name = next(n for n, value in vars(options).items() if value != getattr(default, n))
        flag = "--" + name.removesuffix("s" if name == "gpus" else "").replace("_", "-")
        raise ExportError(f"{flag}: is for engines; vLLM loads the model itself, and its own options say how")
    try:
        head = DrafterConfig.load(drafter_dir)
    except DrafterConfigError as error:
        raise ExportError(f"--drafter: {error}") from error
    problem = head_problem(head)
    if problem:
        raise ExportError(f"--drafter: {drafter_dir}: {problem}")
    width = frame_top_k(head, options.top_k)
    if not 1 <= width <= head.label_count:
        raise ExportError(f"--top-k: must be between 1 and {head.label_count} for this head, got {width}")
    with bundle_directory(out, VLLM_RECORD_NAME) as scratch:
        progress(f"loading {model_dir}")
        source = load_source(model_dir, drafter_dir)
        assert isinstance(source.drafter, ParallelDrafter)
        dtype = getattr(load_config(local_model(model_dir)), "dtype", None) or torch.float32
        progress("writing the head's weights")
        save_file(draft_weights(source.drafter, dtype), scratch / "model.safetensors", {"format": "pt"})
        _write(scratch / "config.json", draft_config(source, width))
        arguments = {
            "model": str(model_dir.resolve()),
            "speculative_config": {
                "method": "dflash",
                "model": str(out.resolve()),
                "num_speculative_tokens": min(NUM_DRAFTS, head.num_frames - 1),
                "use_local_argmax_reduction": True,
            },
        }
        version = importlib.metadata.version("ctc-speculator")
        record = {"ctc-speculator": version, "drafter": str(drafter_dir.resolve()), "arguments": arguments}
        _write(scratch / VLLM_RECORD_NAME, record)
        served = scratch / "triton" / source.spec.name
        (served / "1").mkdir(parents=True)
        (served / "config.pbtxt").write_text(TRITON_CONFIG, encoding="utf-8")
        _write(served / "1" / "model.json", arguments)
    progress(f"wrote {out}")


def draft_weights(head: ParallelDrafter, dtype: torch.dtype) -> dict[str, Tensor]:
    """The head's weights by the names of ``integrations.vllm.frames``; a transition as tables of labels."""
    weights = {name: value for name, value in head.state_dict().items() if not name.startswith("transition.")}
    transition = head.transition
    if transition is not None:
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


def draft_config(source: Source, top_k: int) -> dict[str, Any]:
    """The contents of ``config.json``: the fields that vLLM reads, and our own settings."""
    assert isinstance(source.drafter, Drafter)
    head = source.drafter.config
    return {
        "architectures": [ARCHITECTURE],
        # vLLM knows the settings of this type; the field ``architectures`` selects the module.
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
        # Any token may be the mask token, because the head embeds the anchor alone.
        "dflash_config": {
            "target_layer_ids": list(head.target_layer_ids),
            "mask_token_id": 0,
            "causal": False,
        },
        KEY: {"head": head.to_dict(), "top_k": top_k},
    }


def _write(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")

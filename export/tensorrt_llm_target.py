"""A draft directory for TensorRT-LLM's decoding type ``DFlash``.

A head in DSpark's form is for its decoding type ``DSpark``, which needs no plug-in, and one in DFlash's form
for ``DFlash`` without a plug-in.

OUT/config.json, model.safetensors   the draft model, with the file that makes it known to TensorRT-LLM:
OUT/configuration_ctc.py             the engine runs it in every process, because it trusts remote code;
                                     a head in DSpark's form has none
OUT/trtllm.yaml                      what ``trtllm-serve MODEL --config`` is given
OUT/tensorrt_llm_draft.json          how the directory was made, and the same settings
OUT/triton/NAME/1/model.yaml         the same settings for the ``llmapi`` model of Triton's backend
"""

import json
from typing import Any

import torch

from drafters.config import DrafterConfig
from export import draft_directory as draft
from export.options import NUM_DRAFTS, DraftOrder
from export.pipeline import Progress
from integrations.tensorrt_llm.model import ATTENTION_BACKEND, TARGET_MODEL_TYPES
from integrations.tensorrt_llm.plugin import CONFIG_CLASS, CONFIG_FILE

TARGET = "tensorrt-llm"
# Sequences of a batch, and positions of a sequence unless --max-context says otherwise. The engine reserves
# memory for the context of all of them, for a head of a model of 8 billion parameters 0.5 GiB.
MAX_BATCH_SIZE, MAX_SEQ_LEN = 16, 8192
# Tokens of a pass, unless sequences may be longer: the engine's default.
MAX_NUM_TOKENS = 8192
# The context's memory is reserved after the cache of the target model, which takes 0.9 unless told otherwise.
CACHE_SHARE = 0.8
# Found by its name, so that Transformers does not ask for packages that are imported only where they are.
CONFIG_CODE = f'''\
"""The configuration of a draft head of ctc-speculator.

Where TensorRT-LLM is installed, loading it makes the draft model known to TensorRT-LLM.
"""

import importlib
import importlib.util

from transformers import Qwen3Config


class {CONFIG_CLASS}(Qwen3Config):
    """The fields of a Qwen3 model, and the head's own settings."""


if importlib.util.find_spec("tensorrt_llm") is not None:
    if importlib.util.find_spec("integrations") is None:
        raise ImportError("ctc-speculator: expected it beside TensorRT-LLM (pip install --no-deps), got none")
    importlib.import_module("integrations.tensorrt_llm.plugin").register()
'''


def build_tensorrt_llm(order: DraftOrder, progress: Progress) -> None:
    """Write a draft directory; ``export.draft_directory`` says what is refused."""
    head, top_k = draft.check_head(order, target=TARGET, engine="TensorRT-LLM")
    model_dir = draft.check_target(order.model_dir, engine="TensorRT-LLM", model_types=TARGET_MODEL_TYPES)
    with draft.new_draft(order, TARGET, progress) as (scratch, source):
        progress("writing the head's weights")
        dtype = draft.model_dtype(order.model_dir)
        config = draft.draft_config(source, top_k)
        config["dtype"] = str(dtype).removeprefix("torch.")
        most = head.num_frames
        if head.trunk_type.has_mask_token:
            # Whole blocks, and of DSpark's form the engine refuses shorter ones.
            decoding_type, drafts = "DSpark", most
            if head.trunk_type.silent_start:
                decoding_type, drafts = "DFlash", most - 1
            # Where the engine's layers look for it, beside the field of Transformers 5.
            config["rope_theta"] = head.rope_theta
        else:
            decoding_type, drafts = "DFlash", min(NUM_DRAFTS, most)
            config["auto_map"] = {"AutoConfig": f"{CONFIG_FILE.removesuffix('.py')}.{CONFIG_CLASS}"}
            config["block_size"] = most + 1
            (scratch / CONFIG_FILE).write_text(CONFIG_CODE, encoding="utf-8")
        draft.write_draft(scratch, source, config, dtype)
        positions = order.max_context or min(MAX_SEQ_LEN, source.model.config.max_position_embeddings)
        arguments = {
            "max_batch_size": MAX_BATCH_SIZE,
            "max_seq_len": positions,
            # A prompt is read in one pass, and the engine refuses a longer one.
            "max_num_tokens": max(MAX_NUM_TOKENS, positions),
            # The head sees a token only if a pass computes its hidden states, which reused blocks leave out.
            "kv_cache_config": {"enable_block_reuse": False, "free_gpu_memory_fraction": CACHE_SHARE},
            "speculative_config": {
                "decoding_type": decoding_type,
                "speculative_model": str(order.out.resolve()),
                "max_draft_len": drafts,
                "attention_backend": ATTENTION_BACKEND,
            },
        }
        model = str(model_dir.resolve())
        draft.write_record(scratch, TARGET, order, {"model": model, **arguments})
        (scratch / "trtllm.yaml").write_text(yaml(arguments), encoding="utf-8")
        served = scratch / "triton" / source.spec.name / "1"
        served.mkdir(parents=True)
        triton = {"max_batch_size": 0, "decoupled": False}
        settings = {"model": model, "backend": "pytorch", **arguments, "triton_config": triton}
        (served / "model.yaml").write_text(yaml(settings), encoding="utf-8")
    gib = context_bytes(head, positions, dtype) / 2**30
    progress(f"the head keeps {MAX_BATCH_SIZE} x {positions} positions in {gib:.1f} GiB of the GPU")
    progress(f"wrote {order.out}")


def context_bytes(head: DrafterConfig, positions: int, dtype: torch.dtype) -> int:
    """The memory in which TensorRT-LLM keeps the head's keys and values, for a batch of ``MAX_BATCH_SIZE``.

    One more slot takes what pads a batch.
    """
    per_position = 2 * head.num_layers * head.num_kv_heads * head.head_dim * dtype.itemsize
    return (MAX_BATCH_SIZE + 1) * (positions + NUM_DRAFTS + 1) * per_position


def yaml(values: dict[str, Any], indent: str = "") -> str:
    """Settings as YAML, whose scalars may be written as JSON's."""
    lines = ""
    for name, value in values.items():
        if isinstance(value, dict):
            lines += f"{indent}{name}:\n{yaml(value, indent + '  ')}"
        else:
            lines += f"{indent}{name}: {json.dumps(value)}\n"
    return lines

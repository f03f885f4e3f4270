"""A draft directory in DSpark's form, which NVIDIA's TensorRT Edge-LLM builds engines from without a plug-in.

OUT/config.json, model.safetensors   what --draft-model-dir names (``export.dspark``)
OUT/edge_llm_draft.json              how the directory was made, and the arguments of the engine's builder
"""

from drafters.config import DrafterConfig
from export.directories import bundle_directory, draft_record_name
from export.draft_directory import (
    check_head,
    check_target,
    draft_config,
    model_dtype,
    write_draft,
    write_record,
)
from export.dspark import dspark_problem
from export.errors import ExportError
from export.options import DraftOrder
from export.pipeline import Progress
from export.source import load_source

TARGET = "edge-llm"
ENGINE = "TensorRT Edge-LLM"
# Target models whose graphs the engine's exporter wrote here, with hidden states equal to ours.
TARGET_MODEL_TYPES = ("llama", "qwen3")


def build_edge_llm(order: DraftOrder, progress: Progress) -> None:
    """Write a draft directory.

    Raises ExportError, before the model's weights are loaded, for a head or a target model that cannot be
    used in Edge-LLM, and for options that are of engines; leaves nothing half-written.
    """
    if order.max_context is not None:
        raise ExportError(f"--max-context: is for engines; {ENGINE}'s builder has an option of its own")
    head = check_head(order, target=TARGET, engine=ENGINE, dspark_problem=_dspark_problem)
    if not head.config.trunk_type.has_mask_token or head.config.trunk_type.silent_start:
        raise ExportError(
            f"--drafter: {order.drafter_dir}: trunk: expected 'dspark', which {ENGINE} reads, got "
            f"{head.config.trunk!r}; train one with --preset dspark"
        )
    model_dir = check_target(order.model_dir, engine=ENGINE, target_problem=_target_problem)
    record_name = draft_record_name(TARGET)
    with bundle_directory(order.out, record_name) as scratch:
        progress(f"loading {order.model_dir}")
        source = load_source(order.model_dir, order.drafter_dir)
        progress("writing the head's weights")
        write_draft(scratch, source, draft_config(source, head.top_k), model_dtype(order.model_dir))
        arguments = {
            "model_dir": str(model_dir.resolve()),
            "draft_model_dir": str(order.out.resolve()),
            "spec_type": "dspark",
        }
        write_record(scratch / record_name, order, arguments)
    flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in arguments.items())
    progress(f"wrote {order.out}; tensorrt-edgellm-build {flags} --engine-dir ENGINES")


def _target_problem(model_type: str) -> str | None:
    """Why the engine cannot draft for a target model of this type, or None."""
    if model_type in TARGET_MODEL_TYPES:
        return None
    return f"model_type: expected {' or '.join(TARGET_MODEL_TYPES)}, got {model_type!r}"


def _dspark_problem(head: DrafterConfig) -> str | None:
    """Why Edge-LLM cannot load a head in DSpark's form, or None."""
    if head.draft_vocab_size is not None:
        return f"draft_vocab_size: {ENGINE} drafts from the whole vocabulary, got {head.draft_vocab_size}"
    return dspark_problem(head)

"""A draft directory for SGLang's algorithm ``DFLASH``, which ``integrations.sglang`` makes a draft model.

OUT/config.json, model.safetensors   what --speculative-draft-model-path names
OUT/sglang_draft.json                how the directory was made, and the server's arguments
"""

from export.directories import bundle_directory, draft_record_name
from export.draft_directory import (
    NUM_DRAFTS,
    check_head,
    check_target,
    draft_config,
    model_dtype,
    write_draft,
    write_record,
)
from export.errors import ExportError
from export.options import DraftOrder
from export.pipeline import Progress
from export.source import load_source
from integrations.sglang.settings import block_problem, target_problem

TARGET = "sglang"


def build_sglang(order: DraftOrder, progress: Progress) -> None:
    """Write a draft directory.

    Raises ExportError, before the model's weights are loaded, for a head or a target model that cannot be
    used in SGLang, and for options that are of engines; leaves nothing half-written.
    """
    if order.max_context is not None:
        raise ExportError("--max-context: is for engines; SGLang has --context-length")
    head = check_head(order, target=TARGET, engine="SGLang")
    model_dir = check_target(order.model_dir, engine="SGLang", target_problem=target_problem)
    # A block has the anchor and the drafts, and each of its tokens is a frame.
    block_size = min(NUM_DRAFTS + 1, head.config.num_frames)
    problem = block_problem(head.config, block_size)
    if problem:
        raise ExportError(f"--drafter: {order.drafter_dir}: {problem}")
    record_name = draft_record_name(TARGET)
    with bundle_directory(order.out, record_name) as scratch:
        progress(f"loading {order.model_dir}")
        source = load_source(order.model_dir, order.drafter_dir)
        progress("writing the head's weights")
        config = draft_config(source, head.top_k)
        config["block_size"] = block_size
        write_draft(scratch, source, config, model_dtype(order.model_dir))
        arguments = {
            "model_path": str(model_dir.resolve()),
            "speculative_algorithm": "DFLASH",
            "speculative_draft_model_path": str(order.out.resolve()),
            "speculative_num_draft_tokens": block_size,
        }
        write_record(scratch / record_name, order, arguments)
    flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in arguments.items())
    progress(f"wrote {order.out}; python -m sglang.launch_server {flags}")

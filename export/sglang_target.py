"""A draft directory for SGLang's algorithm ``DFLASH``, which ``integrations.sglang`` makes a draft model.

A head in DSpark's form is for SGLang's own algorithm ``DSPARK``, which needs no plug-in, and one in DFlash's
form for ``DFLASH`` without a plug-in.

OUT/config.json, model.safetensors   what --speculative-draft-model-path names
OUT/sglang_draft.json                how the directory was made, and the server's arguments
"""

from drafters.config import DrafterConfig
from export import draft_directory as draft
from export.errors import ExportError
from export.options import NUM_DRAFTS, DraftOrder
from export.pipeline import Progress
from integrations.draft_directory import CHAIN, TREE
from integrations.sglang.settings import TARGET_MODEL_TYPES, TREE_BACKEND, block_problem

TARGET = "sglang"


def build_sglang(order: DraftOrder, progress: Progress) -> None:
    """Write a draft directory; ``export.draft_directory`` says what is refused."""
    if order.max_context is not None:
        raise ExportError("--max-context: is for engines; SGLang has --context-length")
    head, top_k = draft.check_head(order, target=TARGET, engine="SGLang")
    model_dir = draft.check_target(order.model_dir, engine="SGLang", model_types=TARGET_MODEL_TYPES)
    is_native = head.trunk_type.has_mask_token
    is_dspark = is_native and not head.trunk_type.silent_start
    # A block has the anchor and the drafts. All of its tokens are frames; in DSpark's form its drafts are.
    # DFlash's form is a whole block, the anchor with it.
    block_size = head.num_frames if is_native else min(NUM_DRAFTS + 1, head.num_frames)
    problem = _layers_problem(head) if is_native else block_problem(head, block_size)
    if problem:
        raise ExportError(f"--drafter: {order.drafter_dir}: {problem}")
    if order.num_nodes is not None:
        # SGLang drafts and verifies one block. A longer one would have rows that are no frames, which the
        # frames would attend to.
        most = head.num_frames - 1
        if is_native:
            problem = f"a head with the trunk {head.trunk!r} has chains there"
        elif not 1 <= order.num_nodes <= most:
            problem = f"must be between 1 and {most}, the frames of this head beside the anchor's"
        if problem:
            raise ExportError(f"--num-nodes: {problem}, got {order.num_nodes}")
        block_size = order.num_nodes + 1
    with draft.new_draft(order, TARGET, progress) as (scratch, source):
        progress("writing the head's weights")
        config = draft.draft_config(source, top_k, CHAIN if order.num_nodes is None else TREE)
        if not is_native:
            config["block_size"] = block_size
        draft.write_draft(scratch, source, config, draft.model_dtype(order.model_dir))
        arguments = {
            "model_path": str(model_dir.resolve()),
            "speculative_algorithm": "DSPARK" if is_dspark else "DFLASH",
            "speculative_draft_model_path": str(order.out.resolve()),
            "speculative_num_draft_tokens": head.num_frames + 1 if is_dspark else block_size,
        }
        if order.num_nodes is not None:
            arguments["attention_backend"] = TREE_BACKEND
        draft.write_record(scratch, TARGET, order, arguments)
    flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in arguments.items())
    progress(f"wrote {order.out}; python -m sglang.launch_server {flags}")


def _layers_problem(head: DrafterConfig) -> str | None:
    """Why SGLang cannot load a head in DSpark's form, or None.

    It hands over a layer's output as the next layer's input, so it has none of the last layer.
    """
    last = head.base_num_layers - 1
    if last in head.target_layer_ids:
        return (
            f"target_layer_ids: SGLang hands over layers before the last, got {list(head.target_layer_ids)} "
            f"of {head.base_num_layers} layers; train with other --target-layer-ids"
        )
    return None

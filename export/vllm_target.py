"""A draft directory for vLLM's method ``dflash``, which ``integrations.vllm`` makes a draft model.

A head in DSpark's form is for vLLM's own method ``dspark``, which needs no plug-in, and one in DFlash's form
for ``dflash`` without a plug-in.

OUT/config.json, model.safetensors   what --speculative-config names as its model
OUT/vllm_draft.json                  how the directory was made, and how it is served
OUT/triton/NAME/                     a model of Triton's vLLM backend with the same settings
"""

from typing import Any

from drafters.model_files import local_model
from drafters.target_models import TargetModelError
from export import draft_directory as draft
from export.errors import ExportError
from export.options import NUM_DRAFTS, DraftOrder
from export.pipeline import Progress
from export.source import refusing

TARGET = "vllm"
TRITON_CONFIG = """\
backend: "vllm"
instance_group [
  {
    count: 1
    kind: KIND_MODEL
  }
]
"""


def build_vllm(order: DraftOrder, progress: Progress) -> None:
    """Write a draft directory; ``export.draft_directory`` says what is refused."""
    if order.max_context is not None:
        raise ExportError("--max-context: is for engines; vLLM has --max-model-len")
    head, top_k = draft.check_head(order, target=TARGET, engine="vLLM", whole_vocabulary=False)
    with refusing("--model", TargetModelError):
        model = str(local_model(order.model_dir).resolve())
    with draft.new_draft(order, TARGET, progress) as (scratch, source):
        progress("writing the head's weights")
        dtype = draft.model_dtype(order.model_dir)
        draft.write_draft(scratch, source, draft.draft_config(source, top_k), dtype)
        method: dict[str, Any] = {
            "method": "dflash",
            "num_speculative_tokens": min(NUM_DRAFTS, head.num_frames - 1),
            "use_local_argmax_reduction": True,
        }
        if head.trunk_type.silent_start:
            method = {"method": "dflash", "num_speculative_tokens": head.num_frames - 1}
        elif head.trunk_type.has_mask_token:
            method = {
                "method": "dspark",
                "num_speculative_tokens": head.num_frames,
                "dspark_draft_topk": head.num_candidates,
            }
        speculative = {"model": str(order.out.resolve()), **method}
        arguments = {"model": model, "speculative_config": speculative}
        draft.write_record(scratch, TARGET, order, arguments)
        served = scratch / "triton" / source.spec.name
        (served / "1").mkdir(parents=True)
        (served / "config.pbtxt").write_text(TRITON_CONFIG, encoding="utf-8")
        draft.write_json(served / "1" / "model.json", arguments)
    progress(f"wrote {order.out}")

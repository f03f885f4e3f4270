"""What users import, and the command ``ctc``: one name for every command line of the project.

    from ctc_speculator import SamplingParams, SpeculativeDecoder

Each of these names is loaded when it is first asked for, so that ``ctc --help`` loads no engine.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime.core.errors import (
        BundleError,
        CacheMemoryError,
        DeviceError,
        DeviceMemoryError,
        RequestError,
        UserError,
    )
    from runtime.decode.grammar import Grammar
    from runtime.decode.sampling_params import SamplingParams
    from runtime.decoder import SpeculativeDecoder
    from runtime.serve.scheduler import Scheduler

__all__ = [
    "BundleError",
    "CacheMemoryError",
    "DeviceError",
    "DeviceMemoryError",
    "Grammar",
    "RequestError",
    "SamplingParams",
    "Scheduler",
    "SpeculativeDecoder",
    "UserError",
]
# Where those are defined that are no errors.
_MODULES = {
    "Grammar": "runtime.decode.grammar",
    "SamplingParams": "runtime.decode.sampling_params",
    "Scheduler": "runtime.serve.scheduler",
    "SpeculativeDecoder": "runtime.decoder",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES.get(name, "runtime.core.errors")), name)

"""The versions of packages that a bundle or a draft directory records."""

import contextlib
import importlib.metadata
from collections.abc import Sequence

OURS = "ctc-speculator"
PACKAGES = (OURS, "torch", "transformers", "onnx", "onnxscript", "onnxruntime", "tokenizers")


def installed_versions(names: Sequence[str] = PACKAGES) -> dict[str, str]:
    """By package; a checkout that is not installed has none, nor has a wheel of another name."""
    found = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found

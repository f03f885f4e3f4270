"""Where a measurement was made: the bundle, the machine and the versions that ran."""

import os
import platform
from pathlib import Path
from typing import Any

from runtime.core.bundle import MANIFEST_NAME, Bundle, sha256_of
from runtime.core.system import OURS, available_cores, installed_versions
from runtime.engines.ort import has_compiled_form

PACKAGES = ("numpy", "onnxruntime", "numba", "tokenizers")


def describe_bundle(bundle: Bundle) -> dict[str, str]:
    """Return what was measured; the digest of ``bundle.json`` stands for every file it lists.

    operators: of passes on a CPU, where this machine compiles them
    """
    manifest = bundle.manifest
    return {
        "model": manifest.model.name,
        "drafter_type": manifest.drafter.drafter_type if manifest.drafter else "none",
        "target": manifest.target,
        "precision": manifest.precision,
        "drafter_precision": manifest.drafter.precision if manifest.drafter else "none",
        "operators": "compiled" if has_compiled_form(bundle, "backbone") else "standard",
        "sha256": sha256_of(bundle.path / MANIFEST_NAME),
    }


def machine(num_threads: int | None) -> dict[str, Any]:
    """Return processor, cores, threads, memory and platform; ``memory_gib`` is None if it is unknown."""
    cpu = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
        cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), cpu)
    memory = None
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        memory = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    return {
        "cpu": cpu,
        "cores": available_cores(),
        "threads": num_threads or available_cores(),
        "memory_gib": memory,
        "platform": platform.platform(),
    }


def versions() -> dict[str, str]:
    installed = installed_versions((OURS, *PACKAGES))
    names = {"project": OURS, **{name: name for name in PACKAGES}}
    found = {key: installed.get(name, "not installed as a package") for key, name in names.items()}
    return {"python": platform.python_version(), **found}

"""Draft directories as ``make vllm-test`` uses them, also such as do not fit."""

import json
import shutil
from pathlib import Path
from typing import Any


def arguments(draft: Path) -> dict[str, Any]:
    """vLLM's arguments, as the export wrote them."""
    found: dict[str, Any] = json.loads((draft / "vllm_draft.json").read_text(encoding="utf-8"))["arguments"]
    return found


def speculative(draft: Path) -> dict[str, Any]:
    """``speculative_config`` of vLLM for a draft directory, wherever it is."""
    return {**arguments(draft)["speculative_config"], "model": str(draft)}


def with_head_of(draft: Path, wrong: Path, **settings: Any) -> Path:
    """A copy of a draft directory whose head has other settings."""
    shutil.copytree(draft, wrong)
    config = json.loads((wrong / "config.json").read_text(encoding="utf-8"))
    config["ctc_speculator"]["head"].update(settings)
    (wrong / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return wrong

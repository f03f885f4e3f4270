"""The cost of an export: what it leaves behind."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.experiments import export_memory


def test_a_bundle_that_does_not_decode_is_removed(
    tiny_bundle_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def export(model: Path, out: Path, flags: list[str]) -> dict[str, float]:
        shutil.copytree(tiny_bundle_dir, out)
        return {"export_seconds": 1.0, "peak_rss_bytes": 3, "peak_private_bytes": 2}

    def decode(bundle: Path) -> dict[str, float]:
        raise RuntimeError("no text")

    class Pool:
        def __init__(self, *_: Any) -> None: ...
        def __enter__(self) -> "Pool":
            return self

        def __exit__(self, *_: Any) -> None: ...
        def submit(self, *_: Any) -> Any:
            return SimpleNamespace(result=lambda: 10)

    monkeypatch.setattr(export_memory, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(export_memory, "export", export)
    monkeypatch.setattr(export_memory, "decode", decode)
    with pytest.raises(RuntimeError, match="no text"):
        export_memory.main(["--out", str(tmp_path / "out")])
    assert not any((tmp_path / "out").iterdir())

"""One of ONNX Runtime's two packages, whichever it is."""

import importlib
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from runtime import engines
from runtime.core.errors import RequestError
from runtime.engines import ort_wheel

ROOT = Path(__file__).resolve().parents[3]


def test_without_onnxruntime_the_error_names_what_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    monkeypatch.delitem(sys.modules, "runtime.engines.ort_wheel")
    # The package's attribute is the new module after the import, and the old one after the test.
    monkeypatch.setattr(engines, "ort_wheel", ort_wheel)
    module = importlib.import_module("runtime.engines.ort_wheel")
    with pytest.raises(RequestError, match=r"'\.\[cpu\]' brings onnxruntime, '\.\[gpu\]'"):
        module.check_installed()
    with pytest.raises(RequestError, match="ONNX Runtime cannot be imported"):
        module.ort.InferenceSession("model.onnx")


@pytest.mark.parametrize("installed", [("onnxruntime",), ("onnxruntime-gpu",), ort_wheel.WHEELS])
def test_both_are_warned_of(
    installed: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return "1.24.0"

    monkeypatch.setattr(metadata, "version", version)
    ort_wheel.warn_of_two_wheels()
    message = "onnxruntime 1.24.0 and onnxruntime-gpu 1.24.0 are both installed, and have overwritten each"
    assert (message in caplog.text) is (len(installed) > 1)


def test_every_install_chooses_one() -> None:
    """Neither is a dependency of all, because pip cannot leave out what an extra replaces."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    assert not any(requirement.startswith("onnxruntime") for requirement in project["dependencies"])
    assert [extras["cpu"][0], extras["gpu"][0]] == ["onnxruntime>=1.24", "onnxruntime-gpu[cuda,cudnn]>=1.31"]
    (everything,) = (each for each in extras["dev"] if each.startswith("ctc-speculator["))
    assert "cpu" in everything
    assert "gpu" not in everything


def test_both_are_pinned_at_one_version() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    versions = dict(line.split("==") for line in lines if line.startswith("onnxruntime"))
    assert set(versions) == set(ort_wheel.WHEELS)
    assert len(set(versions.values())) == 1

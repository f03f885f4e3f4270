"""The compiled kernels of the package are those of its source."""

import gzip
from pathlib import Path

import pytest

from export.errors import ExportError
from export.step import compile_kernels
from runtime.device.kernels.driver import CAPABILITIES, IMAGES, LEAST_CAPABILITY, image_name


@pytest.fixture(autouse=True)
def has_nvrtc() -> None:
    try:
        compile_kernels.load_nvrtc()
    except ExportError as error:
        pytest.skip(str(error))


def test_the_files_are_what_the_source_becomes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Byte for byte: one with machine code, and the one that drivers compile. A changed file is named."""
    found = compile_kernels.compiled(("90", LEAST_CAPABILITY))
    for name, content in found.items():
        assert gzip.decompress((IMAGES / name).read_bytes()) == content, name
    monkeypatch.setattr(compile_kernels, "IMAGES", tmp_path / "images")
    monkeypatch.setattr(compile_kernels, "compiled", lambda: found)
    assert compile_kernels.main([]) == 0
    assert compile_kernels.main(["--check"]) == 0
    damaged, missing = found
    (tmp_path / "images" / damaged).write_bytes(gzip.compress(found[damaged] + b" "))
    (tmp_path / "images" / missing).unlink()
    capsys.readouterr()
    assert compile_kernels.main(["--check"]) == 1
    assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()] == [damaged, missing]


def test_there_is_a_file_for_every_capability() -> None:
    names = {image_name(f"sm{capability}") for capability in (*CAPABILITIES, LEAST_CAPABILITY)}
    assert {path.name for path in IMAGES.iterdir()} == names
    assert len(names) == len(CAPABILITIES) + 1


def test_an_error_of_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "step.cu"
    source.write_text("int kernel() { return wrong; }")
    monkeypatch.setattr(compile_kernels, "SOURCE", source)
    with pytest.raises(ExportError, match=r'step\.cu for sm_80: (?s:.)*"wrong" is undefined'):
        compile_kernels.compiled(("80",))

"""The library of operators: where it is compiled and kept, and what happens where it cannot be."""

import logging
from pathlib import Path

import pytest

from runtime.engines import operators
from runtime.engines.operators import DIRECTORY_VARIABLE, library_name, operator_library

needs_compiler = pytest.mark.skipif(
    operator_library() is None, reason="this machine does not compile the operators"
)


def library_anew() -> Path | None:
    """As a process would find it that has not asked before."""
    found: Path | None = operator_library.__wrapped__()
    return found


@needs_compiler
def test_it_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path / "own"))
    library = library_anew()
    assert library is not None
    assert library.parent == tmp_path / "own"
    written = library.stat().st_mtime_ns
    assert library_anew() == library
    assert library.stat().st_mtime_ns == written
    assert [path.name for path in library.parent.iterdir()] == [library.name]


@needs_compiler
def test_other_processors_and_flags_have_others(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [library_name("one"), library_name("another")]
    monkeypatch.setattr(operators, "FLAGS", ("-O1",))
    names.append(library_name("one"))
    assert len(set(names)) == 3


def test_an_empty_variable_turns_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DIRECTORY_VARIABLE, "")
    assert library_anew() is None


@pytest.mark.parametrize(
    ("name", "value"), [("COMPILER", "no-such-compiler"), ("INSTRUCTIONS", "no_such_set")]
)
def test_what_a_machine_lacks_is_named(
    name: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    monkeypatch.setattr(operators, name, value)
    with caplog.at_level(logging.INFO):
        assert library_anew() is None
    assert value in caplog.text
    assert not list(tmp_path.iterdir())


@needs_compiler
def test_what_the_compiler_says_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    monkeypatch.setattr(operators, "FLAGS", ("-no-such-flag",))
    assert library_anew() is None
    assert "g++ cannot compile the operators" in caplog.text
    assert "no-such-flag" in caplog.text
    assert not list(tmp_path.iterdir())


@needs_compiler
def test_a_directory_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path / "file" / "inside"))
    assert library_anew() is None
    assert f"{DIRECTORY_VARIABLE} may name a directory" in caplog.text


@needs_compiler
def test_a_library_that_onnx_runtime_cannot_load_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    library = library_anew()
    assert library is not None
    other = library.with_name(library_name("another processor"))
    other.write_bytes(b"no library")
    monkeypatch.setattr(operators, "describe_processor", lambda: "another processor")
    monkeypatch.setattr(operators, "INSTRUCTIONS", "processor")
    assert library_anew() is None
    assert "cannot load the operators of this project" in caplog.text

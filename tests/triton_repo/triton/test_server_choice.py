"""Which server ``ctc serve`` takes: a Triton whose version is known and new enough, or our own."""

from pathlib import Path

import pytest

from ctc_speculator.__main__ import main
from runtime.core.errors import UserError
from triton_repo import serve
from triton_repo.triton.server import AUTO, OWN, TRITON, VERSION_VARIABLE, Installation, choose_server


def installed(directory: Path, version: str | None, *, is_wheel: bool = False) -> Installation:
    """As NVIDIA's container has it, or without the file of the version."""
    (directory / "bin").mkdir(exist_ok=True)
    if version is not None:
        (directory / "TRITON_VERSION").write_text(f"{version}\n")
    binary = directory / "bin" / "tritonserver"
    binary.write_text("#!/bin/sh\nexit 3\n")
    binary.chmod(0o755)
    return Installation(binary, directory if is_wheel else None, None)


def missing() -> Installation:
    raise UserError("no tritonserver")


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        ("2.59.0", "is Triton 2.59.0"),
        ("2.61.0dev", "is Triton 2.61.0dev"),
        ("3.0.0", "is Triton 3.0.0"),
        ("2.58.0", "is Triton 2.58.0, which is trusted from 2.59 (release 25.07) on"),
        ("2.6.0", "is Triton 2.6.0, which is trusted from"),
        ("nonsense", "is not known, and Triton is trusted from"),
        (None, "is not known, and Triton is trusted from"),
    ],
)
def test_triton_is_taken_from_its_version_on(
    version: str | None, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VERSION_VARIABLE, raising=False)
    installation = installed(tmp_path, version)
    choice = choose_server(AUTO, lambda: installation)
    assert reason in choice.reason
    assert (choice.installation is not None) == reason.endswith(f"is Triton {version}")
    assert choice.line.startswith("our own server" if choice.installation is None else "Triton runs")


def test_the_version_of_an_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its variable says nothing of a wheel that is installed in it."""
    monkeypatch.setenv(VERSION_VARIABLE, "2.60.0")
    assert choose_server(AUTO, lambda: installed(tmp_path, None)).installation is not None
    assert choose_server(AUTO, lambda: installed(tmp_path, None, is_wheel=True)).installation is None


def test_what_was_asked_for(tmp_path: Path) -> None:
    assert choose_server(AUTO, missing).reason == "no tritonserver is installed"
    assert choose_server(OWN, lambda: pytest.fail("it was looked for")).installation is None
    assert choose_server(TRITON, lambda: installed(tmp_path, "2.1.0")).installation is not None
    with pytest.raises(UserError, match="no tritonserver"):
        choose_server(TRITON, missing)


def test_the_defaults() -> None:
    assert serve.parse_args(["--bundle", "engines"])[0].server == TRITON


def test_ctc_serve_says_in_a_line_what_it_takes(
    tiny_bundle_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    installation = installed(tmp_path, "2.59.0")
    monkeypatch.setattr(serve, "find_server", lambda: installation)
    monkeypatch.setattr(serve, "check_ports", lambda args: None)
    assert main(["serve", "--bundle", str(tiny_bundle_dir), "--openai-port=0"]) == 1
    first, last = capsys.readouterr().err.splitlines()
    assert first == f"serve: Triton runs the models, because {installation.binary} is Triton 2.59.0"
    assert last.startswith("serve: tritonserver ended with status 3 before it was ready")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--log-verbose=1", "--log-verbose: is no option of our own server, which runs because"),
        ("--opnai-port=9", "--opnai-port: is no option of the server; did you mean --openai-port?"),
        ("--num-instances=2", "--num-instances: must be 1, got 2: our own server has one process"),
    ],
)
def test_options_that_our_own_server_lacks(
    option: str, message: str, tiny_bundle_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve.main(["--bundle", str(tiny_bundle_dir), "--server", OWN, option]) == 2
    assert capsys.readouterr().err.startswith(f"serve: {message}")

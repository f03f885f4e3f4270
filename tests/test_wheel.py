"""The wheel: what it holds, and that its commands work away from the clone."""

import io
import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PACKAGES = PROJECT["tool"]["importlinter"]["root_packages"]
# What ``python -m build --wheel`` calls, without the environment of its own that it downloads.
BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
# Commands in one process, which imports torch once.
COMMANDS = """
import json, sys
from pathlib import Path
import export, runtime, training
from ctc_speculator.__main__ import main

assert all(Path(p.__file__).is_relative_to(sys.argv[1]) for p in (export, runtime, training))
for arguments in json.loads(sys.argv[2]):
    status = main(arguments)
    assert status == 0, (arguments, status)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of the working tree's sources, built outside it: setuptools leaves files where it builds."""
    source = tmp_path_factory.mktemp("source")
    for name in PACKAGES:
        ignored = shutil.ignore_patterns("__pycache__", "*.safetensors")
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-c", BUILD, str(out)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return out / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as ``pip install --no-deps --target`` puts it; a wheel of Python code is a zip file."""
    target = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(io.BytesIO(wheel.read_bytes())) as archive:
        archive.extractall(target)
    return target


def test_every_extra_can_be_installed_with_the_constraints() -> None:
    pins = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
    )
    extras = {"": PROJECT["project"]["dependencies"], **PROJECT["project"]["optional-dependencies"]}
    found = [(extra, Requirement(text)) for extra, texts in extras.items() for text in texts]
    wrong = [
        f"{extra}: {requirement}, pinned to {pins[requirement.name]}"
        for extra, requirement in found
        if requirement.name in pins and pins[requirement.name] not in requirement.specifier
    ]
    assert not wrong
    # Extras that are installed together, or one after another, must agree.
    assert len({str(each.specifier) for _, each in found if each.name == "cuda-bindings"}) == 1


def run(installed: Path, place: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run Python in ``place`` with the wheel's packages before the clone's.

    Files that were just installed have no compiled functions yet. Numba interprets the functions, since
    compiling them all takes longer than everything else here, and the clone's tests run them compiled.
    """
    environment = {**os.environ, "PYTHONPATH": str(installed), "NUMBA_DISABLE_JIT": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, check=False)


def test_the_wheel_holds_every_package_and_nothing_else(installed: Path) -> None:
    (info,) = installed.glob("*.dist-info")
    assert sorted(path.name for path in installed.iterdir() if path != info) == sorted(PACKAGES)
    files = {str(path.relative_to(installed)) for path in installed.rglob("*") if path.is_file()}
    sources = {str(path.relative_to(ROOT)) for name in PACKAGES for path in (ROOT / name).rglob("*.py")}
    assert {name for name in files if name.endswith(".py")} == sources
    for name in (
        "export/calibration_text.txt",
        "export/quality_text.txt",
        "runtime/profiler/page.html",
        "training/accelerate/ddp.yaml",
        "triton_repo/page/page.html",
        "triton_repo/models/ctc_llm/config.pbtxt",
    ):
        assert name in files
    assert not [name for name in files if name.endswith(".safetensors")]


def test_the_readme_names_what_the_wheel_installs() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (sentence,) = [part for part in readme.split("\n\n") if "top-level packages" in part]
    assert [name for name in PACKAGES if f"`{name}`" not in sentence] == []


def test_the_command_of_the_wheel(installed: Path, tmp_path: Path) -> None:
    (entries,) = installed.glob("*.dist-info/entry_points.txt")
    assert "ctc = ctc_speculator.__main__:main" in entries.read_text(encoding="utf-8").splitlines()
    done = run(installed, tmp_path, "-m", "ctc_speculator", "--version")
    assert done.stdout == f"ctc-speculator {PROJECT['project']['version']}\n", done.stderr


def test_commands_work_away_from_the_clone(installed: Path, tiny_model_dir: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"How many {i}?", "completion": f" There are {i} of them."} for i in range(8)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    train = (
        "--labels data --precision fp32 --num-frames 4 --steps 2 --warmup 1 --batch-size 2 --num-anchors 4 "
    )
    train += "--holdout 0.2"
    lines = [
        f"train --model {tiny_model_dir} --data data.jsonl --out head {train}",
        f"build --model {tiny_model_dir} --drafter head --out engines",
        "generate --bundle engines --prompt How? --max-new-tokens 8 --json",
        "profile --bundle engines --prompts data.jsonl --out report --max-prompts 1 --max-new-tokens 4 "
        "--num-nodes 2 --warmup 0",
    ]
    commands = [line.split() for line in lines]
    done = run(installed, tmp_path, "-c", COMMANDS, str(installed), json.dumps(commands))
    assert done.returncode == 0, done.stderr[-3000:]
    assert '"prompt": "How?"' in done.stdout
    assert (tmp_path / "report/report.html").is_file()
    assert (tmp_path / "head/model.safetensors").is_file()

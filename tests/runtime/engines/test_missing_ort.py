"""Without ONNX Runtime, commands end with one line that names what to install."""

import subprocess
import sys
from pathlib import Path

import pytest

WITHOUT = "import runpy, sys; sys.modules['onnxruntime'] = None; sys.argv = sys.argv[1:]; "
WITHOUT += "runpy.run_module(sys.argv[0], run_name='__main__')"


def run(*arguments: str) -> tuple[int, str, str]:
    """A command's exit status, stdout and stderr, on a machine that lacks ONNX Runtime."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, *arguments], capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("module", "options"),
    [
        ("runtime.generate", ["--prompt", "x"]),
        ("benchmarks.gpu", ["--device", "cpu"]),
    ],
)
def test_one_line_names_what_to_install(
    module: str, options: list[str], tiny_step_bundle: Path, tmp_path: Path
) -> None:
    if module == "benchmarks.gpu":
        options = [*options, "--out", str(tmp_path / "out")]
    status, output, written = run(module, "--bundle", str(tiny_step_bundle), *options)
    (line,) = written.splitlines()
    assert status == 2
    assert output == ""
    assert "ONNX Runtime cannot be imported: pip install -c constraints.txt -e '.[cpu]'" in line
    assert "'.[gpu]'" in line
    assert not (tmp_path / "out").exists() or list((tmp_path / "out").iterdir()) == []


def test_help_needs_no_library() -> None:
    status, output, _ = run("runtime.generate", "--help")
    assert status == 0
    assert "--bundle" in output

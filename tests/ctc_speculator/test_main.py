"""The command ``ctc``: what it lists, imports and passes on; full disks and closed pipes."""

import importlib.metadata
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from ctc_speculator.__main__ import COMMANDS, GROUPS, Command, help_text, main, run, version
from runtime.core.cli import coloured

ROOT = Path(__file__).resolve().parents[2]
HEAVY = (
    "torch",
    "transformers",
    "onnxruntime",
    "onnx",
    "numba",
    "tokenizers",
    "tritonclient",
    "aiohttp",
    "jinja2",
    "openai",
)
# Prints, for each command, its help text and the large libraries that are imported until then.
HELP = """
import contextlib, io, json, sys
from ctc_speculator.__main__ import main
found = {}
for name in sys.argv[2:]:
    with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.suppress(SystemExit):
        main([name, "--help"])
    found[name] = [text.getvalue(), [heavy for heavy in json.loads(sys.argv[1]) if heavy in sys.modules]]
print(json.dumps(found))
"""


def test_help_lists_every_command_once() -> None:
    grouped = [name for names in GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(COMMANDS)
    for command in COMMANDS.values():
        assert f"  {command.name} " in help_text()


def test_help_of_commands_imports_no_large_library() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HELP, json.dumps(HEAVY), *COMMANDS],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    for name, (text, heavy) in json.loads(done.stdout).items():
        assert heavy == [], name
        assert text.startswith(f"usage: ctc {name} ")
        assert text.count(f"    ctc {name} ") >= 2, f"{name}: two examples"
        assert f"python -m {COMMANDS[name].module}" not in text


def test_the_version_is_pyprojects(capsys: pytest.CaptureFixture[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert version() == f"{project['name']} {project['version']}"
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == version() + "\n"
    extras = importlib.metadata.metadata("ctc-speculator").get_all("Provides-Extra") or []
    assert {command.extra for command in COMMANDS.values()} <= set(extras)


def test_a_missing_library_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "needs_absent.py").write_text("import absent_library.part\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert run(Command("build", "needs_absent", "export", "x"), []) == 2
    line = "ctc build: the package absent_library is missing: pip install 'ctc-speculator[export]'\n"
    assert capsys.readouterr().err == line


def test_a_module_of_ours_that_is_missing_is_a_defect() -> None:
    with pytest.raises(ModuleNotFoundError):
        run(Command("build", "runtime.absent", "export", "x"), [])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full is Linux's")
def test_a_full_disk_is_one_line() -> None:
    script = "import sys; from runtime.core.cli import exit_status; "
    script += "sys.exit(exit_status('ctc generate', lambda: print('x' * 9) or 0))"
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", script],
            cwd=ROOT,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 2
    expected = "ctc generate: No space left on device; free some space and run the same command again\n"
    assert done.stderr == expected


def test_a_closed_pipe_is_silent() -> None:
    script = "import sys; from runtime.core.cli import exit_status; "
    script += "sys.exit(exit_status('x', lambda: print('x' * 10**6) or 0))"
    command = f'{sys.executable} -c "{script}" | true; echo ${{PIPESTATUS[0]}}'
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("1\n", "")


@pytest.mark.parametrize(
    ("terminal", "no_color", "expected"), [(True, "", True), (True, "1", False), (False, "", False)]
)
def test_colours_are_for_terminals(
    terminal: bool, no_color: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal)
    monkeypatch.setenv("NO_COLOR", no_color)
    assert coloured(True) is expected
    assert coloured(False) is False


def test_an_interrupted_import_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where a library makes an ImportError of it; another ImportError is a defect."""
    monkeypatch.syspath_prepend(str(tmp_path))
    made = (
        "try:\n    raise KeyboardInterrupt\nexcept BaseException as stop:\n    raise ImportError from stop\n"
    )
    for name, code in (("stopped", "raise KeyboardInterrupt"), ("made_of_it", made)):
        (tmp_path / f"{name}.py").write_text(code)
        assert run(Command("build", name, "export", ""), []) == 130
        assert capsys.readouterr().err == "ctc build: interrupted\n"
    (tmp_path / "broken.py").write_text("raise ImportError('a symbol is missing')")
    with pytest.raises(ImportError, match="a symbol is missing"):
        run(Command("build", "broken", "export", ""), [])


def test_help_for_a_reader_that_leaves() -> None:
    program = "import sys; from ctc_speculator.__main__ import main; sys.exit(main(['--help']))"
    command = f'"{sys.executable}" -c "{program}" | true'
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stderr == ""

"""Ctrl-C at any time: one line that says what to do, on a line of its own."""

import contextlib
import json
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from accelerate.state import AcceleratorState

from training import train
from training.config import TrainingConfig
from training.data import sequences
from training.head_set import HeadSet
from training.loop.progress import BEFORE, RunPhase


@pytest.fixture(autouse=True)
def fresh_accelerator() -> Iterator[None]:
    """accelerate keeps its first settings for the life of a process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def argv(tiny_model_dir: Path, tmp_path: Path) -> list[str]:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{i} + {i}?"}) + "\n" for i in range(6)))
    flags = (
        "--max-new-tokens 8 --distill-batch-size 2 --steps 2 --batch-size 2 --num-anchors 2 --precision fp32"
    )
    flags += " --preset paper --num-frames 3 --holdout 0.4"
    paths = ["--model", str(tiny_model_dir), "--data", str(data), "--out", str(tmp_path / "out")]
    return [*paths, *flags.split()]


def interrupted(argv: list[str], capsys: Any) -> str:
    """The last line of a run that is interrupted: no progress bar is on it."""
    capsys.readouterr()
    assert train.main(argv) == 130
    *_, last, empty = capsys.readouterr().err.split("\n")
    assert empty == ""
    assert last.startswith("train: interrupted ")
    return str(last.removeprefix("train: "))


class Interrupting:
    """An importer during which Ctrl-C is pressed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "training.loop.run":
            raise KeyboardInterrupt


def test_while_libraries_load(
    argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.delitem(sys.modules, "training.loop.run", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupting(), *sys.meta_path])
    assert interrupted(argv, capsys) == BEFORE
    assert {path.name for path in tmp_path.iterdir()} == {"data.jsonl"}


@pytest.mark.parametrize("then", ["goes on", "fails"])
def test_a_library_that_swallows_the_interruption(
    argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, then: str
) -> None:
    """numpy was imported by half, and the run went on until something was missing."""

    class Swallowing:
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
            if name == "training.loop.run":
                with contextlib.suppress(KeyboardInterrupt):
                    signal.raise_signal(signal.SIGINT)
                if then == "fails":
                    raise AttributeError("module 'numpy' has no attribute 'matrix'")

    monkeypatch.delitem(sys.modules, "training.loop.run", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Swallowing(), *sys.meta_path])
    assert interrupted(argv, capsys) == BEFORE
    assert {path.name for path in tmp_path.iterdir()} == {"data.jsonl"}
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_while_distilling_and_before_the_first_checkpoint(
    argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """What was distilled is kept, and the same command goes on."""
    real, calls = sequences._show, 0

    def progress(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 12:  # in the second of three batches
            raise KeyboardInterrupt
        return real(*arguments, **options)

    monkeypatch.setattr(sequences, "_show", progress)
    line = interrupted(argv, capsys)
    cache = tmp_path / "out.run/cache"
    assert line == (
        f"interrupted while distilling; what is finished is kept in {cache}, run the same command again to "
        "go on"
    )
    (store,) = cache.iterdir()
    assert len(store.read_text().splitlines()) == 2  # the settings and the first batch

    def forward(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(HeadSet, "forward", forward)
        line = interrupted(argv, capsys)
    assert calls == 12 + 18  # two batches of eight tokens, and their ends
    assert line == (
        "interrupted at step 0, before the first checkpoint (--save-every 200); run the same command again "
        "to begin anew"
    )
    assert train.main(argv) == 0
    assert calls == 12 + 18
    assert (tmp_path / "out/model.safetensors").exists()


def test_what_to_do_depends_on_the_checkpoint_and_the_flags() -> None:
    config = TrainingConfig(model=Path("m"), out=Path("o"), data=(Path("d"),))
    phase = RunPhase()
    phase.training(config, 7, 5)
    assert phase.line == "interrupted at step 7; run the same command with --resume to go on from step 5"
    phase.training(replace(config, overwrite=True), 7, 5)
    assert "with --resume without --overwrite to go on from step 5" in phase.line
    phase.writing(replace(config, overwrite=True))
    assert "with --resume without --overwrite to evaluate and write them" in phase.line
    phase.training(replace(config, resume=True), 7, 5)
    assert phase.line == "interrupted at step 7; run the same command again to go on from step 5"

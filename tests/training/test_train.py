"""Whole training runs of a tiny head: resuming, learning, what is written, errors, two processes."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from torch import Tensor

from drafters.ctc import CTCDrafter
from training import checkpoint, train
from training.config import TrainingConfig

# Two processes add the same gradients in another order, and AdamW divides by their size.
PROCESSES_TOL = 1e-5
# One process a rank; keeps its head, whatever the rank writes.
RANK_SCRIPT = """
import os, sys
from safetensors.torch import save_file
from training import train

made, make_drafter = [], train.make_drafter
train.make_drafter = lambda *arguments: made.append(make_drafter(*arguments)) or made[-1]
code = train.main(sys.argv[2:])
save_file(made[0].state_dict(), f"{sys.argv[1]}/rank-{os.environ['RANK']}.safetensors")
raise SystemExit(code)
"""


@pytest.fixture(autouse=True)
def fresh_accelerator() -> Iterator[None]:
    """accelerate keeps its first settings for the life of a process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "sums.jsonl"
    rows = [
        {"question": f"{i} + {i + 1}?", "answer": f"That is {2 * i + 1}, as {i} fits."} for i in range(20)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def arguments(model_dir: Path, data_file: Path, out: Path, **changed: Any) -> list[str]:
    settings = {
        "model": model_dir,
        "data": data_file,
        "out": out,
        "labels": "data",
        "precision": "fp32",
        "num_frames": 4,
        "num_labels": 3,
        "steps": 6,
        "warmup": 2,
        "batch_size": 3,
        "num_anchors": 4,
        "holdout": 0.2,
        "eval_every": 2,
        "save_every": 3,
    }
    return [
        part
        for name, value in (settings | changed).items()
        for part in ["--" + name.replace("_", "-"), *([] if value is True else [str(value)])]
    ]


def weights(out: Path) -> dict[str, Tensor]:
    return load_file(out / "model.safetensors")


def only_line(capsys: Any) -> str:
    """What ``main`` printed of an error; transformers' progress bar aside."""
    lines = [line for line in capsys.readouterr().err.splitlines() if "Loading weights" not in line]
    (line,) = filter(None, lines)
    assert line.startswith("train: ")
    return str(line)


def interrupt_after(monkeypatch: pytest.MonkeyPatch, micro_steps: int) -> None:
    """Ctrl-C in the loss of the micro step after these."""
    real, count = train.batch_loss, 0

    def batch_loss(*arguments: Any) -> Tensor:
        nonlocal count
        count += 1
        if count > micro_steps:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(train, "batch_loss", batch_loss)


@pytest.mark.parametrize("changes", [{}, {"cache_features": True}], ids=["live", "cached"])
def test_resumed_run_equals_uninterrupted_run(
    tiny_model_dir: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
    changes: dict[str, Any],
) -> None:
    """Interrupted in the second micro step of step 5 of 6; the checkpoint is of step 3."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert train.main(arguments(tiny_model_dir, data, whole, grad_accumulation=2, **changes)) == 0
    argv = arguments(tiny_model_dir, data, parts, grad_accumulation=2, **changes)
    with monkeypatch.context() as patch:
        interrupt_after(patch, 9)
        assert train.main(argv) == 130
    assert "--resume" in capsys.readouterr().err
    assert not (parts / "model.safetensors").exists()
    assert json.loads((parts / "checkpoint/state.json").read_text())["step"] == 3
    assert train.main([*argv, "--resume"]) == 0
    expected = weights(whole)
    found = weights(parts)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    assert curve(parts) == curve(whole)


def curve(out: Path) -> list[dict[str, float]]:
    found: list[dict[str, float]] = json.loads((out / "training.json").read_text())["curve"]
    return found


def test_resume_with_more_steps(tiny_model_dir: Path, data: Path, tmp_path: Path) -> None:
    assert train.main(arguments(tiny_model_dir, data, tmp_path, steps=3)) == 0
    before = weights(tmp_path)
    assert train.main(arguments(tiny_model_dir, data, tmp_path, steps=5, resume=True)) == 0
    assert [point["step"] for point in curve(tmp_path)] == [2, 3, 4, 5]
    assert not torch.equal(weights(tmp_path)["blank.weight"], before["blank.weight"])
    # Fewer steps than were done: nothing is left to do.
    after = weights(tmp_path)
    assert train.main(arguments(tiny_model_dir, data, tmp_path, steps=4, resume=True)) == 0
    assert torch.equal(weights(tmp_path)["blank.weight"], after["blank.weight"])


@pytest.mark.parametrize("loss", ["prefix", "ctc", "ce"])
def test_loss_falls_on_few_sequences(tiny_model_dir: Path, data: Path, tmp_path: Path, loss: str) -> None:
    few = tmp_path / "few.jsonl"
    few.write_text("".join(data.read_text().splitlines(keepends=True)[:4]))
    changes = {"loss": loss, "steps": 30, "eval_every": 5, "learning_rate": 5e-3, "num_anchors": 16}
    assert train.main(arguments(tiny_model_dir, few, tmp_path / "out", **changes)) == 0
    losses = [point["loss"] for point in curve(tmp_path / "out")]
    assert losses[-1] < 0.5 * losses[0]


def test_distilled_run_writes_what_it_promises(
    tiny_model_dir: Path, data: Path, tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "head"
    changes = {"labels": "distill", "max_new_tokens": 10, "max_samples": 12, "precision": "bf16", "steps": 3}
    assert train.main(arguments(tiny_model_dir, data, out, **changes)) == 0
    assert "tokens per step" in capsys.readouterr().out
    names = {path.name for path in out.iterdir()}
    assert names == {"config.json", "model.safetensors", "training.json", "logs", "checkpoint", "cache"}
    drafter = CTCDrafter.from_pretrained(out)
    assert drafter.config.num_frames == 4
    assert drafter.config.base_model == tiny_model_dir.name
    assert all(value.dtype == torch.float32 for value in weights(out).values())
    assert [path.name.split(".")[0] for path in (out / "logs").iterdir()] == ["events"]
    assert next((out / "cache").iterdir()).name.startswith("distilled-")

    text = (out / "training.json").read_text()
    record = json.loads(text)
    assert [point["step"] for point in record["curve"]] == [2, 3]
    assert all(point["beta"] >= 1 for point in record["curve"])
    assert record["steps"] == 3
    assert record["num_sequences"] == 12
    assert re.fullmatch("[0-9a-f]{64}", record["data_sha256"])
    assert (
        record["versions"]["torch"] == torch.__version__.split("+")[0] or "+" in record["versions"]["torch"]
    )
    assert record["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert set(record["versions"]) == {"torch", "transformers", "accelerate"}
    assert record["settings"]["data"] == ["sums.jsonl"]
    assert record["settings"]["learning_rate"] == 1e-3
    # It is published with the head: no path of this machine.
    assert not re.search(r'"[^"]*/[^"]*"', text + (out / "config.json").read_text())


def test_the_backbone_stays_as_it_was(
    tiny_model_dir: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[Any, CTCDrafter]] = []
    real = train.make_drafter

    def make_drafter(model: Any, config: TrainingConfig) -> CTCDrafter:
        made.append((model, real(model, config)))
        return made[-1][1]

    monkeypatch.setattr(train, "make_drafter", make_drafter)
    assert train.main(arguments(tiny_model_dir, data, tmp_path, steps=2)) == 0
    model, drafter = made[0]
    original = load_file(tiny_model_dir / "model.safetensors")
    for name, value in model.state_dict().items():
        assert torch.equal(value, original[name]), name
    assert not any("lm_head" in name or "embed" in name for name in weights(tmp_path))
    assert torch.equal(drafter.lm_head, original["lm_head.weight"])


def test_learning_rate_warms_up_then_falls_to_zero() -> None:
    config = TrainingConfig(Path("m"), (Path("d"),), Path("o"), steps=100, warmup=10, learning_rate=2.0)
    rates = [train.learning_rate(step, config) for step in range(101)]
    assert rates[:2] == pytest.approx([0.2, 0.4])
    assert rates[9] == rates[10] == max(rates) == 2.0
    assert rates[55] == pytest.approx(1.0)
    assert rates[100] == pytest.approx(0.0)
    assert sorted(rates[10:], reverse=True) == rates[10:]
    no_warmup = TrainingConfig(Path("m"), (Path("d"),), Path("o"), steps=1, warmup=0)
    assert train.learning_rate(0, no_warmup) == no_warmup.learning_rate


def test_interrupted_checkpoint_write_leaves_one_to_resume_from(tmp_path: Path) -> None:
    """However far the replacement got, the old or the new state is found, and the next save works."""
    head = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(head.parameters())
    directory = tmp_path / "checkpoint"
    old = tmp_path / "checkpoint.old"
    checkpoint.save_checkpoint(directory, head, optimizer, {"step": 1})
    directory.rename(old)  # killed between the two renames
    assert checkpoint.load_checkpoint(directory, head, optimizer)["step"] == 1
    checkpoint.save_checkpoint(directory, head, optimizer, {"step": 2})
    assert checkpoint.load_checkpoint(directory, head, optimizer)["step"] == 2
    old.mkdir()  # killed before the old one was gone
    (old / "state.json").write_text('{"step": 1}')
    assert checkpoint.load_checkpoint(directory, head, optimizer)["step"] == 2
    checkpoint.save_checkpoint(directory, head, optimizer, {"step": 3})
    assert checkpoint.load_checkpoint(directory, head, optimizer)["step"] == 3
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": "mse"}, "--loss: must be one of prefix, ctc, ce, got 'mse'"),
        ({"labels": "none"}, "--labels: must be distill or data"),
        ({"precision": "fp16"}, "--precision: must be bf16 or fp32"),
        ({"save_precision": "bf16"}, "--save-precision: must be fp32 or fp16"),
        ({"holdout": 1.0}, "--holdout: must be between 0 and 1"),
        ({"steps": 0}, "--steps: must be at least 1, got 0"),
        ({"num_frames": -1}, "--num-frames: must be at least 1, got -1"),
        ({"model": "no-such-model"}, "--model: no-such-model has no config.json"),
        ({"data": "no-such-data.jsonl"}, "--data: no-such-data.jsonl does not exist"),
        ({"target_layer_ids": 7}, "target_layer_ids must be distinct, ascending decoder layers below 2"),
        ({"max_length": 4}, "--max-length: every prompt is longer than 2 tokens"),
        ({"resume": True}, "holds no checkpoint"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(
    tiny_model_dir: Path,
    data: Path,
    tmp_path: Path,
    capsys: Any,
    changes: dict[str, Any],
    message: str,
) -> None:
    assert train.main(arguments(tiny_model_dir, data, tmp_path / "out", **changes)) == 2
    assert message in only_line(capsys)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ('{"prompt": "hi"}\n{"prompt": 1}\n', r"bad\.jsonl:2: field 'prompt'"),
        ('{"prompt": "hi"}\n', "--labels data: no row of the data holds an answer"),
        ('{"prompt": "hi", "completion": "one"}\n', "--data: no sequence with a continuation is left"),
    ],
)
def test_bad_data_is_one_line_and_exits_2(
    tiny_model_dir: Path, tmp_path: Path, capsys: Any, rows: str, message: str
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(rows)
    assert train.main(arguments(tiny_model_dir, path, tmp_path / "out")) == 2
    assert re.search(message, only_line(capsys))


def test_a_model_directory_without_weights_is_one_line(data: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert train.main(arguments(tmp_path, data, tmp_path / "out")) == 2
    assert "--model: " in only_line(capsys)


def test_resume_with_another_head_is_refused(
    tiny_model_dir: Path, data: Path, tmp_path: Path, capsys: Any
) -> None:
    assert train.main(arguments(tiny_model_dir, data, tmp_path, steps=1)) == 0
    capsys.readouterr()
    assert train.main(arguments(tiny_model_dir, data, tmp_path, steps=2, num_frames=5, resume=True)) == 2
    assert "holds a head of another shape" in capsys.readouterr().err


def test_a_loss_that_is_not_a_number_stops_the_run(
    tiny_model_dir: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    real = train.batch_loss
    monkeypatch.setattr(train, "batch_loss", lambda *given: real(*given) * float("nan"))
    assert train.main(arguments(tiny_model_dir, data, tmp_path)) == 2
    assert "the loss is nan at step 0; lower --learning-rate" in capsys.readouterr().err


@pytest.mark.slow
def test_two_processes_equal_one_with_twice_the_micro_steps(
    tiny_model_dir: Path, data: Path, tmp_path: Path
) -> None:
    """torchrun with gloo: the same batches, their gradients averaged; only the main process writes."""
    one, two = tmp_path / "one", tmp_path / "two"
    script = tmp_path / "rank.py"
    script.write_text(RANK_SCRIPT)
    changes: dict[str, Any] = {
        "labels": "distill",
        "max_new_tokens": 8,
        "steps": 4,
        "save_every": 2,
        "cache_features": True,
    }
    # Two micro steps each, so that gradients are summed before and after they are averaged.
    argv = arguments(tiny_model_dir, data, two, grad_accumulation=2, **changes)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *launcher, str(script), str(tmp_path), *argv],
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        cwd=Path(train.__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("wrote ") == 1
    first, second = (load_file(tmp_path / f"rank-{rank}.safetensors") for rank in (0, 1))
    found = weights(two)
    for name, value in found.items():
        assert torch.equal(first[name], value), name
        assert torch.equal(second[name], value), name
    assert len(list((two / "logs").iterdir())) == 1

    assert train.main(arguments(tiny_model_dir, data, one, grad_accumulation=4, **changes)) == 0
    for name, value in weights(one).items():
        torch.testing.assert_close(found[name], value, rtol=PROCESSES_TOL, atol=PROCESSES_TOL)
    assert [point["beta"] for point in curve(two)] == [point["beta"] for point in curve(one)]

"""Whole training runs of tiny heads: resuming, learning, what is written, errors, two processes."""

import dataclasses
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from torch import Tensor

from drafters.base import Drafter
from drafters.build import load_drafter
from export.source import load_source
from integrations.transformers.publish import PublishError, write_hub_files
from runtime.core import system
from runtime.core.system import locked_directory
from training import train
from training.config import TrainingConfig
from training.data.sequences import Sequences
from training.fresh_heads import adapters_from_the_top
from training.head_set import HeadSet
from training.loop import evaluation, run, start, writer
from training.loop.evaluation import Evaluation, fit_calibration
from training.settings import TrainingError

# Of every kind that is trained otherwise: repeats merge or not, a transition, an LM head of its own,
# streams.
HEADS = {
    "first": "num_frames = 4\nnum_labels = 3\nseed = 3",
    "second": 'drafter_type = "block"\ntransition = "mlp"\nsoft_labels = 0.5\nnum_frames = 3\nnum_labels = 4',
    "third": 'drafter_type = "medusa"\nown_lm_head = true\nlearning_rate = 0.01\nnum_frames = 2',
    "fourth": 'transition = "mlp"\nsoft_labels = 0.5\nnum_frames = 4\nnum_labels = 3\ndraft_vocab_size = 60',
    "streams": 'drafter_type = "streaming"\nnum_layers = 1\nstream_mode = "shared"\nnum_frames = 3',
    # All parameters of these two are matrices.
    "streams-alone": 'drafter_type = "streaming"\nnum_layers = 1\nnum_frames = 2',
    "ctc-streams": 'trunk = "streams"\nframe_start = "fused"\nnum_layers = 1\nnum_frames = 3',
}


@pytest.fixture(autouse=True)
def fresh_accelerator(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """accelerate keeps its first settings for the life of a process; little text suffices to calibrate."""
    monkeypatch.setattr(writer, "MIN_CALIBRATION_STEPS", 1)
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
        "frame_start": "anchor",
        "transition": "none",
        "soft_labels": 0,
        "steps": 6,
        "warmup": 2,
        "batch_size": 3,
        "num_anchors": 4,
        "holdout": 0.2,
        "eval_every": 2,
        "save_every": 3,
    }
    if "heads" in changed:  # which have these settings of their own
        settings |= dict.fromkeys(
            ("num_frames", "num_labels", "frame_start", "transition", "soft_labels"), None
        )
    return [
        part
        for name, value in (settings | changed).items()
        if value is not None
        for part in ["--" + name.replace("_", "-"), *([] if value is True else [str(value)])]
    ]


@pytest.fixture
def heads_file(tmp_path: Path) -> Path:
    path = tmp_path / "heads.toml"
    path.write_text("".join(f'[[head]]\nname = "{name}"\n{text}\n' for name, text in HEADS.items()))
    return path


def beside(out: Path) -> Path:
    """What the run keeps for itself."""
    return out.with_name(out.name + ".run")


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
    real, count = HeadSet.forward, 0

    def forward(*arguments: Any) -> Tensor:
        nonlocal count
        count += 1
        if count > micro_steps:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(HeadSet, "forward", forward)


@pytest.mark.parametrize(
    "changes",
    [{"optimizer": "muon"}, {"optimizer": "adamw", "cache_features": True}, {"heads": True}],
    ids=["muon, live", "adamw, cached", "several heads"],
)
def test_resumed_run_equals_uninterrupted_run(
    tiny_model_dir: Path,
    data: Path,
    tmp_path: Path,
    heads_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
    changes: dict[str, Any],
) -> None:
    """Interrupted in the second micro step of step 5 of 6; the checkpoint is of step 3."""
    names = list(HEADS) if "heads" in changes else [""]
    changes |= {"heads": heads_file} if "heads" in changes else {}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert train.main(arguments(tiny_model_dir, data, whole, grad_accumulation=2, **changes)) == 0
    argv = arguments(tiny_model_dir, data, parts, grad_accumulation=2, **changes)
    with monkeypatch.context() as patch:
        interrupt_after(patch, 9)
        assert train.main(argv) == 130
    assert "--resume" in capsys.readouterr().err
    assert not list(parts.rglob("model.safetensors"))
    assert json.loads((beside(parts) / "checkpoint/state.json").read_text())["step"] == 3
    assert train.main([*argv, "--resume"]) == 0
    for head in names:
        assert_same_weights(parts / head, whole / head)
        assert curve(parts / head) == curve(whole / head)


def assert_same_weights(found: Path, expected: Path) -> None:
    ours, theirs = weights(found), weights(expected)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name


def curve(out: Path) -> list[dict[str, float]]:
    found: list[dict[str, float]] = json.loads((out / "training.json").read_text())["curve"]
    return found


def test_resume_with_more_steps(tiny_model_dir: Path, data: Path, tmp_path: Path, capsys: Any) -> None:
    assert train.main(arguments(tiny_model_dir, data, tmp_path, steps=3)) == 0
    before = weights(tmp_path)
    assert train.main(arguments(tiny_model_dir, data, tmp_path, steps=5, resume=True)) == 0
    assert [point["step"] for point in curve(tmp_path)] == [2, 3, 4, 5]
    assert not torch.equal(weights(tmp_path)["blank.weight"], before["blank.weight"])
    # Fewer steps than were done: nothing is left to do.
    after = weights(tmp_path)
    assert "nothing is left" not in capsys.readouterr().out
    assert train.main(arguments(tiny_model_dir, data, tmp_path, steps=4, resume=True)) == 0
    assert "the checkpoint is of step 5 already: nothing is left to train" in capsys.readouterr().out
    assert torch.equal(weights(tmp_path)["blank.weight"], after["blank.weight"])


def test_heads_trained_together_equal_each_trained_alone(
    tiny_model_dir: Path, data: Path, tmp_path: Path, heads_file: Path
) -> None:
    together = tmp_path / "together"
    assert train.main(arguments(tiny_model_dir, data, together, heads=heads_file)) == 0
    names = {path.name for path in together.iterdir()}
    assert names == {*HEADS}
    assert {path.name for path in beside(together).iterdir()} == {"logs", "checkpoint", "best"}
    assert {path.name for path in (beside(together) / "best").iterdir()} == {*HEADS}
    for name, text in HEADS.items():
        one, alone = tmp_path / f"{name}.toml", tmp_path / f"only-{name}"
        one.write_text(f'[[head]]\nname = "{name}"\n{text}\n')
        assert train.main(arguments(tiny_model_dir, data, alone, heads=one)) == 0
        assert_same_weights(together / name, alone / name)
        assert curve(together / name) == curve(alone / name)
        record = json.loads((together / name / "training.json").read_text())
        assert record["head"]["name"] == name
        assert "heads" not in record["settings"]


def test_a_head_by_flags_equals_the_same_head_in_a_file(
    tiny_model_dir: Path, data: Path, tmp_path: Path, heads_file: Path
) -> None:
    heads_file.write_text(f'[[head]]\nname = "first"\n{HEADS["first"]}\n')
    assert train.main(arguments(tiny_model_dir, data, tmp_path / "file", heads=heads_file)) == 0
    flags = arguments(tiny_model_dir, data, tmp_path / "flags", num_frames=4, num_labels=3, seed=3)
    assert train.main(flags) == 0
    assert_same_weights(tmp_path / "flags", tmp_path / "file" / "first")


@pytest.mark.parametrize("changes", [{"seed": 1}, {"data_seed": 1}, {"optimizer": "adamw"}])
def test_what_is_asked_for_changes_the_head(
    tiny_model_dir: Path, data: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    base, other = tmp_path / "base", tmp_path / "other"
    assert train.main(arguments(tiny_model_dir, data, base, steps=1)) == 0
    assert train.main(arguments(tiny_model_dir, data, other, steps=1, **changes)) == 0
    ours, theirs = (weights(out)["layers.0.q_proj.weight"] for out in (base, other))
    assert not torch.equal(ours, theirs)


def test_a_run_may_start_from_another_head(tiny_model_dir: Path, data: Path, tmp_path: Path) -> None:
    """One of another type and depth; a step too small to matter leaves what was taken."""
    assert train.main(arguments(tiny_model_dir, data, tmp_path / "old", steps=2)) == 0
    changes = {
        "init_from": tmp_path / "old",
        "drafter_type": "block",
        "num_frames": 6,
        "num_labels": 6,
        "steps": 1,
    }
    changes |= {"learning_rate": 1e-12, "weight_decay": 0.0}
    assert train.main(arguments(tiny_model_dir, data, tmp_path / "new", **changes)) == 0
    old, new = weights(tmp_path / "old"), weights(tmp_path / "new")
    assert "blank.weight" in old
    assert "blank.weight" not in new
    for name, value in new.items():
        expected = old[name]
        if name == "frame_queries":
            expected = torch.cat((expected, expected[-1:], expected[-1:]))
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-6)
    record = json.loads((tmp_path / "new/training.json").read_text())
    assert record["head"]["init_from"] == "old"


def test_adapters_of_other_heads_start_in_the_same_layers() -> None:
    """The last layer's stay the last layer's; what belongs to the layer where streams begin is left."""
    shapes = {"A.weight": (2, 4), "B.weight": (4, 2)}

    def adapters(layers: int) -> dict[str, Tensor]:
        return {
            f"lora.{i}.q_proj.{n}": torch.full(s, i + 1.0) for i in range(layers) for n, s in shapes.items()
        }

    beside = {"exit_adapter.A.weight": torch.ones(1, 4), "blank.weight": torch.ones(1, 4)}
    found = adapters_from_the_top(adapters(1) | beside, 3)
    assert found.keys() == {"lora.2.q_proj.A.weight", "lora.2.q_proj.B.weight", "blank.weight"}
    found = adapters_from_the_top(adapters(3) | beside, 2)
    assert found["lora.1.q_proj.A.weight"].unique().tolist() == [3.0]
    assert adapters_from_the_top(adapters(2) | beside, 2).keys() == (adapters(2) | beside).keys()


def test_every_kind_of_head_learns(trained_heads_dir: Path) -> None:
    """The session's one run over all of them: a transition, residual frames, LM heads, soft labels."""
    for directory in trained_heads_dir.iterdir():
        if (directory / "config.json").exists():
            record = json.loads((directory / "training.json").read_text())
            losses = [point["loss"] for point in record["curve"]]
            # Soft labels have an entropy of their own, which no head gets below.
            share = 0.9 if record["head"]["soft_labels"] else 0.25
            if record["head"]["trunk"] == "dflash":
                # All frames begin alike, and nothing but their positions and the context tells them apart.
                share = 0.6
            assert losses[-1] < share * losses[0], directory.name
            a, _ = load_drafter(directory).config.calibration or (0, 0)
            assert a > 0
            assert record["held_out"]["tokens_per_step"] >= 1


@pytest.mark.parametrize(
    "changes",
    [
        {"drafter_type": "streaming", "stream_mode": "shared", "num_labels": 4, "optimizer": "adamw"},
        {"drafter_type": "streaming", "num_labels": 4},
        {"trunk": "streams", "transition": "markov", "precision": "bf16"},
    ],
)
def test_streams_learn(tiny_model_dir: Path, data: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    few, out = tmp_path / "few.jsonl", tmp_path / "out"
    few.write_text("".join(data.read_text().splitlines(keepends=True)[:4]))
    changes |= {"num_layers": 1, "steps": 30, "eval_every": 5, "num_anchors": 16, "learning_rate": 0.02}
    assert train.main(arguments(tiny_model_dir, few, out, **changes)) == 0
    losses = [point["loss"] for point in curve(out)]
    assert losses[-1] < 0.7 * losses[0]
    head = load_drafter(out)
    assert head.config.target_layer_ids == (0,)
    assert head.config.calibration is not None


@pytest.mark.parametrize(
    ("loss", "optimizer"), [("prefix", "adamw"), ("ctc", "muon"), ("ce", "adamw"), ("ce", "muon")]
)
def test_loss_falls_on_few_sequences(
    tiny_model_dir: Path, data: Path, tmp_path: Path, loss: str, optimizer: str
) -> None:
    few = tmp_path / "few.jsonl"
    few.write_text("".join(data.read_text().splitlines(keepends=True)[:4]))
    changes = {"loss": loss, "optimizer": optimizer, "learning_rate": 5e-3}
    changes |= {"steps": 30, "eval_every": 5, "num_anchors": 16}
    assert train.main(arguments(tiny_model_dir, few, tmp_path / "out", **changes)) == 0
    losses = [point["loss"] for point in curve(tmp_path / "out")]
    assert losses[-1] < 0.5 * losses[0]


def test_distilled_run_writes_what_it_promises(
    tiny_model_dir: Path, data: Path, tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "head"
    changes = {"labels": "distill", "max_new_tokens": 10, "max_samples": 12, "precision": "bf16", "steps": 3}
    assert train.main(arguments(tiny_model_dir, data, out, **changes)) == 0
    said = capsys.readouterr().out
    assert "tokens per step" in said
    pattern = r"train: the target model continued 12 prompts by [\d,]+ tokens in [\d.,]+ s, [\d.,]+ tokens/s"
    assert len(re.findall(pattern, said)) == 1
    names = {path.name for path in out.iterdir()}
    assert names == {"config.json", "model.safetensors", "training.json", "README.md"}
    own = beside(out)
    assert {path.name for path in own.iterdir()} == {"logs", "checkpoint", "cache", "best"}
    config = load_drafter(out).config
    assert (config.drafter_type, config.num_frames) == ("ctc", 4)
    assert config.base_model == tiny_model_dir.name
    assert config.calibration is not None
    assert all(value.dtype == torch.float32 for value in weights(out).values())
    assert [path.name.split(".")[0] for path in (own / "logs").iterdir()] == ["events"]
    assert next((own / "cache").iterdir()).name.startswith("distilled-")

    text = (out / "training.json").read_text()
    record = json.loads(text)
    assert [point["step"] for point in record["curve"]] == [2, 3]
    assert all(point["beta"] >= 1 for point in record["curve"])
    assert record["settings"]["steps"] == 3
    assert record["held_out"]["tokens_per_step"] == record["curve"][-1]["beta"]
    assert record["num_sequences"] == 12
    assert re.fullmatch("[0-9a-f]{64}", record["data_sha256"])
    assert (
        record["versions"]["torch"] == torch.__version__.split("+")[0] or "+" in record["versions"]["torch"]
    )
    assert record["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert set(record["versions"]) == {"torch", "transformers", "accelerate"}
    assert record["settings"]["data"] == ["sums.jsonl"]
    assert record["head"]["learning_rate"] == 1e-3
    # It is published with the head: no path of this machine.
    assert not re.search(r'"[^"]*/[^"]*"', text + (out / "config.json").read_text())


def test_what_a_run_says(tiny_model_dir: Path, data: Path, tmp_path: Path, capsys: Any) -> None:
    """The summary before the first step, lines of evaluations, skipped rows, and where the best head is."""
    rows, out = tmp_path / "rows.jsonl", tmp_path / "out"
    rows.write_text(data.read_text() + '{"prompt": 1}\n{}\n')
    changes = {"skip_bad_rows": True, "steps": 12, "eval_every": 4}
    assert train.main(arguments(tiny_model_dir, rows, out, **changes)) == 0
    captured = capsys.readouterr()
    lines = [line for line in captured.out.splitlines() if line.startswith("train: ")]
    expected = (
        r"device cpu, precision fp32$",
        r"target model model, [\d.]+ M frozen parameters in float32$",
        r"20 prompts of \d+ tokens, with answers of \d+ tokens; 4 held out$",
        r"--skip-bad-rows left out 2 rows, the first:$",
        r"head: ctc, 4 frames of 3 labels, trunk attention, transition none, loss prefix, [\d,.M ]+ trained",
        r"12 steps of 3 sequences with 4 anchors each; their time is estimated after the first three$",
        r"about [\d.]+ MiB of memory: [\d.]+ MiB for the target model, [\d.]+ MiB for weights, gradients and "
        "moments of the heads; other",
        r"training on 16 sequences of [\d,]+ tokens in all; every 4 steps an evaluation on the same 4",
        r"an evaluation on so few sequences is rough; a larger --holdout holds out more$",
        r"about [\d.e-]+ s a step, so about 1 min for the steps that are left, without evaluations; so far "
        r"at most [\d.]+ [GM]iB of cpu memory were in use$",
        r"step 4: loss [\d.]+ nats a draft, [\d.]+ tokens per step on 4 held-out sequences$",
        r"step 8: loss ",
        r"step 12: loss ",
        r"wrote .*/out: [\d.]+ tokens per step on 4 held-out sequences$",
    )
    for line, pattern in zip(lines, expected, strict=False):
        assert re.match(f"train: {pattern}", line), line
    assert len(lines) - len(expected) in (0, 1)  # the best evaluation may not be the last
    assert f"  {rows}:21: field 'prompt': expected text, got int" in captured.out
    assert re.search(r"loss [\d.]+ nats a draft, lr [\d.e-]+, [\d,]+ tokens/s", captured.err)


def test_a_tokenizer_without_a_chat_template(
    tiny_model_dir: Path, data: Path, tmp_path: Path, capsys: Any
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model_dir, model)
    (model / "chat_template.jinja").unlink()
    assert train.main(arguments(model, data, tmp_path / "head", steps=1)) == 0
    assert "train: the tokenizer has no chat template, so messages are" in capsys.readouterr().out


def test_the_best_head_is_kept_beside_the_last(
    tiny_model_dir: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """The evaluations say 1, 3, 2: the second head is the best, and stays it when the run is resumed."""
    found = iter([1.0, 3.0, 2.0, 2.0, 2.0])
    real = evaluation.evaluate

    def evaluate(*given: Any) -> Evaluation:
        return dataclasses.replace(real(*given), tokens_per_step=next(found))

    monkeypatch.setattr(evaluation, "evaluate", evaluate)
    argv = arguments(tiny_model_dir, data, tmp_path / "out", steps=4, save_every=4)
    assert train.main(argv) == 0
    best = weights(beside(tmp_path / "out") / "best")
    assert torch.equal(best["blank.weight"], weights(tmp_path / "out")["blank.weight"])
    assert train.main([*argv[:-2], "--save-every", "4", "--steps", "6", "--resume"]) == 0
    assert not torch.equal(best["blank.weight"], weights(tmp_path / "out")["blank.weight"])
    again = weights(beside(tmp_path / "out") / "best")
    assert torch.equal(best["blank.weight"], again["blank.weight"])
    line = capsys.readouterr().out.splitlines()[-1]
    assert "the best evaluation was at step 4 (3.0 tokens per step, at the end 2.0); that head is in" in line


def test_the_best_head_is_as_complete_as_the_last_one(
    tiny_model_dir: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after an interruption: it is calibrated, has its own record and card, and can be exported."""
    found = iter([3.0, 2.0])
    real, evaluations = evaluation.evaluate, []

    def evaluate(*given: Any) -> Evaluation:
        evaluations.append(real(*given))
        return dataclasses.replace(evaluations[-1], tokens_per_step=next(found))

    monkeypatch.setattr(evaluation, "evaluate", evaluate)
    interrupt_after(monkeypatch, 5)
    argv = arguments(tiny_model_dir, data, tmp_path / "out", save_precision="fp16")
    assert train.main(argv) == 130
    assert not (tmp_path / "out").exists()
    best = beside(tmp_path / "out") / "best"
    assert {path.name for path in best.iterdir()} == {
        "config.json",
        "model.safetensors",
        "training.json",
        "README.md",
    }
    expected = fit_calibration(np.exp(evaluations[0].log_probs), evaluations[0].accepted)
    assert load_drafter(best).config.calibration == pytest.approx(expected)
    assert {value.dtype for name, value in weights(best).items() if value.ndim > 1} == {torch.float16}
    record = json.loads((best / "training.json").read_text())
    assert [point["step"] for point in record["curve"]] == [2]
    assert record["held_out"] == {
        "tokens_per_step": 3.0,
        "steps": evaluations[0].num_steps,
        "sequences": evaluations[0].num_sequences,
    }
    assert "| trained for | 2 steps on 20 sequences |" in (best / "README.md").read_text()
    assert load_source(tiny_model_dir, best).drafter is not None


def test_too_few_steps_give_no_calibration(
    tiny_model_dir: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(writer, "MIN_CALIBRATION_STEPS", 10**6)
    assert train.main(arguments(tiny_model_dir, data, tmp_path, steps=1)) == 0
    assert load_drafter(tmp_path).config.calibration is None
    assert "has no calibration, because " in capsys.readouterr().out


def test_the_model_card_says_where_a_head_came_from(tiny_model_dir: Path, data: Path, tmp_path: Path) -> None:
    assert train.main(arguments(tiny_model_dir, data, tmp_path, steps=2)) == 0
    card = (tmp_path / "README.md").read_text()
    record = json.loads((tmp_path / "training.json").read_text())
    for fact in (
        f"| base model | {tiny_model_dir.name} |",
        record["data_sha256"],
        f"{record['held_out']['tokens_per_step']} (trees of 16 nodes",
        "num_frames = 4",
        "optimizer = muon",
        load_drafter(tmp_path).config.base_weights,
    ):
        assert fact in card, fact
    assert str(tmp_path.parent) not in card
    # Publishing replaces this card, and no other.
    write_hub_files(tmp_path, repository="me/head", model="some/model")
    assert "base_model: some/model" in (tmp_path / "README.md").read_text()
    with pytest.raises(PublishError, match="expected no such file"):
        write_hub_files(tmp_path, repository="me/head", model="some/model")


def test_the_target_model_stays_as_it_was(
    tiny_model_dir: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[Any, Drafter]] = []
    real = run.make_head

    def make_head(model: Any, *settings: Any) -> Drafter:
        made.append((model, real(model, *settings)))
        return made[-1][1]

    monkeypatch.setattr(run, "make_head", make_head)
    assert train.main(arguments(tiny_model_dir, data, tmp_path, steps=2)) == 0
    model, drafter = made[0]
    original = load_file(tiny_model_dir / "model.safetensors")
    for name, value in model.state_dict().items():
        assert torch.equal(value, original[name]), name
    assert not any("lm_head" in name or "embed" in name for name in weights(tmp_path))
    assert torch.equal(drafter.lm_head, original["lm_head.weight"])


def test_interrupted_checkpoint_write_leaves_one_to_resume_from(tmp_path: Path) -> None:
    """However far the replacement got, the old or the new state is found, and the next save works."""
    head = torch.nn.Linear(2, 2)
    optimizers = [torch.optim.AdamW([head.bias]), torch.optim.Muon([head.weight])]
    head(torch.ones(2)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    directory = tmp_path / "checkpoint"
    old = tmp_path / "checkpoint.old"

    def resumed_step() -> int:
        found = start.find_checkpoint(directory)
        assert found is not None
        step: int = writer.load_checkpoint(found, head, optimizers)["step"]
        return step

    writer.save_checkpoint(directory, head, optimizers, {"step": 1})
    directory.rename(old)  # killed between the two renames
    assert resumed_step() == 1
    writer.save_checkpoint(directory, head, optimizers, {"step": 2})
    assert resumed_step() == 2
    old.mkdir()  # killed before the old one was gone
    (old / "state.json").write_text('{"step": 1}')
    assert resumed_step() == 2
    writer.save_checkpoint(directory, head, optimizers, {"step": 3})
    assert resumed_step() == 3
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
    for name in ("state.json", "state.safetensors"):
        (directory / name).write_bytes((directory / name).read_bytes()[:7])
        with pytest.raises(
            TrainingError, match=f"--resume: {directory} is damaged .*--overwrite begins anew"
        ):
            resumed_step()


def test_a_commit_is_this_projects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The project may be installed within another repository."""
    place = tmp_path / "site-packages/runtime/core/system.py"
    place.parent.mkdir(parents=True)
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    commit = ["git", "-C", str(tmp_path), *identity, "commit", "-q", "--allow-empty", "-m", "x"]
    subprocess.run(commit, check=True)
    monkeypatch.setattr(system, "__file__", str(place))
    assert system.git_sha() is None
    monkeypatch.setattr(system, "__file__", str(tmp_path / "runtime/core/system.py"))
    assert len(system.git_sha() or "") == 40


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": "mse"}, "--loss: must be one of prefix, ctc, ce, streams, got 'mse'"),
        ({"labels": "none"}, "--labels: must be one of distill, data, got 'none'"),
        ({"optimizer": "sgd"}, "--optimizer: must be one of adamw, muon, got 'sgd'"),
        ({"drafter_type": "gru"}, "--drafter-type: must be one of ctc, block, medusa"),
        (
            {"drafter_type": "medusa", "num_labels": 4, "transition": "mlp"},
            "--transition: must be 'none' for medusa",
        ),
        (
            {"drafter_type": "streaming", "num_labels": 4},
            "--num-layers: must be below the model's 2 layers with trunk 'streams', got 2",
        ),
        (
            {"drafter_type": "streaming", "num_labels": 4, "num_layers": 1, "target_layer_ids": 1},
            "--target-layer-ids: must be [0] for streams through the upper 1 of 2 layers, got [1]",
        ),
        ({"transition": "markov", "num_candidates": 300}, "--num-candidates: must be at most vocab_size 258"),
        ({"draft_vocab_size": 300}, "--draft-vocab-size: must be at most vocab_size 258, got 300"),
        (
            {"draft_vocab_size": 20, "transition": "mlp"},
            "--num-candidates: must be at most draft_vocab_size 20",
        ),
        (
            {"own_lm_head": True},
            "--own-lm-head: must be False for ctc with trunk 'attention', got True",
        ),
        ({"init_from": "nowhere"}, "--init-from: nowhere holds no model.safetensors"),
        ({"heads": "nowhere.toml"}, "--heads: nowhere.toml cannot be read"),
        (
            {"heads": "h.toml", "soft_labels": 1},
            "--soft-labels: belongs into h.toml, because --heads is given",
        ),
        ({"precision": "fp16"}, "--precision: must be one of auto, bf16, fp32"),
        ({"save_precision": "bf16"}, "--save-precision: must be one of fp32, fp16, int8"),
        ({"holdout": 1.0}, "--holdout: must be more than 0 and less than 1"),
        ({"steps": 0}, "--steps: must be at least 1, got 0"),
        ({"num_frames": -1}, "--num-frames: must be at least 1, got -1"),
        ({"model": "no-such-model"}, "--model: no-such-model has no config.json"),
        ({"data": "no-such-data.jsonl"}, "--data: no-such-data.jsonl does not exist"),
        ({"target_layer_ids": 7}, "--target-layer-ids: must be distinct, ascending decoder layers below 2"),
        ({"max_length": 4}, "--max-length: every prompt is longer than 2 tokens"),
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


def test_a_model_that_cannot_be_exported_is_refused(data: Path, tmp_path: Path, capsys: Any) -> None:
    """Before the weights are read: there are none."""
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    assert train.main(arguments(tmp_path, data, tmp_path / "out")) == 2
    assert "--model: model_type: must be one of llama, mistral" in only_line(capsys)
    assert not (tmp_path / "out").exists()


def test_a_model_directory_without_weights_is_one_line(data: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert train.main(arguments(tmp_path, data, tmp_path / "out")) == 2
    assert "--model: " in only_line(capsys)


def test_a_head_that_the_model_cannot_have_is_named(
    tiny_model_dir: Path, data: Path, tmp_path: Path, heads_file: Path, capsys: Any
) -> None:
    heads_file.write_text(heads_file.read_text() + '[[head]]\nname = "fourth"\nnum_layers = 0\n')
    assert train.main(arguments(tiny_model_dir, data, tmp_path / "out", heads=heads_file)) == 2
    assert "head 'fourth': num-layers: must be at least 1 for ctc with trunk 'attention', got 0" in only_line(
        capsys
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_frames": 5}, "--num-frames was 4, is 5"),
        ({"drafter_type": "block", "num_labels": 4}, "--drafter-type was ctc, is block"),
        ({"optimizer": "adamw"}, "--optimizer was muon, is adamw"),
        ({"learning_rate": 0.5}, "--learning-rate was 0.001, is 0.5"),
        ({"data": "other"}, "--data was [['sums.jsonl', "),
    ],
)
def test_resume_with_other_settings_is_refused(
    tiny_model_dir: Path, data: Path, tmp_path: Path, capsys: Any, changes: dict[str, Any], message: str
) -> None:
    out, other = tmp_path / "out", tmp_path / "sums.jsonl"
    other.write_text(data.read_text() + '{"question": "1 + 1?", "answer": "2"}\n')
    changes |= {"data": other} if "data" in changes else {}
    assert train.main(arguments(tiny_model_dir, data, out, steps=1)) == 0
    before = (beside(out) / "checkpoint/state.safetensors").read_bytes()
    capsys.readouterr()
    assert train.main(arguments(tiny_model_dir, data, out, **{"steps": 2, "resume": True, **changes})) == 2
    line = only_line(capsys)
    assert f"--resume: {beside(out) / 'checkpoint'} was written with other settings (" in line
    assert message in line
    assert "--allow-changed" in line
    assert (beside(out) / "checkpoint/state.safetensors").read_bytes() == before


def test_resume_with_data_in_another_order_is_refused(
    tiny_model_dir: Path, data: Path, tmp_path: Path, capsys: Any
) -> None:
    """Hold-out and batches depend on it. Files of one name in two directories are told apart, too."""
    second = tmp_path / "more" / data.name
    second.parent.mkdir()
    second.write_text('{"question": "1 + 1?", "answer": "2"}\n' * 4)
    argv = arguments(tiny_model_dir, data, tmp_path / "out", steps=1)
    at = argv.index(str(data))
    assert train.main([*argv[: at + 1], str(second), *argv[at + 1 :]]) == 0
    capsys.readouterr()
    argv = [*argv, "--resume"]
    assert train.main([*argv[:at], str(second), *argv[at:]]) == 2
    assert "--data was [['" in only_line(capsys)
    second.write_text('{"question": "1 + 2?", "answer": "3"}\n' * 4)
    assert train.main([*argv[: at + 1], str(second), *argv[at + 1 :]]) == 2
    assert "--data was [['" in only_line(capsys)


def test_resume_with_another_chat_template_is_refused(
    tiny_model_dir: Path, data: Path, tmp_path: Path, capsys: Any
) -> None:
    """Unless the checkpoint is of a release that did not record it."""
    model, out = tmp_path / "model", tmp_path / "out"
    shutil.copytree(tiny_model_dir, model)
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    (model / "chat_template.jinja").write_text(template)
    assert train.main(arguments(model, data, out, steps=1)) == 0
    (model / "chat_template.jinja").write_text(template + "{# changed #}")
    capsys.readouterr()
    again = arguments(model, data, out, steps=2, resume=True)
    assert train.main(again) == 2
    assert re.search(r"other settings \(the chat template was \w{16}, is \w{16}\);", only_line(capsys))
    state = beside(out) / "checkpoint" / "state.json"
    progress = json.loads(state.read_text())
    del progress["settings"]["the chat template"]
    state.write_text(json.dumps(progress))
    assert train.main(again) == 0


def test_resume_with_heads_in_another_order_is_refused(
    tiny_model_dir: Path, data: Path, tmp_path: Path, capsys: Any
) -> None:
    """The heads may have the same shape, and each would go on with the other's weights."""
    tables = [
        f'[[head]]\nname = "{name}"\nnum_frames = 4\nseed = {seed}\n' for name, seed in (("a", 1), ("b", 2))
    ]
    files = [tmp_path / "ab.toml", tmp_path / "ba.toml"]
    files[0].write_text("".join(tables))
    files[1].write_text("".join(reversed(tables)))
    assert train.main(arguments(tiny_model_dir, data, tmp_path / "out", heads=files[0], steps=1)) == 0
    capsys.readouterr()
    again = {"steps": 2, "resume": True, "allow_changed": True}
    assert train.main(arguments(tiny_model_dir, data, tmp_path / "out", heads=files[1], **again)) == 2
    assert "holds the heads a, b in this order, got b, a" in only_line(capsys)


def test_long_prompts_are_left_out_and_counted(tiny_model_dir: Path, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "long.jsonl"
    rows = [{"prompt": "a" * (90 if i % 3 else 5), "completion": "b" * 9} for i in range(12)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    argv = arguments(tiny_model_dir, path, tmp_path / "out", steps=1, max_length=40)
    assert train.main(argv) == 0
    assert (
        "train: left out 8 of 12 prompts, which are longer than --max-length or the model's context allows"
        in capsys.readouterr().out
    )


def test_sequences_are_no_longer_than_the_models_context(
    tiny_model_dir: Path, tmp_path: Path, capsys: Any
) -> None:
    path = tmp_path / "long.jsonl"
    # The tokenizer knows bytes, and the model 512 positions.
    rows = [{"prompt": "a" * (600 if i % 3 else 5), "completion": "b" * 9} for i in range(12)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert train.main(arguments(tiny_model_dir, path, tmp_path / "out", steps=1)) == 0
    assert "train: left out 8 of 12 prompts" in capsys.readouterr().out


def test_resume_with_changes_that_are_allowed(
    tiny_model_dir: Path, data: Path, tmp_path: Path, capsys: Any
) -> None:
    """All that the tensors permit: a learning rate, but no head of another shape and no other optimizer."""
    assert train.main(arguments(tiny_model_dir, data, tmp_path, steps=1)) == 0
    changes: dict[str, Any] = {"steps": 2, "resume": True, "allow_changed": True}
    others: tuple[tuple[dict[str, Any], str], ...] = (
        ({"num_frames": 5}, "holds heads of other shapes than the settings ask for"),
        ({"optimizer": "adamw"}, "was written with another --optimizer"),
    )
    for own, message in others:
        capsys.readouterr()
        assert train.main(arguments(tiny_model_dir, data, tmp_path, **changes, **own)) == 2
        assert f"--resume: {beside(tmp_path) / 'checkpoint'} {message}" in capsys.readouterr().err
    assert train.main(arguments(tiny_model_dir, data, tmp_path, **changes, learning_rate=0.5)) == 0
    assert "resumed with other settings: --learning-rate was 0.001, is 0.5" in capsys.readouterr().out


def test_a_head_is_never_overwritten_unasked(
    tiny_model_dir: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    out = tmp_path / "out"
    argv = arguments(tiny_model_dir, data, out, steps=4)
    with monkeypatch.context() as patch:
        interrupt_after(patch, 3)
        assert train.main(argv) == 130
    for where, what in ((beside(out), "the checkpoint of an unfinished head"), (out, "a finished head")):
        capsys.readouterr()
        assert train.main(argv) == 2
        expected = f"--out: {where} holds {what}; add --resume to go on or --overwrite to begin anew"
        assert only_line(capsys) == f"train: {expected}"
        assert train.main([*argv, "--resume"]) == 0
    finished = weights(out)
    assert train.main([*argv, "--overwrite", "--seed", "7"]) == 0
    assert not torch.equal(weights(out)["blank.weight"], finished["blank.weight"])
    assert [point["step"] for point in curve(out)] == [2, 4]
    capsys.readouterr()
    assert train.main([*argv, "--overwrite", "--resume"]) == 2
    assert only_line(capsys) == "train: --resume and --overwrite exclude each other"


def test_overwriting_forgets_the_old_checkpoint_once_the_data_is_read(
    tiny_model_dir: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    out, wrong = tmp_path / "out", tmp_path / "wrong.jsonl"
    assert train.main(arguments(tiny_model_dir, data, out, steps=1)) == 0
    wrong.write_text("{}\n")
    assert train.main(arguments(tiny_model_dir, wrong, out, steps=1, overwrite=True)) == 2
    assert (beside(out) / "checkpoint").exists()
    events = set((beside(out) / "logs").iterdir())
    interrupt_after(monkeypatch, 0)
    assert train.main(arguments(tiny_model_dir, data, out, steps=1, overwrite=True)) == 130
    assert not (beside(out) / "checkpoint").exists()
    assert not events & set((beside(out) / "logs").iterdir())
    # The finished head stays until another one is finished.
    assert (out / "model.safetensors").exists()
    capsys.readouterr()
    assert train.main(arguments(tiny_model_dir, data, out, steps=1, resume=True)) == 2
    assert "holds a finished head and no checkpoint; --overwrite begins anew" in only_line(capsys)


def test_two_runs_do_not_share_a_directory(
    tiny_model_dir: Path, data: Path, tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "out"
    beside(out).mkdir()
    with locked_directory(beside(out)):
        assert train.main(arguments(tiny_model_dir, data, out, steps=1)) == 2
    assert only_line(capsys) == f"train: --out: another run trains in {beside(out)}"
    assert train.main(arguments(tiny_model_dir, data, out, steps=1)) == 0
    # Others may read the head, unless the settings of the system say otherwise.
    assert (out / "model.safetensors").stat().st_mode == (out / "config.json").stat().st_mode


def test_answers_that_cannot_follow_their_prompts_are_counted(
    tiny_model_dir: Path, tmp_path: Path, capsys: Any
) -> None:
    model, data = tmp_path / "model", tmp_path / "data.jsonl"
    shutil.copytree(tiny_model_dir, model)
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m['content'].split('</think>')[-1] }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}<think>\n{% endif %}"
    )
    rows = [{"prompt": f"{i}", "completion": "I see</think>Yes" if i % 2 else "Yes"} for i in range(10)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert train.main(arguments(model, data, tmp_path / "out", steps=1)) == 0
    assert "train: left out 5 of 10 answers; none of them follows its prompt" in capsys.readouterr().out
    data.write_text("".join(json.dumps(row) + "\n" for row in rows[::2]))
    assert train.main(arguments(model, data, tmp_path / "none", steps=1)) == 2
    assert "train: --labels data: no answer of the data follows its prompt in the chat" in only_line(capsys)


def test_data_sets_of_the_hub_have_their_whole_names(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").touch()
    config = TrainingConfig(
        model=Path("m"),
        out=Path("o"),
        data=(Path("a/x:train"), Path("b/x:train"), tmp_path / "x.jsonl"),
    )
    names = ["a/x:train", "b/x:train", "x.jsonl"]
    assert [name for name, _ in start.run_settings(config, "0" * 64, None)["data"]] == names
    record = writer.provenance(config, config.heads[0], [], Sequences([([1], [2])]), None)
    assert record["settings"]["data"] == names


def test_resuming_before_there_is_a_checkpoint_begins(
    tiny_model_dir: Path, data: Path, tmp_path: Path, capsys: Any
) -> None:
    assert train.main(arguments(tiny_model_dir, data, tmp_path / "out", steps=1, resume=True)) == 0
    assert "holds no checkpoint yet; training begins at step 0" in capsys.readouterr().out


@pytest.mark.parametrize(("number", "name"), [(0, "first"), (2, "third")])
def test_a_loss_that_is_not_a_number_stops_the_run(
    tiny_model_dir: Path,
    data: Path,
    tmp_path: Path,
    heads_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
    number: int,
    name: str,
) -> None:
    real, factors = HeadSet.forward, torch.ones(len(HEADS))
    factors[number] = float("nan")
    monkeypatch.setattr(HeadSet, "forward", lambda *given: real(*given) * factors)
    assert train.main(arguments(tiny_model_dir, data, tmp_path / "out", heads=heads_file)) == 2
    message = f"the loss of head '{name}' is nan at step 0; lower --learning-rate"
    assert message in capsys.readouterr().err

"""Flags and heads.toml: what they mean, and one clear line for every mistake."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from drafters.config import STREAM_SETTINGS
from drafters.head_types import HEAD_TYPES
from training.config import TrainingConfig, parse_config
from training.head_config import PRESETS, HeadConfig, read_heads
from training.settings import TrainingError

REQUIRED = ["--model", "m", "--data", "a.jsonl", "b.jsonl", "--out", "o"]


def parse(*flags: str) -> TrainingConfig:
    return parse_config([*REQUIRED, *flags], "description")


def write(directory: Path, text: str) -> Path:
    path = directory / "heads.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_no_flags_train_one_ctc_head_into_out() -> None:
    config = parse()
    assert config.heads == (HeadConfig(**PRESETS["ctc"]),)
    assert config.directory(config.heads[0]) == Path("o")
    assert (config.model, config.data, config.out) == (
        Path("m"),
        (Path("a.jsonl"), Path("b.jsonl")),
        Path("o"),
    )
    assert dataclasses.replace(config, model=Path("m")) == TrainingConfig(
        model=config.model, out=config.out, data=config.data, heads=config.heads
    )


@pytest.mark.parametrize(
    "own",
    [
        {"trunk": "residual", "own_lm_head": True, "loss": "ctc", "transition": "mlp"},
        {"frame_start": "fused", "num_layers": 2, "attention_window": 30},
        {"drafter_type": "block", "num_labels": 12},
        {"drafter_type": "block", "trunk": "dspark", "num_labels": 12, "mask_token_id": 3},
        {
            "trunk": "streams",
            "stream_mode": "shared",
            "lora_rank": 4,
            "stream_start": "mlp",
            "stream_identity": "rotation",
            "exit_rank": 2,
        },
    ],
)
def test_every_field_has_a_flag(own: dict[str, Any]) -> None:
    """Each one changed, and read back; several times, as no head can have all of these."""
    changed: dict[str, Any] = {
        "target_layer_ids": (1, 3),
        "labels": "data",
        "optimizer": "adamw",
        "precision": "fp32",
        "model_dtype": "fp32",
        "save_precision": "fp16",
        "cache_dir": Path("c"),
        "holdout": 0.5,
        "prompt_top_p": 0.5,
        "prompt_systems": ("Write code.",),
        "max_samples": 5,
    }
    has_streams = "stream_identity" in own
    changed |= {} if has_streams else {"device_map": "auto"}
    changed |= dict.fromkeys(
        ("cache_features", "resume", "overwrite", "allow_changed", "skip_bad_rows"), True
    )
    of_heads: dict[str, Any] = {
        "start_size": 9,
        "num_labels": 5,
        "intermediate_size": 7,
        "soft_labels": 0.5,
        "learning_rate": 0.25,
        "init_from": Path("h"),
    }
    own = of_heads | ({} if has_streams else {"draft_vocab_size": 9}) | own
    elsewhere = {"drafter_type", "trunk", "own_lm_head", "loss", "transition", "frame_start", "num_layers"}
    elsewhere |= {"attention_window", "draft_vocab_size", "mask_token_id", *STREAM_SETTINGS}
    for kind, values in ((TrainingConfig, changed), (HeadConfig, own)):
        for field in dataclasses.fields(kind):
            if field.name in ("model", "data", "out", "heads", "name", "base_model", "self_prompts"):
                continue
            if field.name == "device_map" and has_streams:
                continue
            if field.name not in values and not (kind is HeadConfig and field.name in elsewhere):
                default: Any = field.default
                values[field.name] = type(default)(default + 1)
    flags = []
    for name, value in (changed | own).items():
        flags += ["--" + name.replace("_", "-")]
        if value is not True:
            flags += [str(part) for part in (value if isinstance(value, tuple) else (value,))]
    config = parse(*flags)
    assert {name: getattr(config, name) for name in changed} == changed
    assert {name: getattr(config.heads[0], name) for name in own} == own


@pytest.mark.parametrize(
    ("drafter_type", "loss", "trunk", "num_layers", "num_labels", "learning_rate"),
    [
        ("ctc", "prefix", "attention", 1, 7, 1e-3),
        ("block", "ce", "attention", 1, 9, 1e-3),
        ("medusa", "ce", "residual", 0, 9, 1e-3),
        ("streaming", "streams", "streams", 2, 9, 1e-2),
        ("hydra", "ce", "attention", 0, 9, 1e-3),
        ("eagle", "ce", "attention", 1, 9, 1e-3),
    ],
)
def test_what_a_type_implies(
    drafter_type: str, loss: str, trunk: str, num_layers: int, num_labels: int, learning_rate: float
) -> None:
    head = parse("--drafter-type", drafter_type, "--num-frames", "9").heads[0]
    assert (head.loss, head.trunk, head.num_layers, head.num_labels) == (loss, trunk, num_layers, num_labels)
    assert head.learning_rate == learning_rate
    assert drafter_type in HEAD_TYPES


def test_a_residual_trunk_implies_no_attention_layers() -> None:
    assert parse("--trunk", "residual").heads[0].num_layers == 0


def test_heads_of_a_file(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
        [[head]]
        name = "ctc"

        [[head]]
        name = "medusa"
        drafter_type = "medusa"
        own_lm_head = true
        num_frames = 3
        soft_labels = 1  # a whole number where any number may be
        init_from = "heads/old"
        """,
    )
    config = parse("--heads", str(path), "--steps", "5")
    assert config.steps == 5
    first, second = config.heads
    assert first == HeadConfig(name="ctc")
    assert second == HeadConfig(
        name="medusa",
        drafter_type="medusa",
        own_lm_head=True,
        num_frames=3,
        soft_labels=1,
        init_from=Path("heads/old"),
    )
    assert [config.directory(head) for head in config.heads] == [Path("o/ctc"), Path("o/medusa")]


def test_what_is_published_names_no_place() -> None:
    values = HeadConfig(init_from=Path("/home/me/heads/old")).published()
    assert values["init_from"] == "old"
    assert json.loads(json.dumps(values)) == values
    assert HeadConfig().published()["init_from"] is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"expected at least one \[\[head\]\] table"),
        ("head = 3", r"expected at least one \[\[head\]\] table"),
        ("head = [1]", r"expected at least one \[\[head\]\] table"),
        ('[head]\nname = "a"', r"expected at least one \[\[head\]\] table"),
        ("[[head", r"is not valid TOML: "),
        ("[[head]]", r"field 'name': expected the name of a directory, got None"),
        ('[[head]]\nname = ""', r"field 'name': expected the name of a directory, got ''"),
        ('[[head]]\nname = "a/b"', r"field 'name': expected the name of a directory, got 'a/b'"),
        ('[[head]]\nname = ".."', r"field 'name': expected the name of a directory, got '\.\.'"),
        ("[[head]]\nname = 3", r"field 'name': expected the name of a directory, got 3"),
        ('[[head]]\nname = "a"\n[[head]]\nname = "a"', r"the name 'a' is given to two heads"),
        ('[[head]]\nname = "a"\nframes = 3', r"unknown field 'frames'"),
        ('[[head]]\nname = "a"\nnum_frames = "8"', r"field 'num_frames': expected int, got '8'"),
        ('[[head]]\nname = "a"\nnum_frames = 8.0', r"field 'num_frames': expected int, got 8\.0"),
        ('[[head]]\nname = "a"\nnum_frames = true', r"field 'num_frames': expected int, got True"),
        ('[[head]]\nname = "a"\nnum_layers = "1"', r"field 'num_layers': expected int, got '1'"),
        ('[[head]]\nname = "a"\nown_lm_head = 1', r"field 'own_lm_head': expected bool, got 1"),
        ('[[head]]\nname = "a"\nsoft_labels = true', r"field 'soft_labels': expected float, got True"),
        ('[[head]]\nname = "a"\ninit_from = 3', r"field 'init_from': expected .*Path, got 3"),
        ('[[head]]\nname = "a"\ndrafter_type = 3', r"field 'drafter_type': expected str, got 3"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(TrainingError, match=rf"^--heads: {path}:? (head 1: )?{message}") as caught:
        read_heads(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["absent", "directory", "bytes"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "heads.toml"
    if kind == "directory":
        path.mkdir()
    elif kind == "bytes":
        path.write_bytes(b"\xff\xfe")
    with pytest.raises(TrainingError, match=rf"^--heads: {path} (cannot be read|is not valid TOML)"):
        read_heads(path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"drafter_type": "gru"}, "drafter-type: must be one of ctc, block, .*, got 'gru'"),
        ({"transition": "gru"}, "transition: must be one of none, markov, mlp, got 'gru'"),
        ({"trunk": "gru"}, "trunk: must be one of attention, residual, streams, dspark, dflash, got 'gru'"),
        ({"loss": "mse"}, "loss: must be one of prefix, ctc, ce, streams, got 'mse'"),
        (
            {"drafter_type": "block", "loss": "prefix"},
            "loss: block heads have no blank, so it must be ce; got 'prefix'",
        ),
        *(
            ({name: 0}, f"{name.replace('_', '-')}: must be at least 1, got 0")
            for name in (
                "num_frames",
                "num_labels",
                "start_size",
                "head_depth",
                "intermediate_size",
                "transition_size",
                "num_candidates",
            )
        ),
        ({"frame_start": "gru"}, "frame-start: must be one of anchor, fused, got 'gru'"),
        (
            {"drafter_type": "streaming", "num_layers": 0},
            "num-layers: must be at least 1 for streaming with trunk 'streams', got 0",
        ),
        (
            {"lora_rank": 4},
            "lora-rank: must be 32 for ctc with trunk 'attention', got 4; such a head has no use for it",
        ),
        ({"num_frames": 12, "num_labels": 30}, "num-labels: .* must be at most num_frames 12, got 30"),
        ({"num_layers": 0}, "num-layers: must be at least 1 for ctc with trunk 'attention', got 0"),
        (
            {"drafter_type": "medusa", "transition": "mlp"},
            "transition: must be 'none' for medusa with trunk 'residual', got 'mlp'",
        ),
        (
            {"drafter_type": "block", "num_frames": 6, "num_labels": 5},
            "num-labels: without a blank every frame is a label, so it must be at least num_frames 6, got 5",
        ),
        ({"soft_labels": 1.5}, r"soft-labels: must be between 0 and 1, got 1\.5"),
        ({"soft_labels": -0.5}, r"soft-labels: must be between 0 and 1, got -0\.5"),
        ({"learning_rate": 0.0}, r"learning-rate: must be more than 0 and less than 1, got 0\.0"),
        ({"learning_rate": 1.0}, r"learning-rate: must be more than 0 and less than 1, got 1\.0"),
    ],
)
def test_a_bad_setting_is_named(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    """As a flag, and in a file with the name of its head."""
    flags = [part for name, value in settings.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    with pytest.raises(TrainingError, match=f"^--{message}"):
        parse(*flags)
    lines = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
    path = write(tmp_path, "\n".join(['[[head]]\nname = "one"', *lines]))
    with pytest.raises(TrainingError, match=f"^head 'one': {message}"):
        parse("--heads", str(path))


@pytest.mark.parametrize(
    "flag", [["--num-frames", "4"], ["--own-lm-head"], ["--seed", "0"], ["--drafter-type", "ctc"]]
)
def test_a_heads_own_flag_beside_heads_is_refused(tmp_path: Path, flag: list[str]) -> None:
    """It would have been read as meant for all of them, or ignored."""
    path = write(tmp_path, '[[head]]\nname = "a"')
    with pytest.raises(TrainingError, match=f"^{flag[0]}: belongs into {path}, because --heads is given"):
        parse("--heads", str(path), *flag)
    assert parse("--heads", str(path), "--data-seed", "3").data_seed == 3

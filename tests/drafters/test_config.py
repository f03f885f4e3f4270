"""The draft head's configuration checks itself."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from drafters.config import (
    CONFIG_NAME,
    DrafterConfig,
    DrafterConfigError,
    HeadSettings,
    default_target_layers,
)

VALUES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "target_layer_ids": [0, 2, 3],
    "base_num_layers": 4,
}


def write(directory: Path, content: str) -> Path:
    (directory / CONFIG_NAME).write_text(content, encoding="utf-8")
    return directory


def test_json_round_trip(tmp_path: Path) -> None:
    config = DrafterConfig(**VALUES, num_frames=5, base_model="tiny", base_model_revision="abc")
    assert DrafterConfig.load(write(tmp_path, json.dumps(config.to_dict()))) == config
    assert config.target_layer_ids == (0, 2, 3)  # a tuple, whatever was given
    hash(config)


def test_feature_size_is_all_target_layers() -> None:
    assert DrafterConfig(**VALUES).feature_size == 3 * 16


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        *(
            (name, 0, rf"{name} must be at least 1, got 0")
            for name in VALUES
            if isinstance(VALUES[name], int) and name != "base_num_layers"
        ),
        *(
            (name, 0, rf"{name} must be at least 1, got 0")
            for name in (
                "num_frames",
                "head_depth",
                "transition_size",
                "num_candidates",
                "lora_rank",
                "exit_rank",
            )
        ),
        (
            "drafter_type",
            "gru",
            "drafter_type must be one of ctc, block, medusa, streaming, hydra, eagle, got 'gru'",
        ),
        ("trunk", "gru", "trunk must be one of attention, residual, streams, dspark, dflash, got 'gru'"),
        ("frame_start", "gru", "frame_start must be one of anchor, fused, got 'gru'"),
        ("transition", "gru", "transition must be one of none, markov, mlp, got 'gru'"),
        ("stream_mode", "gru", "stream_mode must be one of lossless, shared, got 'gru'"),
        ("stream_start", "gru", "stream_start must be one of identity, mlp, got 'gru'"),
        ("stream_identity", "gru", "stream_identity must be one of embedding, rotation, got 'gru'"),
        ("start_size", 0, "start_size must be at least 1, got 0"),
        ("num_layers", -1, "num_layers must be at least 1 for ctc with trunk 'attention', got -1"),
        ("num_kv_heads", 3, "num_heads must be a multiple of num_kv_heads, got 4 and 3"),
        ("head_dim", 7, "head_dim must be even, got 7"),
        ("target_layer_ids", [], "target_layer_ids must be"),
        ("target_layer_ids", [0, 4], r"target_layer_ids must be .* below 4, got \[0, 4\]"),
        ("target_layer_ids", [-1, 0], "target_layer_ids must be"),
        ("target_layer_ids", [2, 1], "target_layer_ids must be"),
        ("target_layer_ids", [1, 1], "target_layer_ids must be"),
        ("calibration", [0.0, 1.0], "calibration must be two finite numbers"),
        ("calibration", [1.0], r"Expected `array` of length 2, got 1 - at `\$.calibration`"),
        ("num_frames", "8", r"Expected `int`, got `str` - at `\$.num_frames`"),
        ("num_frames", True, r"Expected `int`, got `bool` - at `\$.num_frames`"),
        ("hidden_size", 1.5, r"Expected `int`, got `float` - at `\$.hidden_size`"),
        ("rope_theta", "x", r"Expected `float`, got `str` - at `\$.rope_theta`"),
        ("target_layer_ids", ["1"], r"Expected `int`, got `str` - at `\$.target_layer_ids\[0\]`"),
        ("calibration", [1.0, math.nan], "calibration must be two finite numbers"),
    ],
)
def test_a_bad_value_is_named(tmp_path: Path, field: str, value: object, message: str) -> None:
    values = {**VALUES, field: value}
    with pytest.raises(DrafterConfigError, match=message):
        DrafterConfig.from_dict(values)
    with pytest.raises(DrafterConfigError, match=rf"{CONFIG_NAME}: {message}"):
        DrafterConfig.load(write(tmp_path, json.dumps(values)))


RESIDUAL: dict[str, Any] = {"trunk": "residual", "num_layers": 0}
MEDUSA: dict[str, Any] = {"drafter_type": "medusa", **RESIDUAL}
STREAMING: dict[str, Any] = {"drafter_type": "streaming", "num_layers": 2, "target_layer_ids": [1]}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_layers": 0}, "num_layers must be at least 1 for ctc with trunk 'attention', got 0"),
        (
            {"drafter_type": "block", "num_layers": 0},
            "num_layers must be at least 1 for block with trunk 'attention'",
        ),
        ({**RESIDUAL, "num_layers": 1}, "num_layers must be at most 0 for ctc with trunk 'residual', got 1"),
        ({**MEDUSA, "num_layers": 1}, "num_layers must be at most 0 for medusa with trunk 'residual'"),
        (
            {"drafter_type": "medusa", "trunk": "attention"},
            "trunk must be 'residual' for medusa, got 'attention'",
        ),
        (
            {**MEDUSA, "transition": "mlp"},
            "transition must be 'none' for medusa with trunk 'residual', got 'mlp'",
        ),
        (
            {**RESIDUAL, "frame_start": "fused"},
            "frame_start must be 'anchor' for ctc with trunk 'residual', got 'fused'",
        ),
        (
            {"drafter_type": "eagle", "frame_start": "fused"},
            "frame_start must be 'anchor' for eagle with trunk 'attention'",
        ),
        ({"draft_vocab_size": 41}, "draft_vocab_size must be at most vocab_size 40, got 41"),
        (
            {**STREAMING, "draft_vocab_size": 20},
            "draft_vocab_size must be None for streaming with trunk 'streams', got 20",
        ),
        ({"own_lm_head": True}, "own_lm_head must be False for ctc with trunk 'attention', got True"),
        (
            {**STREAMING, "num_layers": 0},
            "num_layers must be at least 1 for streaming with trunk 'streams', got 0",
        ),
        *(
            (
                {**STREAMING, "num_layers": layers},
                f"num_layers must be below the model's 4 layers with trunk 'streams', got {layers}",
            )
            for layers in (4, 5)
        ),
        ({**STREAMING, "num_frames": 0}, "num_frames must be at least 1, got 0"),
        *(
            (
                {**STREAMING, "target_layer_ids": layers},
                r"target_layer_ids must be \[1\] for streams through the upper 2 of 4 layers, got ",
            )
            for layers in ([0], [0, 1], [2])
        ),
        (
            {**STREAMING, "trunk": "attention"},
            "trunk must be 'streams' for streaming, got 'attention'",
        ),
        *(
            ({name: value}, f"{name} must be {usual!r} for ctc with trunk 'attention', got {value!r}")
            for name, usual, value in (
                ("stream_mode", "lossless", "shared"),
                ("lora_rank", 32, 16),
                ("stream_start", "identity", "mlp"),
                ("stream_identity", "embedding", "rotation"),
                ("exit_rank", 8, 4),
            )
        ),
        (
            {"transition": "markov", "num_candidates": 41},
            "num_candidates must be at most vocab_size 40, got 41",
        ),
    ],
)
def test_settings_that_contradict_each_other(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(DrafterConfigError, match=f"^{message}"):
        DrafterConfig.from_dict({**VALUES, **settings})


@pytest.mark.parametrize(
    ("settings", "has_blank", "reads_anchor", "merges_repeats"),
    [
        ({}, True, True, True),
        ({"transition": "mlp"}, True, True, False),
        ({"drafter_type": "block"}, False, True, False),
        ({"drafter_type": "block", "transition": "markov"}, False, True, False),
        (RESIDUAL, True, False, True),
        ({**RESIDUAL, "transition": "markov"}, True, True, False),
        (MEDUSA, False, False, False),
        (STREAMING, False, False, False),
        ({**STREAMING, "transition": "mlp"}, False, True, False),
        ({**STREAMING, "drafter_type": "ctc", "trunk": "streams"}, True, False, True),
        # Without a transition nothing reads the candidates, however many there are said to be.
        ({**MEDUSA, "own_lm_head": True, "num_candidates": 1000}, False, False, False),
    ],
)
def test_what_follows_from_the_settings(
    settings: dict[str, Any], has_blank: bool, reads_anchor: bool, merges_repeats: bool
) -> None:
    config = DrafterConfig(**{**VALUES, **settings})
    found = (config.has_blank, config.reads_anchor, config.merges_repeats)
    assert found == (has_blank, reads_anchor, merges_repeats)


@pytest.mark.parametrize("calibration", [None, (0.8, -0.25)])
def test_calibration_survives_config_json(tmp_path: Path, calibration: tuple[float, float] | None) -> None:
    config = DrafterConfig(**VALUES, calibration=calibration)
    loaded = DrafterConfig.load(write(tmp_path, json.dumps(config.to_dict())))
    assert loaded == config
    assert loaded.calibration == calibration  # a tuple again, not JSON's list
    hash(loaded)


def test_a_config_written_before_there_were_other_heads_still_loads(tmp_path: Path) -> None:
    """A published head: none of the newer fields, and the type spelled out."""
    old = {**VALUES, "num_frames": 8, "num_layers": 1, "drafter_type": "ctc", "base_model_revision": None}
    config = DrafterConfig.load(write(tmp_path, json.dumps(old)))
    assert (config.trunk, config.transition, config.own_lm_head) == ("attention", "none", False)
    assert config.calibration is None


def test_an_unknown_field_is_named() -> None:
    with pytest.raises(DrafterConfigError, match="unknown field 'blank_id'"):
        DrafterConfig.from_dict({**VALUES, "blank_id": 40})


@pytest.mark.parametrize("name", VALUES)
def test_a_missing_field_is_named(name: str) -> None:
    with pytest.raises(DrafterConfigError, match=f"field '{name}' is missing"):
        DrafterConfig.from_dict({key: value for key, value in VALUES.items() if key != name})


def test_a_directory_without_a_config_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(DrafterConfigError, match=rf"is no drafter checkpoint: {CONFIG_NAME} is missing"):
        DrafterConfig.load(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        *("{", "", "3", "[]", "[" * 100000, "9" * 5000),
        *(json.dumps({**VALUES, "vocab_size": wrong}) for wrong in ("many", "\ud800")),
    ],
    ids=range(8),
)
def test_an_unusable_file_is_named(tmp_path: Path, content: str) -> None:
    with pytest.raises(DrafterConfigError, match=CONFIG_NAME):
        DrafterConfig.load(write(tmp_path, content))


@pytest.mark.parametrize(
    ("num_layers", "expected"), [(1, (0,)), (2, (1,)), (3, (1, 2)), (4, (1, 2, 3)), (32, (1, 16, 31))]
)
def test_default_target_layers(num_layers: int, expected: tuple[int, ...]) -> None:
    assert default_target_layers(num_layers) == expected
    config = DrafterConfig(**{**VALUES, "target_layer_ids": expected, "base_num_layers": num_layers})
    assert config.default_target_layers(num_layers) == expected


@pytest.mark.parametrize(("num_layers", "expected"), [(None, 29), (1, 30), (16, 15), (31, 0)])
def test_streams_start_below_the_layers_that_they_run_through(num_layers: int | None, expected: int) -> None:
    own: dict[str, Any] = {} if num_layers is None else {"num_layers": num_layers}
    settings = HeadSettings(drafter_type="streaming", **own)
    assert settings.default_target_layers(32) == (expected,)

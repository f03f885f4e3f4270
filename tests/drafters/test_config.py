"""The draft head's configuration checks itself."""

import json
from pathlib import Path
from typing import Any

import pytest

from drafters.config import CONFIG_NAME, DrafterConfig, DrafterConfigError, default_target_layers

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
        ("num_frames", 0, "num_frames must be at least 1, got 0"),
        ("num_layers", -1, "num_layers must be at least 1, got -1"),
        ("num_kv_heads", 3, "num_heads must be a multiple of num_kv_heads, got 4 and 3"),
        ("head_dim", 7, "head_dim must be even, got 7"),
        ("target_layer_ids", [], "target_layer_ids must be"),
        ("target_layer_ids", [0, 4], r"target_layer_ids must be .* below 4, got \[0, 4\]"),
        ("target_layer_ids", [-1, 0], "target_layer_ids must be"),
        ("target_layer_ids", [2, 1], "target_layer_ids must be"),
        ("target_layer_ids", [1, 1], "target_layer_ids must be"),
    ],
)
def test_a_bad_value_is_named(tmp_path: Path, field: str, value: object, message: str) -> None:
    values = {**VALUES, field: value}
    with pytest.raises(DrafterConfigError, match=message):
        DrafterConfig.from_dict(values)
    with pytest.raises(DrafterConfigError, match=rf"{CONFIG_NAME}: {message}"):
        DrafterConfig.load(write(tmp_path, json.dumps(values)))


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


@pytest.mark.parametrize("content", ["{", "", "3", "[]", json.dumps({**VALUES, "vocab_size": "many"})])
def test_an_unusable_file_is_named(tmp_path: Path, content: str) -> None:
    with pytest.raises(DrafterConfigError, match=CONFIG_NAME):
        DrafterConfig.load(write(tmp_path, content))


@pytest.mark.parametrize(
    ("num_layers", "expected"), [(1, (0,)), (2, (1,)), (3, (1, 2)), (4, (1, 2, 3)), (32, (1, 16, 31))]
)
def test_default_target_layers(num_layers: int, expected: tuple[int, ...]) -> None:
    assert default_target_layers(num_layers) == expected
    DrafterConfig(**{**VALUES, "target_layer_ids": expected, "base_num_layers": num_layers})

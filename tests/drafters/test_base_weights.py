"""Weights on disk: what is read back, in every precision."""

import errno
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from drafters import base
from drafters.base import load_weights, save_weights
from drafters.config import WEIGHTS_NAME
from drafters.model_files import WeightsError, check_weights

STATE = {
    "a.weight": torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(0)),
    "a.bias": torch.tensor([1e-3, 0.25]),
    "zeros": torch.zeros(2, 4),
    "small": torch.randn(3, 64, generator=torch.Generator().manual_seed(1)) * 1e-4,
    "tiny": torch.full((2, 3), 1e-9),
    # A name that only looks like a scale.
    "norm.scale": torch.tensor([[1.5, -2.0]]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_floats(tmp_path: Path, dtype: torch.dtype) -> None:
    save_weights(STATE, tmp_path / WEIGHTS_NAME, dtype)
    found = load_weights(tmp_path / WEIGHTS_NAME)
    assert set(found) == set(STATE)
    for name, value in found.items():
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, STATE[name].to(dtype).float(), atol=0, rtol=0)


def test_eight_bits(tmp_path: Path) -> None:
    save_weights(STATE, tmp_path / WEIGHTS_NAME, torch.int8)
    stored = load_file(tmp_path / WEIGHTS_NAME)
    assert stored["a.weight"].dtype == torch.int8
    assert stored["a.weight.scale"].shape == (3, 5, 1)
    assert stored["a.bias"].dtype == torch.float16
    found = load_weights(tmp_path / WEIGHTS_NAME)
    assert set(found) == set(STATE)
    for name, value in found.items():
        # Half a step of a row's 254, and the rounding of its scale.
        limit = STATE[name].abs().amax(-1, keepdim=True) * (1 / 254 + 1e-3) + 1e-7
        assert value.shape == STATE[name].shape
        assert torch.all((value - STATE[name]).abs() <= limit)


def test_a_full_disk_is_the_error_of_every_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of safetensors is of a class of its own, which the commands do not know as a full disk."""

    def full(*_: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(base, "save_file", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*model\.safetensors'") as caught:
        save_weights(STATE, tmp_path / WEIGHTS_NAME, torch.float32)
    assert caught.value.errno == errno.ENOSPC
    assert not (tmp_path / WEIGHTS_NAME).exists()


def test_rows_without_their_scale(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2, 2, dtype=torch.int8)}, tmp_path / WEIGHTS_NAME)
    with pytest.raises(KeyError, match=r"a\.scale"):
        load_weights(tmp_path / WEIGHTS_NAME)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8])
def test_numbers_of_tokens_are_not_rounded(tmp_path: Path, dtype: torch.dtype) -> None:
    token_ids = torch.tensor([0, 40_001, 151_935])
    save_weights({**STATE, "draft_token_ids": token_ids}, tmp_path / WEIGHTS_NAME, dtype)
    found = load_weights(tmp_path / WEIGHTS_NAME)["draft_token_ids"]
    assert found.dtype == torch.int64
    assert torch.equal(found, token_ids)


def test_files_of_weights_that_cannot_be_read(tmp_path: Path) -> None:
    """Links of the hub's cache are copied without what they lead to."""
    path = tmp_path / WEIGHTS_NAME
    path.symlink_to(tmp_path / "blobs" / "gone")
    with pytest.raises(WeightsError, match=r"model\.safetensors cannot be read: No such file or directory"):
        check_weights(path)
    path.unlink()
    header = b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, "4"]}}'
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(WeightsError, match=r"model\.safetensors is no safetensors file"):
        check_weights(path)

"""Features from the file equal the target model's, and the file is only used when it is complete."""

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from runtime.core.system import lock
from training.data import batches
from training.data.batches import Batch, CachedFeatures, LiveFeatures
from training.data.sequences import Sequences

LAYERS, FEATURE_SIZE = (0, 1), 128
MAX_LENGTH = 10
# bfloat16 keeps eight bits; sequences of other widths add in another order.
BF16_RTOL, FLOAT32_ATOL = 2**-8, 1e-4


@pytest.fixture(scope="module")
def model(tiny_model_dir: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()


@pytest.fixture
def sequences() -> Sequences:
    """Twenty sequences of 3 to 14 tokens: more than one pass, some longer than MAX_LENGTH."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 15, (20,), generator=generator).tolist()
    lengths[5] = 14
    rows = [torch.randint(2, 200, (length,), generator=generator).tolist() for length in lengths]
    return Sequences([(row[:2], row[2:]) for row in rows])


def test_cached_features_equal_live_ones(model: Any, sequences: Sequences, tmp_path: Path) -> None:
    live = LiveFeatures(model, LAYERS)
    cached = CachedFeatures(tmp_path / "features.bfloat16", sequences, FEATURE_SIZE, MAX_LENGTH)
    assert not cached.complete
    cached.fill(live, torch.device("cpu"))
    assert cached.complete
    reopened = CachedFeatures(tmp_path / "features.bfloat16", sequences, FEATURE_SIZE, MAX_LENGTH)
    assert reopened.complete
    for rows in ([0], [5, 3, 19], list(range(20))):
        batch = Batch.of(sequences, rows, MAX_LENGTH)
        expected, real = live(batch), batch.attention_mask.bool()
        for source in (cached, reopened):
            found = source(batch)
            assert found.shape == expected.shape
            assert found.isfinite().all()
            torch.testing.assert_close(found[real].float(), expected[real], rtol=BF16_RTOL, atol=FLOAT32_ATOL)


def test_a_half_written_file_is_not_complete(model: Any, sequences: Sequences, tmp_path: Path) -> None:
    path = tmp_path / "features.bfloat16"

    class Interrupted(LiveFeatures):
        calls = 0

        def __call__(self, batch: Batch) -> torch.Tensor:
            self.calls += 1
            if self.calls == 2:
                raise KeyboardInterrupt
            return super().__call__(batch)

    cached = CachedFeatures(path, sequences, FEATURE_SIZE, MAX_LENGTH)
    with pytest.raises(KeyboardInterrupt):
        cached.fill(Interrupted(model, LAYERS), torch.device("cpu"))
    again = CachedFeatures(path, sequences, FEATURE_SIZE, MAX_LENGTH)
    assert not again.complete
    again.fill(LiveFeatures(model, LAYERS), torch.device("cpu"))
    assert CachedFeatures(path, sequences, FEATURE_SIZE, MAX_LENGTH).complete
    path.unlink()
    assert not CachedFeatures(path, sequences, FEATURE_SIZE, MAX_LENGTH).complete  # it would be all zeros


def test_an_interrupted_run_goes_on_where_it_was(
    model: Any, sequences: Sequences, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It repeats at most the batches since the last note, and writes what an uninterrupted run does."""
    monkeypatch.setattr(batches, "SEQUENCES_PER_PASS", 2)
    monkeypatch.setattr(batches, "PASSES_PER_SAVE", 2)
    whole = CachedFeatures(tmp_path / "whole.bfloat16", sequences, FEATURE_SIZE, MAX_LENGTH)
    whole.fill(LiveFeatures(model, LAYERS), torch.device("cpu"))
    path = tmp_path / "parts.bfloat16"

    class Counting(LiveFeatures):
        calls, last = 0, 1000

        def __call__(self, batch: Batch) -> torch.Tensor:
            Counting.calls += 1
            if Counting.calls == self.last:
                raise KeyboardInterrupt
            return super().__call__(batch)

    interrupted = Counting(model, LAYERS)
    interrupted.last = 4
    parts = CachedFeatures(path, sequences, FEATURE_SIZE, MAX_LENGTH)
    with pytest.raises(KeyboardInterrupt):
        parts.fill(interrupted, torch.device("cpu"))
    Counting.calls = 0
    parts = CachedFeatures(path, sequences, FEATURE_SIZE, MAX_LENGTH)
    assert not parts.complete
    parts.fill(Counting(model, LAYERS), torch.device("cpu"))
    assert Counting.calls == (len(sequences) + 1) // 2 - 2
    assert parts.complete
    assert path.read_bytes() == (tmp_path / "whole.bfloat16").read_bytes()
    assert {file.name for file in tmp_path.glob("parts.*")} == {"parts.bfloat16", "parts.done"}


def test_a_second_run_waits_for_the_first(
    model: Any,
    sequences: Sequences,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "features.bfloat16"
    is_waiting = threading.Event()

    def noted_lock(descriptor: int, *, wait: bool) -> bool:
        if wait:
            is_waiting.set()
        return lock(descriptor, wait=wait)

    monkeypatch.setattr("training.data.batches.lock", noted_lock)
    first = CachedFeatures(path, sequences, FEATURE_SIZE, MAX_LENGTH)
    with ThreadPoolExecutor() as pool:
        second = pool.submit(CachedFeatures, path, sequences, FEATURE_SIZE, MAX_LENGTH)
        assert is_waiting.wait(60)
        assert not second.done()
        first.fill(LiveFeatures(model, LAYERS), torch.device("cpu"))
        found = second.result()
    assert found.complete
    batch = Batch.of(sequences, [0, 19], MAX_LENGTH)
    assert torch.equal(found(batch), first(batch))
    assert found(batch).any()
    assert capsys.readouterr().out == f"train: waiting for another run, which fills {path}\n"


def test_a_full_disk_is_an_error_before_the_first_sequence(
    sequences: Sequences, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A memory map that met it would end the process without a word."""
    asked = []

    def full(file: int, offset: int, size: int) -> None:
        asked.append(size)
        raise OSError(errno.ENOSPC, "")

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    path = tmp_path / "features.bfloat16"
    with pytest.raises(OSError, match=r"No space left on device: '.*features\.bfloat16'"):
        CachedFeatures(path, sequences, FEATURE_SIZE, MAX_LENGTH)
    assert asked == [2 * FEATURE_SIZE * sequences.tokens.size]

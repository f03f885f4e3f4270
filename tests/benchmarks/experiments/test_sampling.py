"""The check of sampling, with few samples: it passes, and it can fail."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.experiments import sampling
from runtime.decode.acceptance import Sampler

# Whole batches: plain decoding's sequences then all end with the last step.
SAMPLES = str(48 * sampling.NUM_SEQUENCES)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """The check's model and bundle, which take seconds to export."""
    directory = tmp_path_factory.mktemp("sampling")
    return sampling.make_bundle(directory), directory / "bundle"


@pytest.fixture
def one_setting(built: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The check with one of its settings, on the bundle that was built."""
    model, bundle = built

    def make_bundle(directory: Path) -> Any:
        (directory / "bundle").symlink_to(bundle)
        return model

    name = "temperature 1, top-k 4"
    monkeypatch.setattr(sampling, "SETTINGS", {name: sampling.SETTINGS[name]})
    monkeypatch.setattr(sampling, "make_bundle", make_bundle)


def test_sampling_is_lossless(one_setting: None, tmp_path: Path) -> None:
    assert sampling.main(["--samples", SAMPLES, "--out", str(tmp_path / "out")]) == 0
    (row,) = json.loads((tmp_path / "out" / "sampling.json").read_text())["rows"]
    assert row["different"] == 0
    assert row["chi_square_p"] > 0.01
    assert row["steps_saved"] > 0.1


def test_another_distribution_is_noticed(
    one_setting: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draws that prefer drafts: what a careless acceptance rule would do."""
    accept = Sampler.accept

    def prefer(self: Sampler, tree: Any, next_tokens: Any, logits: Any) -> Any:
        logits = logits.copy()
        for node in range(1, len(tree)):
            logits[tree.parents[node], tree.tokens[node]] += 0.5
        return accept(self, tree, next_tokens, logits)

    monkeypatch.setattr(Sampler, "accept", prefer)
    assert sampling.main(["--samples", SAMPLES, "--out", str(tmp_path / "out")]) == 1


def test_chi_square() -> None:
    expected = np.array([50.0, 30.0, 20.0, 0.0])
    assert sampling.chi_square_p(np.array([50, 30, 20, 0]), expected) == 1
    # 2 degrees of freedom: the p-value is exp(-statistic / 2).
    assert sampling.chi_square_p(np.array([60, 20, 20, 0]), expected) == pytest.approx(
        np.exp(-(100 / 50 + 100 / 30) / 2)
    )
    assert sampling.chi_square_p(np.array([50, 30, 19, 1]), expected) == 0

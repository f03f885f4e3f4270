"""Drawn texts are compared with those of plain steps, and a difference has to be a tie."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.gpu import checks
from benchmarks.gpu.__main__ import main
from tests.benchmarks.gpu.wrong_engines import with_wrong_engine
from tests.engine_bundles import device_of_memory


def test_a_wrong_draw_fails_the_run(
    tiny_engine_bundle: Path, tiny_step_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = with_wrong_engine(tiny_engine_bundle, tmp_path / "bundle", "accept_sampled", "new_tokens")
    device_of_memory(monkeypatch, bundle)
    options = ["--max-new-tokens", "12", "--max-prompts", "2", "--threads", "1", "--parts", "lossless"]
    options += ["--bundle", str(bundle), "--reference", str(tiny_step_bundle), "--out", str(tmp_path / "out")]
    assert main(options) == 1
    report = json.loads((tmp_path / "out/gpu.json").read_text(encoding="utf-8"))
    part: dict[str, Any] = report["parts"]["lossless"]
    assert part["status"] == "failed"
    # The greedy texts, which another graph accepts, are right.
    assert all(row["equal"] == 2 for row in part["rows"])
    (reference,) = [row for row in part["sampled"]["rows"] if row["setting"] == "reference on the CPU"]
    assert reference["mismatches"] == 2


def test_a_tie_is_a_draw_near_the_border(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = {3: 0.25, 7: 0.5, 8: 0.25}
    logits = np.full(10, -1e9, np.float32)
    for token, share in shares.items():
        logits[token] = 0.8 * np.log(share)
    monkeypatch.setattr(checks, "logits_after", lambda *_: logits)
    monkeypatch.setattr(checks, "uniform", lambda seed, index: 0.74)
    decoder: Any = None
    assert checks.draw_gap(decoder, [1], [7], 0, 0) == 0
    assert checks.draw_gap(decoder, [1], [7, 8], 0, 0) == pytest.approx(0.01)
    assert checks.draw_gap(decoder, [1], [7, 3], 0, 0) == pytest.approx(0.49)
    assert checks.draw_gap(decoder, [1], [9], 0, 0) == pytest.approx(0.26)

"""What ``auto`` costs with a head that is hardly ever right."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.experiments import useless_head
from benchmarks.experiments.useless_head import draft_wrong_tokens
from runtime.core.token_tree import TokenTree
from runtime.engines.recorder import NullRecorder


def test_texts_are_those_of_plain_decoding(
    tiny_bundle_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "few.jsonl"
    prompts.write_text('{"prompt": "How many?"}\n{"prompt": "Why not?"}\n')
    arguments = ["--bundle", str(tiny_bundle_dir), "--prompts", str(prompts), "--max-new-tokens", "40"]
    assert useless_head.main([*arguments, "--out", str(tmp_path / "out")]) == 0
    (row,) = json.loads((tmp_path / "out" / "useless_head.json").read_text())["rows"]
    assert row["prompts"] == "few"
    assert row["plain_ms"] > 0
    assert row["auto_ms"] > 0
    assert 0 <= row["drafted_share"] <= 1
    assert "| few |" in capsys.readouterr().out


def test_every_draft_token_is_replaced() -> None:
    tree = TokenTree(np.array([8, 3, 257]), np.array([-1, 0, 0]), np.array([0, 1, 1]), np.zeros(3))
    step: Any = SimpleNamespace(proposer=SimpleNamespace(propose=lambda *_: [tree]))
    draft_wrong_tokens(step, vocab_size=258)
    (found,) = step.proposer.propose([8], 2, NullRecorder())
    assert found.tokens.tolist() == [8, 4, 0]
    assert found.parents is tree.parents

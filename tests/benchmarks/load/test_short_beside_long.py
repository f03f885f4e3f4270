"""Times of short requests beside a long prompt."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from benchmarks.load import short_beside_long
from benchmarks.load.short_beside_long import main

LONG_TOKENS = 400


def test_times_are_written(
    tiny_bundle_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("START_SECONDS", "MAX_PAUSE_SECONDS"):
        monkeypatch.setattr(f"benchmarks.load.short_beside_long.{name}", 0)
    prompts, more = tmp_path / "prompts.jsonl", tmp_path / "more.jsonl"
    prompts.write_text('{"prompt": "How many?"}\n', encoding="utf-8")
    more.write_text('{"prompt": "Why not?"}\n', encoding="utf-8")
    asked: set[tuple[int, ...]] = set()
    short_requests = threading.Semaphore(0)
    measured = short_beside_long._first_tokens

    def first_tokens(scheduler: Any, given: Any) -> list[float]:
        asked.update(map(tuple, given))
        found = measured(scheduler, given)
        if len(given[0]) < LONG_TOKENS:
            short_requests.release()
            return found
        # A tiny model reads its long prompt in a moment. The reader stays until short requests have come.
        while short_requests.acquire(blocking=False):
            pass
        for _ in range(2):
            assert short_requests.acquire(timeout=60)
        return found

    monkeypatch.setattr(short_beside_long, "_first_tokens", first_tokens)
    arguments = ["--bundle", str(tiny_bundle_dir), "--prompts", str(prompts), str(more), "--threads", "1"]
    assert main([*arguments, "--long-tokens", "1000000", "--out", str(tmp_path)]) == 2
    assert "--long-tokens: must be less than" in capsys.readouterr().err
    assert main([*arguments, "--long-tokens", str(LONG_TOKENS), "--rounds", "2", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "short_beside_long.json").read_text(encoding="utf-8"))
    assert len(asked) == 2 + 2  # a short prompt of each file, a long one of each round
    assert (len(found["alone_s"]), len(found["long_prompt_s"])) == (40, 2)
    assert all(seconds > 0 for times in ("alone_s", "beside_s", "long_prompt_s") for seconds in found[times])

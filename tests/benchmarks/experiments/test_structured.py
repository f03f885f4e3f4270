"""The summary of texts that follow schemas."""

from typing import Any

import pytest

from benchmarks.experiments.structured import summary
from runtime.core.errors import UserError

ROW: dict[str, Any] = {"is_complete": True, "is_valid": True, "is_equal": True}
LONG = {**ROW, "is_complete": False, "tokens": 6, "steps": 2, "free_tokens": 8, "free_steps": 4}


def test_texts_that_end_with_their_first_token() -> None:
    short = {**ROW, "tokens": 0, "steps": 0, "free_tokens": 4, "free_steps": 2}
    found = summary([LONG, short])
    assert (found["tokens_a_step"], found["free_tokens_a_step"], found["ratio"]) == (3, 2, 1.5)
    assert (found["complete"], found["ratio_complete"]) == (1, None)
    with pytest.raises(UserError, match=r"^--prompts: every output ends with its first token"):
        summary([short])

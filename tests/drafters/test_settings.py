"""Declared settings: which values are within their limits, and what is said of the others."""

import math
from dataclasses import dataclass
from typing import Any

import pytest

from drafters.config import check_settings, setting


@dataclass(frozen=True, kw_only=True)
class Example:
    needed: int = setting(minimum=1)
    colour: str = setting("red", "a colour", choices=("red", "blue"))
    count: int | None = setting(None, "how many", minimum=0)
    share: float = setting(0.0, "a share", minimum=0, maximum=1)
    rate: float = setting(0.5, "a rate", minimum=0, maximum=1, exclusive=True)
    seconds: float = setting(1.0, "a time", minimum=0, exclusive=True)
    anything: Any = 3

    def __post_init__(self) -> None:
        check_settings(self, lambda name, problem: ValueError(f"{name}: {problem}"))


def test_a_setting_without_a_default_is_required() -> None:
    with pytest.raises(TypeError, match="needed"):
        Example()
    assert Example(needed=1).colour == "red"


@pytest.mark.parametrize(
    "values", [{"colour": "blue"}, {"count": 0}, {"share": 0}, {"share": 1}, {"rate": 1e-9}, {"anything": -1}]
)
def test_values_within_their_limits(values: dict[str, Any]) -> None:
    Example(needed=2, **values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"needed": 0}, "needed: must be at least 1, got 0"),
        ({"colour": "green"}, "colour: must be one of red, blue, got 'green'"),
        ({"count": -1}, "count: must be at least 0, got -1"),
        ({"share": 1.5}, "share: must be between 0 and 1, got 1.5"),
        ({"rate": 0.0}, "rate: must be more than 0 and less than 1, got 0.0"),
        ({"rate": 1}, "rate: must be more than 0 and less than 1, got 1"),
        ({"rate": math.nan}, "rate: must be more than 0 and less than 1, got nan"),
        ({"seconds": 0}, "seconds: must be more than 0, got 0"),
        ({"seconds": math.nan}, "seconds: must be more than 0, got nan"),
    ],
)
def test_values_outside_their_limits(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        Example(**{"needed": 2, **values})

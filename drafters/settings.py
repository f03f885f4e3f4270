"""Settings that are declared once: a dataclass field carries its help text and its limits.

``check_settings`` enforces the limits; ``training.settings`` makes command line flags of the fields.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any


def setting(
    default: Any = dataclasses.MISSING,
    help: str = "",
    *,
    choices: Sequence[str] = (),
    minimum: float | None = None,
    maximum: float | None = None,
    exclusive: bool = False,
) -> Any:
    """A dataclass field with limits. A field without a ``default`` has to be given.

    help: what the setting is, for the flag's help; a setting without it has no flag
    exclusive: whether the value must differ from ``minimum`` and ``maximum``
    """
    limits = {"choices": choices, "minimum": minimum, "maximum": maximum, "exclusive": exclusive}
    return dataclasses.field(default=default, metadata={"help": help, **limits})


def check_settings(settings: Any, error: Callable[[str, str], Exception]) -> None:
    """Raise ``error(field, problem)`` for the first field outside its limits; None is never outside."""
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if value is None or not field.metadata:
            continue
        expected = _violated_limit(value, **field.metadata)
        if expected:
            raise error(field.name, f"must be {expected}, got {value!r}")


def _violated_limit(
    value: Any,
    *,
    choices: Sequence[str],
    minimum: float | None,
    maximum: float | None,
    exclusive: bool,
    **_: str,
) -> str | None:
    """The limit that a value violates, in words; None where it violates none."""
    if choices:
        return None if value in choices else f"one of {', '.join(choices)}"
    if minimum is None:
        return None
    # Written so that a NaN is outside.
    fits = value > minimum if exclusive else value >= minimum
    if maximum is None:
        return None if fits else f"{'more than' if exclusive else 'at least'} {minimum}"
    fits = fits and (value < maximum if exclusive else value <= maximum)
    return None if fits else f"between {minimum} and {maximum}"

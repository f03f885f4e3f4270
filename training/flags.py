"""Command line flags made of declared settings (``drafters.settings``), one for each with a help text."""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args


def flag(name: str) -> str:
    """The flag of a setting."""
    return "--" + name.replace("_", "-")


def flag_fields(settings: type) -> list[dataclasses.Field[Any]]:
    """The settings of a dataclass that have a flag."""
    return [field for field in dataclasses.fields(settings) if field.metadata.get("help")]


def add_flags(
    parser: Any,
    settings: type,
    *,
    names: Sequence[str] | None = None,
    optional: bool = False,
    instead: tuple[str, dict[str, Any]] = ("", {}),
) -> None:
    """Add a flag for every setting of a dataclass. With ``optional``, a flag that is not given is None.

    names: of the settings that are added, in this order; None for all
    instead: when other defaults hold, in words, and these; for the help text
    """
    fields = {field.name: field for field in flag_fields(settings)}
    for field in (fields[name] for name in (fields if names is None else names)):
        required = field.default is dataclasses.MISSING and not optional
        help_text, options = field.metadata["help"], _value_options(field.type)
        if field.metadata["choices"]:
            help_text += f": {', '.join(field.metadata['choices'])}"
        if not (required or field.default in (None, False, ())):
            also = f", {instead[0]} {instead[1][field.name]}" if field.name in instead[1] else ""
            help_text += f" (default {field.default}{also})"
        if required:
            options["required"] = True
        else:
            options["default"] = None if optional else field.default
        parser.add_argument(flag(field.name), help=help_text, **options)


def parse_flags(parser: argparse.ArgumentParser, argv: list[str] | None) -> dict[str, Any]:
    """Values by setting; lists become tuples."""
    values = vars(parser.parse_args(argv))
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def is_of_type(value: Any, kind: Any) -> bool:
    """Whether a value of a TOML file may be given for a setting of this type."""
    kind = _plain_type(kind)
    accepted = {float: (int, float), Path: (str,)}.get(kind, (kind,))
    # To Python, a bool is an int.
    return isinstance(value, accepted) and (kind is bool or not isinstance(value, bool))


def _value_options(kind: Any) -> dict[str, Any]:
    """How argparse reads a value of this type."""
    if _plain_type(kind) is bool:
        return {"action": "store_true"}
    return {"type": _plain_type(kind)} | ({"nargs": "+"} if "tuple" in str(kind) else {})


def _plain_type(kind: Any) -> Any:
    """Example: ``Path`` of ``tuple[Path, ...] | None``."""
    while get_args(kind):
        kind = get_args(kind)[0]
    return kind

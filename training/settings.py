"""What the settings of training and of distillation share: their error, their flags and self-written prompts.

A setting is declared once, as a dataclass field with a help text and limits (``drafters.settings``). Its
command line flag is made of the declaration.
"""

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

from drafters.settings import setting
from runtime.core.errors import UserError


class TrainingError(UserError):
    """Data or a setting that training cannot use; the message names it."""


@dataclass(frozen=True, kw_only=True)
class SelfPromptSettings:
    """The settings of prompts that a model writes itself, which training and ``ctc distill`` share."""

    self_prompts: int | None = setting(
        None, "let the model write this many prompts itself, beside or in place of --data", minimum=1
    )
    prompt_temperature: float = setting(
        0.8,
        "temperature of self-written prompts; a higher one gives more kinds and more nonsense",
        minimum=0,
        exclusive=True,
    )
    prompt_top_p: float = setting(0.95, "nucleus of self-written prompts", minimum=0, maximum=1)
    max_prompt_tokens: int = setting(
        96, "length of a self-written prompt; longer ones are left out", minimum=1
    )
    prompt_systems: tuple[str, ...] = setting(
        (),
        "system messages under which the model writes its prompts, in turn, to have kinds that it seldom "
        "writes, such as code; the answers do not see them (default: the template's own)",
    )

    @property
    def prompt_seed(self) -> int:
        """The seed with which self-written prompts are drawn."""
        raise NotImplementedError


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

    names: the settings to add, in this order; None adds all, beginning with those that must be given
    instead: the case in which other defaults hold, in words, and these defaults; for the help text
    """
    fields = {field.name: field for field in flag_fields(settings)}
    if names is None:
        names = sorted(fields, key=lambda name: fields[name].default is not dataclasses.MISSING)
    for field in (fields[name] for name in names):
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


def _value_options(kind: Any) -> dict[str, Any]:
    """The options with which argparse reads a value of this type."""
    if _plain_type(kind) is bool:
        return {"action": "store_true"}
    return {"type": _plain_type(kind)} | ({"nargs": "+"} if "tuple" in str(kind) else {})


def _plain_type(kind: Any) -> Any:
    """The type without ``tuple`` and ``None``. Example: ``tuple[Path, ...] | None`` -> ``Path``."""
    while get_args(kind):
        kind = get_args(kind)[0]
    return kind

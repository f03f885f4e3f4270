"""The options of sampling on command lines. They read this module first, so it imports no library."""

import argparse
from typing import Any

from runtime.decode.sampling_params import GREEDY

# Fields of ``SamplingParams`` that have a flag.
SAMPLING_OPTIONS = (
    ("temperature", float, "default 0: greedy"),
    ("top_k", int, "only the k best tokens; default 0: all"),
    ("top_p", float, "only the best tokens that have this probability together; default 1: all"),
    ("min_p", float, "only tokens this likely, relative to the best; default 0: all"),
    ("repetition_penalty", float, "above 1: less of what is in the prompt or the output; default 1: off"),
    ("presence_penalty", float, "taken off tokens that are in the output; default 0: off"),
    ("frequency_penalty", float, "the same, as often as they are in it; default 0: off"),
    ("seed", int, "the same seed gives the same text; default: another one every time"),
)


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling", "Greedy unless --temperature is above 0.")
    for name, kind, help_text in SAMPLING_OPTIONS:
        flag = f"--{name.replace('_', '-')}"
        group.add_argument(flag, type=kind, default=getattr(GREEDY, name), help=help_text)


def sampling_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The options' values, by field of ``SamplingParams``."""
    return {name: getattr(args, name) for name, _, _ in SAMPLING_OPTIONS}

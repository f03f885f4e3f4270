"""The options of sampling, their ranges and their flags. It imports no large library."""

import argparse
import math
from collections.abc import Collection, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from runtime.core.errors import RequestError
from runtime.core.options import SAMPLING_FILTERS

MAX_SEED = 2**64 - 1
# What OpenAI's interface allows.
MAX_PENALTY, MAX_TOP_LOG_PROBS = 2.0, 20
# Larger values have no use; logits overflow only far beyond them.
MAX_BIAS, MAX_REPETITION_PENALTY = 1e4, 100.0
# Fields of ``SamplingParams`` that graphs on a device can follow. With any other that is not at its default,
# the host chooses the tokens.
GRAPH_OPTIONS = (*SAMPLING_FILTERS, "seed", "log_probs")
# Fields that change nothing at temperature 0: the most probable token passes every filter, and no number is
# drawn.
ARGMAX_OPTIONS = (*SAMPLING_FILTERS[1:], "seed")


def require(holds: bool, name: str, expected: str, value: object) -> None:
    """Raise RequestError, which names the option, unless ``holds``."""
    if not holds:
        raise RequestError(f"must be {expected}, got {value}", field=name)


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one text are chosen. The filters apply in the order of the fields.

    logit_bias: added to these tokens' logits
    repetition_penalty: divides the positive logits of tokens in the prompt or the output, multiplies
        the negative ones; 1 is off (arXiv 1909.05858)
    presence_penalty, frequency_penalty: subtracted once, and for every occurrence, from the logits of
        tokens in the output; 0 is off
    temperature: divides the logits; 0 takes the best token
    top_k: only the k most probable tokens and those level with the last of them may be drawn; 0 is all
    top_p: only the smallest set of most probable tokens with this probability (arXiv 1904.09751); 1 is all
    min_p: only tokens at least this likely, relative to the best (arXiv 2407.01082); 0 is all
    seed: 64 bits; None takes a random one
    log_probs: whether to report the emitted tokens' log-probabilities, those of the model itself
        (temperature 1, nothing of the above)
    top_log_probs: how many of the most probable tokens to report with each of them
    Raises RequestError for a value out of range.
    """

    logit_bias: Mapping[int, float] = field(default_factory=dict)
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    log_probs: bool = False
    top_log_probs: int = 0

    def __post_init__(self) -> None:
        # Comparisons with NaN are false, so each of these checks refuses it.
        require(0 <= self.temperature < math.inf, "temperature", "a number from 0 on", self.temperature)
        require(self.top_k >= 0, "top_k", "0 (off) or more", self.top_k)
        require(0 < self.top_p <= 1, "top_p", "above 0 and at most 1", self.top_p)
        require(0 <= self.min_p <= 1, "min_p", "between 0 and 1", self.min_p)
        repetition = self.repetition_penalty
        least, most = 1 / MAX_REPETITION_PENALTY, MAX_REPETITION_PENALTY
        expected = f"between {least:g} and {most:g}"
        require(least <= repetition <= most, "repetition_penalty", expected, repetition)
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            require(abs(value) <= MAX_PENALTY, name, f"between -{MAX_PENALTY:g} and {MAX_PENALTY:g}", value)
        for token, bias in self.logit_bias.items():
            expected = f"between -{MAX_BIAS:g} and {MAX_BIAS:g} for token {token}"
            require(abs(bias) <= MAX_BIAS, "logit_bias", expected, bias)
        most = MAX_TOP_LOG_PROBS
        require(0 <= self.top_log_probs <= most, "top_log_probs", f"between 0 and {most}", self.top_log_probs)
        if self.seed is not None:
            require(0 <= self.seed <= MAX_SEED, "seed", "between 0 and 2^64 - 1", self.seed)

    @property
    def has_penalties(self) -> bool:
        """Whether the output so far changes what may come next."""
        off = (1.0, 0.0, 0.0)
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != off

    @property
    def is_argmax(self) -> bool:
        """Whether the graph's argmax is the answer, so that no logits are needed."""
        return self.sets_only(ARGMAX_OPTIONS)

    def sets_only(self, names: Collection[str]) -> bool:
        """Whether every field but these is at its default."""
        for each in fields(self):
            default = each.default if each.default_factory is MISSING else each.default_factory()
            if each.name not in names and getattr(self, each.name) != default:
                return False
        return True


GREEDY = SamplingParams()


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

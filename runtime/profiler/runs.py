"""What the profiler collects: timed completions, and where they differ from plain decoding's."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from runtime.engines.recorder import StepRecord

# The setting of a run without drafts. The others are the draft nodes a step may verify: a number or "auto".
PLAIN = "plain"
# Two tokens whose logits are closer than this are a tie: passes of different shapes round differently.
TIE_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Run:
    """One prompt decoded once in one setting; times are nanoseconds of ``time.perf_counter_ns``.

    token_ids: the output; its first token comes from the prefill, the others from verify steps
    begin_ns, first_ns, end_ns: the request, its first token, its last token
    """

    setting: int | str
    prompt: int
    num_prompt_tokens: int
    token_ids: tuple[int, ...]
    begin_ns: int
    first_ns: int
    end_ns: int
    steps: tuple[StepRecord, ...]

    @property
    def prefill_ms(self) -> float:
        return (self.first_ns - self.begin_ns) / 1e6

    @property
    def decode_ms(self) -> float:
        return (self.end_ns - self.first_ns) / 1e6

    @property
    def num_decoded(self) -> int:
        """Tokens emitted by verify steps."""
        return len(self.token_ids) - 1

    @property
    def num_steps(self) -> int:
        return len(self.steps)


def plain_outputs(runs: Iterable[Run]) -> dict[int, tuple[int, ...]]:
    """Return plain decoding's first output of every prompt."""
    outputs: dict[int, tuple[int, ...]] = {}
    for run in runs:
        if run.setting == PLAIN:
            outputs.setdefault(run.prompt, run.token_ids)
    return outputs


@dataclass(frozen=True)
class Difference:
    """The first token in which an output differs from plain decoding's; None for an output that has ended.

    logit_gap: how far the worse of the two tokens is below the target model's best logit, which is the gap
        between them where they are its two best. None where an output has ended, or before it is measured.
    """

    setting: int | str
    prompt: int
    position: int
    plain_token: int | None
    token: int | None
    logit_gap: float | None = None

    @property
    def is_tie(self) -> bool:
        return is_tie(self.logit_gap)


def is_tie(logit_gap: float | None) -> bool:
    """Return whether the logits of two tokens are too close to tell; None is no tie."""
    return logit_gap is not None and logit_gap <= TIE_TOLERANCE


def find_differences(runs: Sequence[Run]) -> list[Difference]:
    """Return the first difference from the prompt's plain output for every run that has one.

    Runs that differ alike count once; plain runs of a prompt must agree among themselves, too.
    """
    plain = plain_outputs(runs)
    found: dict[Difference, None] = {}
    for run in runs:
        for position, (expected, token) in enumerate(zip_longest(plain[run.prompt], run.token_ids)):
            if token != expected:
                found[Difference(run.setting, run.prompt, position, expected, token)] = None
                break
    return list(found)

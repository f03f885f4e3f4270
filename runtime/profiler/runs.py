"""What the profiler collects: timed completions."""

from collections.abc import Iterable
from dataclasses import dataclass

from runtime.engines.recorder import StepRecord

# The setting of a run without drafts. The others are the draft nodes a step may verify: a number or "auto".
PLAIN = "plain"


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

"""What the profiler collects: timed completions, and where two settings' outputs part.

A *setting* is the number of draft nodes a step may verify, or "auto"; ``VANILLA`` (0) is plain decoding.
Times are nanoseconds of ``time.perf_counter_ns``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

VANILLA = 0

# As ``StageRecorder.steps``: (begin, [(stage, end of stage), ...], end, rows verified, drafts accepted)
StepRecord = tuple[int, list[tuple[str, int]], int, int, int]


@dataclass(frozen=True)
class Run:
    """One prompt decoded once in one setting.

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


@dataclass(frozen=True)
class Difference:
    """Where a speculative output first leaves the vanilla one.

    ``None`` for a token means that this output has ended.
    """

    setting: int | str
    prompt: int
    position: int
    vanilla_token: int | None
    speculative_token: int | None


def find_differences(runs: Sequence[Run]) -> list[Difference]:
    """The first difference from the prompt's vanilla output, for every run that has one.

    At most one for each prompt, setting and position; all vanilla runs of a prompt must agree.
    """
    reference: dict[int, tuple[int, ...]] = {}
    for run in runs:
        if run.setting == VANILLA:
            reference.setdefault(run.prompt, run.token_ids)
    found: dict[Difference, None] = {}
    for run in runs:
        vanilla, other = reference[run.prompt], run.token_ids
        if vanilla == other:
            continue
        shorter = min(len(vanilla), len(other))
        at = next((i for i in range(shorter) if vanilla[i] != other[i]), shorter)
        tokens = [ids[at] if at < len(ids) else None for ids in (vanilla, other)]
        found[Difference(run.setting, run.prompt, at, *tokens)] = None
    return list(found)

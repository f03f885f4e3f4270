"""The measurements of a comparison so far, one line a prompt in ``runs.jsonl``, so that it can be continued.

The first line holds the settings; the same settings continue the file, others are refused. A line of
one prompt holds every method and tree size, decoded in turns within seconds of each other, which is
why ratios of times stay valid when a run is interrupted and continued on another day.
"""

import dataclasses
import hashlib
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.core.errors import UserError
from runtime.core.jsonl_store import JsonlStore
from runtime.core.prompts import Prompt
from runtime.profiler.report import stage_durations
from runtime.profiler.runs import PLAIN, Difference, Run, is_tie

RUNS_NAME = "runs.jsonl"


def own_plain(label: str) -> str:
    """Name of the plain decoding of a head's own, fine-tuned target model."""
    return f"{PLAIN} of {label}"


def plain_method(method: str, known: Container[str]) -> str:
    """The known plain decoding with which a method is compared; plain decoding is compared with itself."""
    return next(name for name in (method, own_plain(method), PLAIN) if name in known)


@dataclass(frozen=True)
class Outcome:
    """One prompt decoded once by one method: plain decoding with 0 nodes, or a head's label.

    new_tokens: tokens of the output; the first comes from reading the prompt, the others from steps
    draft_ms, search_ms, verify_ms: stages of every step
    accepted: drafts of every step, before the token limit cuts them
    difference: where the output first differs from plain decoding's, with ``logit_gap``; None if it does not
    """

    method: str
    nodes: int
    prompt_tokens: int
    new_tokens: int
    decode_ms: float
    draft_ms: list[float]
    search_ms: list[float]
    verify_ms: list[float]
    accepted: list[int]
    difference: dict[str, Any] | None

    @property
    def num_decoded(self) -> int:
        """Tokens emitted by verify steps, those that the token limit cuts off not counted."""
        return self.new_tokens - 1

    @property
    def num_steps(self) -> int:
        return len(self.accepted)

    @property
    def is_mismatch(self) -> bool:
        """Whether the output differs from plain decoding and the two tokens are no tie."""
        return self.difference is not None and not is_tie(self.difference["logit_gap"])


def outcome(run: Run, method: str, nodes: int, difference: Difference | None) -> Outcome:
    """Return what is kept of a timed run; milliseconds to four digits."""
    stages = [stage_durations(step) for step in run.steps]
    times = {
        f"{name}_ms": [round(step[name], 4) for step in stages] for name in ("draft", "search", "verify")
    }
    keys = ("position", "plain_token", "token", "logit_gap")
    return Outcome(
        method=method,
        nodes=nodes,
        prompt_tokens=run.num_prompt_tokens,
        new_tokens=len(run.token_ids),
        decode_ms=round(run.decode_ms, 4),
        **times,
        accepted=[step.num_accepted for step in run.steps],
        difference={key: getattr(difference, key) for key in keys} if difference else None,
    )


@dataclass(frozen=True)
class Unit:
    """One prompt of one file, decoded once in every setting."""

    prompts: str
    prompt: int
    repeat: int


@dataclass(frozen=True)
class Record:
    """A unit's outcomes. ``digest`` is of the prompt, ``token_ids`` are plain decoding's output."""

    unit: Unit
    digest: str
    token_ids: list[int]
    outcomes: list[Outcome]


def prompt_digest(prompt: Prompt) -> str:
    """Return a digest that tells a prompt from another one in the same line of the file."""
    return hashlib.sha256(f"{prompt.raw} {prompt.text}{prompt.before or ''}".encode()).hexdigest()[:16]


class Journal:
    """``runs.jsonl``; nothing is written before the first record."""

    def __init__(self, path: Path, settings: Mapping[str, Any]):
        """Raises UserError when the file holds runs of other settings, or is not such a file."""
        self.path = path
        self.records: dict[Unit, Record] = {}
        self._store = JsonlStore(path, settings, lambda values: self._keep(_record(values)))

    def has(self, unit: Unit, digest: str) -> bool:
        """Whether a unit is done. Raises UserError when that was another prompt."""
        record = self.records.get(unit)
        if record is None:
            return False
        if record.digest != digest:
            raise UserError(
                f"--prompts: prompt {unit.prompt + 1} of {unit.prompts} is not the one in {self.path}; "
                "remove that file or choose another --out"
            )
        return True

    def append(self, record: Record) -> None:
        """Keep a record, on disk before this returns."""
        self._store.append(dataclasses.asdict(record))
        self._keep(record)

    def select(self, units: Sequence[Unit]) -> list[Record]:
        """The records of ``units``, in their order."""
        return [self.records[unit] for unit in units]

    def _keep(self, record: Record) -> None:
        self.records[record.unit] = record


def _record(values: dict[str, Any]) -> Record:
    return Record(
        unit=Unit(**values["unit"]),
        digest=values["digest"],
        token_ids=values["token_ids"],
        outcomes=[Outcome(**entry) for entry in values["outcomes"]],
    )

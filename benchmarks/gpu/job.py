"""What all parts of one run know."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.decoders import Decoders
from benchmarks.gpu.facts import DeviceFacts
from benchmarks.gpu.parts import Skip
from benchmarks.gpu.prompts import contexts
from benchmarks.gpu.steps import Limits
from runtime.core.bundle import DRAFT, PLAIN, Bundle

# New tokens of the sequences whose steps are timed, before they begin again, so that contexts stay alike.
WINDOW = 128
# Tokens of the context of which steps are timed, if nothing else is said.
USUAL_CONTEXT = 512


@dataclass
class Job:
    """prompts: token ids; limits: of one measurement

    max_new_tokens: of a prompt that is decoded as a whole
    deadline: of ``time.monotonic``, after which nothing more is begun
    num_nodes: draft nodes of the measurements that have one size; the fastest once it is known
    """

    bundle: Bundle
    decoders: Decoders
    facts: DeviceFacts
    prompts: Sequence[Sequence[int]]
    limits: Limits
    max_new_tokens: int
    deadline: float
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    num_nodes: int
    reference: Path | None = None
    peer_model: Path | None = None

    @property
    def has_head(self) -> bool:
        return self.sizes[-1] > 0

    @property
    def sizes(self) -> tuple[int, ...]:
        """Draft nodes of the trees that the bundle has graphs for; 0 is a step without drafts."""
        return self.bundle.manifest.step_nodes

    @property
    def settings(self) -> list[tuple[str, str, int]]:
        """Name, method and draft nodes of every kind of step: plain decoding, then all trees."""
        trees = [(f"{size} nodes", DRAFT, size) for size in self.sizes if size]
        return [(PLAIN, PLAIN, 0), *trees]

    def check_time(self) -> None:
        """Raises Skip once the time for the whole run is over."""
        if time.monotonic() > self.deadline:
            raise Skip("the time for the whole run was over; --minutes gives more")

    def usual_context(self) -> list[int]:
        """A prompt, so long that a window of new tokens fits behind it."""
        most = min(self.decoders.max_length, USUAL_CONTEXT)
        return contexts(self.prompts, max(1, most - self.window), 1)[0]

    @property
    def window(self) -> int:
        return min(WINDOW, self.decoders.max_length // 2)

"""Counters that the server adds to its own at ``/metrics``."""

from typing import Any

from runtime.scheduling.scheduler import Scheduler

COUNTERS = {
    "requests": "Requests taken into the queue",
    "tokens": "Tokens given out",
    "steps": "Steps of requests: a pass of the model counts once for every request in it",
    "nodes": "Tree nodes verified, a request's own last token with them",
    "accepted": "Drafts accepted",
    "queue_seconds": "Time that requests waited for a free row",
}


class Metrics:
    """A ``runtime.stages.Recorder`` that counts steps, drafts and requests.

    All of it in the scheduler's thread: the server does not survive two increments at once (seen in 2.51).
    """

    def __init__(self, pb_utils: Any, labels: dict[str, str], scheduler: Scheduler):
        self._scheduler = scheduler
        self._num_submitted = 0
        self._queue_seconds = 0.0
        # A metric does not keep its family alive.
        self._families = {
            name: pb_utils.MetricFamily(
                name=f"ctc_{name}", description=description, kind=pb_utils.MetricFamily.COUNTER
            )
            for name, description in COUNTERS.items()
        }
        self._counters = {name: family.Metric(labels=labels) for name, family in self._families.items()}

    def add_tokens(self, count: int) -> None:
        """Tokens that a request was given; its first ones come without a step."""
        self._counters["tokens"].increment(count)
        submitted, waited = self._scheduler.num_submitted, self._scheduler.queue_seconds
        self._counters["requests"].increment(submitted - self._num_submitted)
        self._counters["queue_seconds"].increment(waited - self._queue_seconds)
        self._num_submitted, self._queue_seconds = submitted, waited

    def begin(self) -> None:
        pass

    def mark(self, stage: str) -> None:
        pass

    def end(self, num_rows: int, num_nodes: int, num_accepted: int) -> None:
        self._counters["steps"].increment(num_rows)
        self._counters["nodes"].increment(num_nodes)
        self._counters["accepted"].increment(num_accepted)

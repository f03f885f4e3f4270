"""Our counters at ``/metrics``, beside Triton's own."""

from typing import Any

from runtime.engines.recorder import NullRecorder
from runtime.serve.scheduler import Scheduler

COUNTERS = {
    "requests": "Requests accepted into the queue",
    "tokens": "Tokens generated",
    "steps": "Decode steps of requests: a pass of the model counts once for every sequence in it",
    "nodes": "Tree nodes verified, the root included",
    "accepted": "Draft tokens accepted",
    "queue_seconds": "Seconds that requests waited in the queue",
    "failed_devices": "Devices that failed, whose engines serve no request until they are loaded again",
}


class Metrics(NullRecorder):
    """A ``runtime.engines.recorder.Recorder`` that counts steps, drafts and requests.

    Only the scheduler's thread may call it: Triton 2.51 crashes if two threads increment at once.
    """

    def __init__(self, pb_utils: Any, labels: dict[str, str], scheduler: Scheduler):
        self._scheduler = scheduler
        self._num_submitted = 0
        self._queue_seconds = 0.0
        # The families are kept here because a metric does not keep its family alive.
        self._families = {
            name: pb_utils.MetricFamily(
                name=f"ctc_{name}", description=description, kind=pb_utils.MetricFamily.COUNTER
            )
            for name, description in COUNTERS.items()
        }
        self._counters = {name: family.Metric(labels=labels) for name, family in self._families.items()}

    def add_tokens(self, count: int) -> None:
        """Count tokens sent to a client, and the requests and waiting time since the last call."""
        self._counters["tokens"].increment(count)
        submitted, waited = self._scheduler.num_submitted, self._scheduler.queue_seconds
        self._counters["requests"].increment(submitted - self._num_submitted)
        self._counters["queue_seconds"].increment(waited - self._queue_seconds)
        self._num_submitted, self._queue_seconds = submitted, waited

    def add_failed_device(self) -> None:
        self._counters["failed_devices"].increment(1)

    def end(self, num_seqs: int, num_nodes: int, num_accepted: int) -> None:
        self._counters["steps"].increment(num_seqs)
        self._counters["nodes"].increment(num_nodes)
        self._counters["accepted"].increment(num_accepted)

"""Counters that the server adds to its own at ``/metrics``."""

import threading
from typing import Any

from runtime.scheduler import Ticket


class Metrics:
    """A ``runtime.stages.Recorder`` that counts steps, drafts and tokens.

    Increments take turns under a lock: the server does not survive two at once (seen in 2.51).
    """

    def __init__(self, pb_utils: Any, labels: dict[str, str]):
        self._lock = threading.Lock()
        self._tickets: list[Ticket] = []

        def counter(name: str, description: str) -> Any:
            family = pb_utils.MetricFamily(
                name=f"ctc_{name}", description=description, kind=pb_utils.MetricFamily.COUNTER
            )
            return family, family.Metric(labels=labels)

        self._counters = {
            name: counter(name, description)
            for name, description in {
                "requests": "Requests taken into the queue",
                "steps": "Steps: passes of the model over all running requests",
                "nodes": "Tree nodes verified, a request's own last token with them",
                "accepted": "Drafts accepted",
                "queue_seconds": "Time that requests waited for a free row",
            }.items()
        }

    def begin(self) -> None:
        pass

    def mark(self, stage: str) -> None:
        pass

    def end(self, num_nodes: int, num_accepted: int) -> None:
        with self._lock:
            admitted = [ticket for ticket in self._tickets if ticket.admitted is not None]
            self._tickets = [
                ticket for ticket in self._tickets if ticket.admitted is None and ticket.finished is None
            ]
            self._add("steps", 1)
            self._add("nodes", num_nodes)
            self._add("accepted", num_accepted)
            for ticket in admitted:
                assert ticket.admitted is not None
                self._add("queue_seconds", ticket.admitted - ticket.submitted)

    def count_request(self, ticket: Ticket) -> None:
        with self._lock:
            self._add("requests", 1)
            self._tickets.append(ticket)

    def _add(self, name: str, amount: float) -> None:
        self._counters[name][1].increment(amount)

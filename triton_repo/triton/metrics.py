"""Our metrics at ``/metrics``, beside Triton's own; named as vLLM names them where the same is meant.

Triton 2.51 has counters and gauges alone. A histogram is written as the series that Prometheus makes of one:
counters that end in ``_bucket``, with the label ``le``, in ``_sum`` and in ``_count``. Our own worker has a
``Registry`` in Triton's place, which shows the same series as what they are.
"""

import threading
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from runtime.engines.recorder import NullRecorder
from runtime.serve.scheduler import Scheduler
from triton_repo.triton.tensors import CANCELLED, INTERNAL, INVALID, UNAVAILABLE

PREFIX = "ctc_"
# The ends of the names of a histogram's series.
PARTS = ("_bucket", "_sum", "_count")
# Of the text form that Prometheus reads.
CONTENT_TYPE = "text/plain; version=0.0.4"
# The kinds of metrics, as Triton and Prometheus name them.
COUNTER, GAUGE = "counter", "gauge"
COUNTERS = {
    "requests": "Requests accepted into the queue",
    "tokens": "Tokens generated",
    "steps": "Decode steps of requests: a pass of the model counts once for every sequence in it",
    "nodes": "Tree nodes verified, the root included",
    "accepted": "Draft tokens accepted",
    "prefix_hit_tokens": "Prompt tokens that were not read because their keys and values had been kept",
    "failed_devices": "Devices that failed, whose engines serve no request until they are loaded again",
}
# Counters with a label of their own: the label, and what it may be.
LABELLED = {
    "request_success": ("finished_reason", ("stop", "length"), "Requests whose text ended"),
    "request_failure": (
        "reason",
        (INVALID, UNAVAILABLE, CANCELLED, INTERNAL),
        "Requests that were refused or ended with an error",
    ),
}
GAUGES = {
    "num_requests_running": "Requests that have a slot",
    "num_requests_waiting": "Requests in the queue",
    "kv_cache_usage_perc": "Share of the positions of all slots that hold tokens, from 0 to 1",
}
_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
# Histograms, each with the upper ends of its buckets.
HISTOGRAMS: dict[str, tuple[tuple[float, ...], str]] = {
    "time_to_first_token_seconds": (_SECONDS, "From the arrival of a request to its first token"),
    "request_queue_time_seconds": (_SECONDS, "Time in the queue"),
    "request_time_per_output_token_seconds": (
        (0.001, 0.003, 0.01, 0.02, 0.05, 0.1, 0.3, 1.0),
        "Mean time of a request's tokens after the first",
    ),
    "request_acceptance_length": (
        (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 12.0),
        "Mean tokens of a request's decode steps",
    ),
}
# Every increment is a message to the server, so those of a running request are sent together, after so many
# seconds at least.
FLUSH_SECONDS = 0.1


# Makes the family of a name, a description and a kind: COUNTER or GAUGE. A family is as Triton's: its
# ``Metric(labels=...)`` makes a series, which has ``increment`` and ``set``.
MakeFamily = Callable[[str, str, str], Any]


class Metrics(NullRecorder):
    """A ``runtime.engines.recorder.Recorder`` that counts steps, drafts and requests.

    Safe from several threads, of which one at a time sends: Triton 2.51 crashes if two increment at once.
    """

    def __init__(self, make_family: MakeFamily, labels: Mapping[str, str], scheduler: Scheduler):
        """make_family: of a name, a description and a kind; labels: of all series"""
        self._scheduler = scheduler
        self._lock = threading.Lock()
        self._waiting: defaultdict[tuple[str, str], float] = defaultdict(float)
        # What the scheduler had counted when it was asked last.
        self._counted: defaultdict[str, float] = defaultdict(float)
        self._sent = 0.0
        # The families are kept here because a metric of Triton does not keep its family alive.
        self._families: list[Any] = []
        self._metrics: dict[tuple[str, str], Any] = {}

        def add(
            name: str, description: str, kind: str, label: str = "", values: Sequence[str] = ("",)
        ) -> None:
            family = make_family(PREFIX + name, description, kind)
            self._families.append(family)
            for value in values:
                own = {label: value} if label else {}
                self._metrics[name, value] = family.Metric(labels={**labels, **own})

        for name, description in COUNTERS.items():
            add(name, description, COUNTER)
        for name, (label, values, description) in LABELLED.items():
            add(name, description, COUNTER, label, values)
        for name, description in GAUGES.items():
            add(name, description, GAUGE)
        for name, (bounds, description) in HISTOGRAMS.items():
            add(f"{name}_bucket", description, COUNTER, "le", [*map(str, bounds), "+Inf"])
            add(f"{name}_sum", description, COUNTER)
            add(f"{name}_count", description, COUNTER)

    def add(self, name: str, amount: float = 1, label: str = "") -> None:
        """Count something; ``flush`` sends it."""
        with self._lock:
            self._waiting[name, label] += amount

    def add_failure(self, reason: str) -> None:
        """Count a request that was refused or failed, and send it."""
        self.add("request_failure", label=reason)
        self.flush()

    def add_failed_device(self) -> None:
        self.add("failed_devices")
        self.flush()

    def observe(self, name: str, value: float) -> None:
        """Put a value into a histogram."""
        bounds = HISTOGRAMS[name][0]
        with self._lock:
            for bound in (*bounds[bisect_left(bounds, value) :], "+Inf"):
                self._waiting[f"{name}_bucket", str(bound)] += 1
            self._waiting[f"{name}_sum", ""] += value
            self._waiting[f"{name}_count", ""] += 1

    def end(self, num_seqs: int, num_nodes: int, num_accepted: int) -> None:
        self.add("steps", num_seqs)
        self.add("nodes", num_nodes)
        self.add("accepted", num_accepted)
        if time.monotonic() >= self._sent + FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Send what has been counted, and the gauges."""
        scheduler = self._scheduler
        with self._lock:
            counts = {
                "requests": scheduler.num_submitted,
                "prefix_hit_tokens": scheduler.num_prefix_hit_tokens,
            }
            for name, value in counts.items():
                self._waiting[name, ""] += value - self._counted[name]
                self._counted[name] = value
            waiting, self._waiting = self._waiting, defaultdict(float)
            for key, amount in waiting.items():
                if amount:
                    self._metrics[key].increment(amount)
            self._metrics["num_requests_running", ""].set(scheduler.num_running)
            self._metrics["num_requests_waiting", ""].set(scheduler.num_waiting)
            self._metrics["kv_cache_usage_perc", ""].set(scheduler.cache_usage)
            self._sent = time.monotonic()


class Series:
    """The value of one series."""

    def __init__(self) -> None:
        self.value = 0.0

    def increment(self, amount: float) -> None:
        self.value += amount

    def set(self, value: float) -> None:
        self.value = value


class SeriesFamily:
    """The series of one name, by their labels as they are shown."""

    def __init__(self, description: str, kind: str):
        self.description, self.kind = description, kind
        self.series: dict[str, Series] = {}

    def Metric(self, *, labels: Mapping[str, str]) -> Series:
        shown = ",".join(f'{label}="{text}"' for label, text in labels.items())
        return self.series.setdefault(shown, Series())


class Registry:
    """The families of all models of a process, where no Triton keeps them.

    Series have the names that Triton gives them. prometheus_client would end the names of counters in
    ``_total``.
    """

    def __init__(self) -> None:
        self._families: dict[str, SeriesFamily] = {}

    def family(self, name: str, description: str, kind: str) -> SeriesFamily:
        """The family of this name, which several models share."""
        return self._families.setdefault(name, SeriesFamily(description, kind))

    def text(self) -> str:
        """All series, as https://prometheus.io/docs/instrumenting/exposition_formats has them."""
        return "".join(f"{line}\n" for line in self._lines())

    def _lines(self) -> Iterator[str]:
        families = dict(self._families)
        for name, (_, description) in HISTOGRAMS.items():
            parts = [f"{PREFIX}{name}{part}" for part in PARTS]
            if parts[0] in families:
                yield from _head(f"{PREFIX}{name}", description, "histogram")
                for part in parts:
                    yield from _samples(part, families.pop(part))
        for name, family in families.items():
            yield from _head(name, family.description, family.kind)
            yield from _samples(name, family)


def _head(name: str, description: str, kind: str) -> Iterator[str]:
    yield f"# HELP {name} {description}"
    yield f"# TYPE {name} {kind}"


def _samples(name: str, family: SeriesFamily) -> Iterator[str]:
    for labels, series in family.series.items():
        yield f"{name}{{{labels}}} {series.value!r}"

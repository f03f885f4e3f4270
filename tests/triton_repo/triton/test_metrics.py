"""The metrics of the Triton model, and the files that name them."""

import json
import re
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import yaml

from runtime.core.errors import DeviceError
from runtime.decode.sequence import Chunk, Piece
from runtime.serve.request import RequestFailure, UnavailableError
from tests.triton_repo.servers import Server
from triton_repo.triton import metrics as module
from triton_repo.triton.metrics import (
    COUNTER,
    COUNTERS,
    GAUGE,
    GAUGES,
    HISTOGRAMS,
    LABELLED,
    PARTS,
    PREFIX,
    Metrics,
)
from triton_repo.triton.model import Responder
from triton_repo.triton.requests import read_request
from triton_repo.triton.tensors import INTERNAL, TEXT, UNAVAILABLE
from triton_repo.worker.service import Sender

MONITORING = Path(__file__).parents[3] / "triton_repo" / "monitoring"
Values = dict[tuple[str, ...], float]


def series_names() -> list[str]:
    """The names of all series, as ``/metrics`` shows them."""
    histograms = [name + part for name in HISTOGRAMS for part in PARTS]
    return [PREFIX + name for name in (*COUNTERS, *LABELLED, *GAUGES, *histograms)]


class FakeFamily:
    """``MetricFamily`` of Triton's Python backend; it fails as Triton 2.51 does if two threads increment."""

    values: Values
    busy = threading.Lock()

    def __init__(self, name: str, description: str, kind: str):
        assert description
        self.name, self.kind = name, kind

    def Metric(self, *, labels: dict[str, str]) -> Any:
        key = (self.name, *(value for name, value in labels.items() if name != "model"))
        self.values[key] = 0.0

        def increment(amount: float) -> None:
            assert self.kind == COUNTER
            assert amount > 0
            assert self.busy.acquire(blocking=False), "two threads increment at once"
            self.values[key] += amount
            self.busy.release()

        def set_to(value: float) -> None:
            assert self.kind == GAUGE
            self.values[key] = value

        return SimpleNamespace(increment=increment, set=set_to)


@pytest.fixture
def values() -> Values:
    return {}


@pytest.fixture
def metrics(values: Values, monkeypatch: pytest.MonkeyPatch) -> Metrics:
    monkeypatch.setattr(FakeFamily, "values", values, raising=False)
    scheduler: Any = SimpleNamespace(
        num_submitted=3,
        num_prefix_hit_tokens=47,
        num_waiting=2,
        num_running=1,
        cache_usage=0.25,
    )
    return Metrics(FakeFamily, {"model": "m"}, scheduler)


def test_a_histogram_is_what_prometheus_reads(metrics: Metrics, values: Values) -> None:
    name = "request_acceptance_length"
    for value in (1.0, 2.2, 99.0):
        metrics.observe(name, value)
    metrics.flush()
    bounds = [str(bound) for bound in HISTOGRAMS[name][0]]
    buckets = [values[f"ctc_{name}_bucket", bound] for bound in (*bounds, "+Inf")]
    assert buckets == [1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 3]
    assert values[f"ctc_{name}_count",] == 3
    assert values[f"ctc_{name}_sum",] == pytest.approx(102.2)


def test_times_of_a_request(metrics: Metrics, values: Values, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=10.0)
    monkeypatch.setattr(module.time, "monotonic", lambda: clock.now)
    sender: Any = Mock(arrived=clock.now)
    request = read_request(TEXT, {"text_input": np.array([[b"x"]], object)})
    responder = Responder(TEXT, request, 1, sender, metrics, str)
    for clock.now, count, reason in ((12.0, 1, None), (13.0, 3, None), (14.0, 4, "length")):
        responder(Chunk((Piece(5, "a", False),) * count, reason))
    assert values["ctc_tokens",] == 8
    assert values["ctc_time_to_first_token_seconds_sum",] == 2
    assert values["ctc_request_time_per_output_token_seconds_sum",] == pytest.approx(2 / 7)
    assert values["ctc_request_acceptance_length_sum",] == 3.5
    assert values["ctc_request_success", "length"] == 1
    assert values["ctc_request_success", "stop"] == 0
    counted = [values[f"ctc_{name}",] for name in ("requests", "prefix_hit_tokens")]
    assert counted == [3, 47]
    assert (values["ctc_num_requests_running",], values["ctc_kv_cache_usage_perc",]) == (1, 0.25)
    # A text of one token has no further ones.
    single = Responder(TEXT, request, 1, sender, metrics, str)
    single(Chunk((Piece(5, "a", False),), "stop"))
    assert values["ctc_request_acceptance_length_count",] == 1
    assert values["ctc_time_to_first_token_seconds_count",] == 2
    assert values["ctc_requests",] == 3


def test_threads_take_turns(metrics: Metrics, values: Values) -> None:
    def work() -> None:
        for _ in range(200):
            metrics.add_failure("invalid")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert values["ctc_request_failure", "invalid"] == 800


def test_dashboard_and_alerts_name_series_that_exist(values: Values, metrics: Metrics) -> None:
    names = set(series_names())
    assert {name for name, *_ in values} == names
    dashboard = json.loads((MONITORING / "grafana.json").read_text())
    rules = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"][0]["rules"]
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert expressions
    found = {
        name
        for text in (*expressions, *(rule["expr"] for rule in rules))
        for name in re.findall(r"\bctc_\w+", text)
    }
    assert found <= names
    assert {name for name in names if name.endswith("_bucket")} <= found
    for rule in rules:
        assert rule["annotations"]["summary"].endswith(".")


def test_the_server_has_all_series(each_server: Server) -> None:
    (*_, last) = each_server.ask(text_input="How many?")
    lines = each_server.metrics().splitlines()
    found = {re.split(r"[{ ]", line)[0] for line in lines if line.startswith("ctc_")}
    assert found == set(series_names())

    def value(name: str, **labels: str) -> float:
        texts = [f'{label}="{text}"' for label, text in {"model": "ctc_llm", **labels}.items()]
        (line,) = [
            line for line in lines if line.startswith(f"{name}{{") and all(text in line for text in texts)
        ]
        return float(line.split()[-1])

    first = "ctc_time_to_first_token_seconds"
    assert value(f"{first}_bucket", le="+Inf") == value(f"{first}_count") >= 1
    assert value("ctc_request_success", finished_reason="length") >= 1
    assert value("ctc_num_requests_running") == 0
    assert last["finish_reason"][0] == b"length"


def test_our_own_server_has_real_histograms(own_server: Server) -> None:
    own_server.ask(text_input="How many?")
    lines = own_server.metrics().splitlines()
    types = dict(line.split()[2:4] for line in lines if line.startswith("# TYPE "))
    assert len(types) == sum(line.startswith("# TYPE ") for line in lines)
    assert {name for name, kind in types.items() if kind == "histogram"} == {
        f"ctc_{name}" for name in HISTOGRAMS
    }
    name = "ctc_time_to_first_token_seconds"
    buckets = [
        float(line.split()[-1]) for line in lines if line.startswith(f'{name}_bucket{{model="ctc_llm",')
    ]
    assert buckets == sorted(buckets)
    assert buckets[-1] >= 1


def test_the_first_token_is_awaited_from_the_arrival(
    metrics: Metrics, values: Values, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 10.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    sender: Any = Sender(None, SimpleNamespace())  # type: ignore[arg-type]
    now = 15.0  # the request has waited for its turn, its prompt and its grammar have been read
    request = read_request(TEXT, {"text_input": np.array([[b"x"]], object)})
    responder = Responder(TEXT, request, 1, sender, metrics, str)
    now = 17.0
    responder(Chunk((Piece(5, "a", False),), None))
    metrics.flush()
    assert values["ctc_time_to_first_token_seconds_sum",] == 7


class FailureSender:
    """Keeps what a request fails with."""

    arrived = 0.0

    def __init__(self) -> None:
        self.found: list[tuple[str, str]] = []

    def fail(self, reason: str, message: str) -> None:
        self.found.append((reason, message))

    def send(self, tensors: Any, *, is_last: bool) -> None:
        raise AssertionError("a failure has no tensors")

    def is_cancelled(self) -> bool:
        return False


def test_the_reason_of_a_failure(metrics: Metrics) -> None:
    request = read_request(TEXT, {"text_input": np.array([[b"x"]], object)})
    for error, expected in (
        (KeyError(3), (INTERNAL, "internal error: KeyError(3)")),
        (DeviceError("it failed"), (INTERNAL, "it failed")),
        (UnavailableError("full"), (UNAVAILABLE, "full")),
    ):
        sender = FailureSender()
        Responder(TEXT, request, 1, sender, metrics, str)(RequestFailure(error))
        assert sender.found == [expected]

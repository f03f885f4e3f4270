"""The launcher: its arguments, what it tells the server, and how it sees which models have loaded."""

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from triton_repo import serve

# As Triton reports an exception of a model's ``initialize``.
REASON = (
    "Internal: DeviceError: cudaMalloc: out of memory: smaller max_length needs less\n\nAt:\n  a.py(3): run\n"
)
INDEX = [
    {"name": "ctc_llm", "version": "1", "state": "LOADING"},
    {"name": "ctc_llm_plain", "version": "1", "state": "UNAVAILABLE", "reason": REASON},
    {"name": "ctc_llm_tokens", "version": "1", "state": "READY"},
    {"name": "other"},
]


def test_only_the_failed_model_counts_as_failed() -> None:
    reason = "cudaMalloc: out of memory: smaller max_length needs less"
    assert serve.failed_models(json.dumps(INDEX).encode()) == {"ctc_llm_plain": reason}
    assert serve.failed_models(b"[]") == {}


@pytest.mark.parametrize("failed", [(), ("ctc_llm_plain",)])
def test_a_failed_model_does_not_end_the_wait_for_others(
    failed: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["ctc_llm", "ctc_llm_plain"]
    index = [{"name": name, "state": "UNAVAILABLE" if name in failed else "LOADING"} for name in names]
    # How often ctc_llm is looked at until it is ready.
    polls = iter((None, None, b""))
    urls: list[str] = []

    def fetch(url: str, data: bytes | None = None) -> bytes | None:
        urls.append(url)
        if url == "http://host:1/v2/repository/index":
            return json.dumps(index).encode()
        if url == "http://host:1/v2/models/ctc_llm/ready":
            return next(polls)
        return None if "ctc_llm_plain" in failed else b""

    monkeypatch.setattr(serve, "_fetch", fetch)
    running: Any = SimpleNamespace(poll=lambda: None)
    assert serve.wait_ready(running, "http://host:1", names) is not bool(failed)
    assert urls.count("http://host:1/v2/models/ctc_llm/ready") == 3
    written = capsys.readouterr().err
    assert written == ("serve: ctc_llm_plain did not load: the server's log says why\n" if failed else "")


def test_a_server_that_ends_is_not_waited_for() -> None:
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
        assert not serve.wait_ready(ended, "http://localhost:1", ["ctc_llm"])


def test_what_the_server_is_told() -> None:
    args, rest = serve.parse_args(["--bundle", "engines", "--grpc-use-ssl=true"])
    options = serve.server_options(args, rest)
    for kind in ("http", "grpc", "metrics"):
        assert f"--{kind}-address=127.0.0.1" in options
    assert "--model-control-mode=none" in options
    assert options[-1] == "--grpc-use-ssl=true"
    # If the user restricts APIs, our restrictions are left out.
    args, rest = serve.parse_args(["--bundle", "engines", "--http-restricted-api=trace:key=value"])
    options = serve.server_options(args, rest)
    assert sum(option.startswith("--http-restricted-api") for option in options) == 1


def test_gpus_are_refused_for_engines_that_run_on_the_cpu(
    tiny_bundle_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve.main(["--bundle", str(tiny_bundle_dir), "--gpus", "0"]) == 2
    assert capsys.readouterr().err == "serve: --gpus: engines of the target onnxruntime run on the CPU\n"


@pytest.mark.parametrize("text", ["", "x", "0,", "-1", "0,0", "0, 1", "cuda:0", "²"])
def test_a_bad_list_of_gpus(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        serve.main(["--bundle", "absent", f"--gpus={text}"])
    message = f"argument --gpus: must be numbers of different GPUs, such as 0,1, got {text!r}"
    assert message in capsys.readouterr().err


def test_a_missing_bundle(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve.main(["--bundle", "absent"]) == 2
    assert "serve: absent is no engine bundle" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "least"),
    [
        ("--max-num-seqs", "0", 1),
        ("--max-queue-size", "-1", 1),
        ("--prefill-chunk-size", "x", 1),
        ("--num-instances", "0", 1),
        ("--max-length", "1", 2),
        ("--threads", "-1", 0),
    ],
)
def test_bad_numbers(option: str, value: str, least: int, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        serve.main(["--bundle", "absent", option, value])
    message = f"argument {option}: must be a whole number of at least {least}, got '{value}'"
    assert message in capsys.readouterr().err

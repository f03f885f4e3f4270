"""The launcher: its arguments, what it tells the server, and how it sees which models have loaded."""

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.core.errors import UserError
from tests.triton_repo.servers import damaged_bundle
from triton_repo import serve
from triton_repo.triton.health import failed_models
from triton_repo.triton.process import free_ports
from triton_repo.triton.server import Installation, server_options

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
    names = ["ctc_llm", "ctc_llm_plain", "ctc_llm_tokens"]
    assert failed_models(INDEX, names) == {"ctc_llm_plain": reason}
    assert failed_models(INDEX, ["ctc_llm"]) == {}


def test_what_the_server_is_told() -> None:
    args, rest = serve.parse_args(["--bundle", "engines", "--log-verbose=1", "--grpc-host=127.0.0.1"])
    options = server_options(args, rest, 1234)
    assert {"--grpc-address=127.0.0.1", "--grpc-port=8001", "--metrics-port=1234"} <= set(options)
    # Triton's own HTTP is closed, and its metrics can be read on this machine alone.
    assert {"--allow-http=false", "--metrics-address=127.0.0.1", "--model-control-mode=none"} <= set(options)
    assert options[-1] == "--log-verbose=1"
    # If the user restricts protocols, our restrictions are left out.
    args, rest = serve.parse_args(["--bundle", "engines", "--grpc-restricted-protocol=trace:key=value"])
    options = server_options(args, rest, 1234)
    assert sum(option.startswith("--grpc-restricted-protocol") for option in options) == 1


def test_gpus_are_refused_for_engines_that_run_on_the_cpu(
    tiny_bundle_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve.main(["--bundle", str(tiny_bundle_dir), "--gpus", "0"]) == 2
    assert capsys.readouterr().err == "serve: --gpus: engines of the target onnxruntime run on the CPU\n"


@pytest.mark.parametrize("text", ["", "x", "0,", "-1", "0,0", "0, 1", "cuda:0", "²"])
def test_a_bad_list_of_gpus(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        serve.main(["--bundle", "absent", f"--gpus={text}"])
    message = f"serve: --gpus: must be numbers of different GPUs, such as 0,1, got {text!r}"
    assert message in capsys.readouterr().err


def test_options_beyond_the_bundle_start_no_server(
    tiny_bundle_dir: Path,
    tiny_step_bundle: Path,
    tiny_engine_bundle: Path,
    stream_bundle_of: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(serve, "find_server", lambda: pytest.fail("a server was looked for"))
    streams = stream_bundle_of("streaming")
    capsys.readouterr()  # what the export wrote
    for bundle, option, message in (
        (
            streams,
            "--step=graph",
            "--step: the bundle holds streams of the verify pass, whose steps run on the host",
        ),
        (streams, "--prompt-lookup", "--prompt-lookup: streams of the verify pass draft after every node"),
        (tiny_engine_bundle, "--prompt-lookup", "--prompt-lookup: steps on the host look up drafts"),
        (tiny_bundle_dir, "--step=graph", "--step: the bundle has no graphs of steps"),
        (tiny_bundle_dir, "--num-nodes=257", "--num-nodes: a step verifies at most 256, got 257"),
        (tiny_bundle_dir, "--max-length=100000", "--max-length: the model takes at most"),
        (
            tiny_bundle_dir,
            "--max-num-seqs=5000",
            "--max-num-seqs: a server decodes at most 1024, got 5000",
        ),
        (tiny_bundle_dir, "--threads=300", "--threads: an engine takes at most 256, got 300"),
        (tiny_bundle_dir, "--prefix-cache-mb=9999999", "--prefix-cache-mb: a cache takes at most 1048576"),
        (tiny_bundle_dir, "--device=cuda:0", "--device: is no option of the server"),
        (
            tiny_engine_bundle,
            "--device=cpu",
            "--device: is no option of the server; this bundle's tensorrt-rtx runs",
        ),
        (
            tiny_engine_bundle,
            "--step=host",
            "--step: engines of the target tensorrt-rtx run graph steps only",
        ),
        (
            tiny_engine_bundle,
            "--max-num-seqs=4",
            "--max-num-seqs: the engines were compiled for at most 3, got 4",
        ),
        (tiny_engine_bundle, "--max-length=257", "--max-length: the engines were compiled for at most 256"),
        (tiny_engine_bundle, "--num-nodes=9", "--num-nodes: the bundle has graphs for at most 8, got 9"),
    ):
        assert serve.main(["--bundle", str(bundle), option]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"serve: {message}")
    with pytest.raises(SystemExit, match="2"):
        serve.main(["--bundle", str(tiny_step_bundle), "--num-nodes", "many"])


def ports() -> list[str]:
    names = ("http", "grpc", "metrics", "openai")
    return [f"--{name}-port={number}" for name, number in zip(names, free_ports(4), strict=True)]


def test_a_server_without_a_model_is_ended(
    tiny_bundle_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = damaged_bundle(tiny_bundle_dir, tmp_path)
    assert serve.main(["--bundle", str(damaged), *ports()]) == 1
    first, last = capsys.readouterr().err.splitlines()
    assert first.startswith("serve: ctc_llm did not load: ")
    assert first.endswith("backbone.onnx.data is not the file of the bundle (sha256 differs)")
    assert last == "serve: no model can be served, so the server ends"


def test_a_server_that_ends_before_it_is_ready(
    tiny_bundle_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    binary = tmp_path / "tritonserver"
    binary.write_text("#!/bin/sh\nexit 3\n")
    binary.chmod(0o755)
    monkeypatch.setattr(serve, "find_server", lambda: Installation(binary, None, None))
    assert serve.main(["--bundle", str(tiny_bundle_dir), *ports()]) == 1
    expected = "serve: tritonserver ended with status 3 before it was ready; its log above says why\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--host=0.0.0.0"], "0.0.0.0"),
        (["--host=0.0.0.0", "--api-key=secret"], "127.0.0.1"),
        (["--api-key=secret", "--grpc-host=0.0.0.0"], "0.0.0.0"),
    ],
)
def test_where_grpc_listens(
    options: list[str], expected: str, tiny_bundle_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a key, which gRPC does not ask for, on this machine alone unless somebody says otherwise."""
    binary, given = tmp_path / "tritonserver", tmp_path / "given"
    binary.write_text(f'#!/bin/sh\necho "$@" > {given}\n')
    binary.chmod(0o755)
    monkeypatch.setattr(serve, "find_server", lambda: Installation(binary, None, None))
    assert serve.main(["--bundle", str(tiny_bundle_dir), *ports(), *options]) == 1
    assert f"--grpc-address={expected}" in given.read_text().split()
    assert "secret" not in given.read_text()


@pytest.mark.parametrize("text", ["", " "])
@pytest.mark.parametrize("option", ["--model-name", "--host", "--grpc-host"])
def test_an_empty_text(option: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It is refused before the bundle is looked for: an empty host would be all addresses of the machine."""
    with pytest.raises(SystemExit, match="2"):
        serve.main(["--bundle", "absent", option, text])
    assert f"serve: {option}: must not be empty, got {text!r}" in capsys.readouterr().err


def test_a_number_of_nodes_without_graphs_is_replaced_aloud(
    tiny_step_bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the words of ``ctc generate``."""

    def find() -> Installation:
        raise UserError("there is none")

    monkeypatch.setattr(serve, "find_server", find)
    line = "serve: --num-nodes: steps have 8 nodes in place of 5; the bundle has graphs for 4, 8"
    for nodes, lines in (("5", [line]), ("4", []), ("auto", [])):
        command = ["--bundle", str(tiny_step_bundle), "--step=graph", "--num-nodes", nodes]
        assert serve.main(command) == 2
        assert capsys.readouterr().err.splitlines() == [*lines, "serve: there is none"]


@pytest.mark.parametrize(("host", "shown"), [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]")])
def test_printed_addresses(host: str, shown: str) -> None:
    args, _ = serve.parse_args(["--bundle", "x", "--host", host, "--grpc-host", host])
    line = serve.ready_line(args, ["ctc_llm"])
    assert line.startswith(
        f"serving ctc_llm: gRPC {shown}:8001, http://{shown}:8000, metrics http://{shown}:8002"
    )


def test_a_missing_bundle(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve.main(["--bundle", "absent"]) == 2
    assert "serve: absent is no engine bundle" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "least"),
    [
        ("--max-num-seqs", "0", 1),
        ("--max-queue-size", "-1", 1),
        ("--max-queue-tokens", "0", 1),
        ("--prefix-cache-mb", "-1", 0),
        ("--prefill-chunk-size", "x", 1),
        ("--num-instances", "0", 1),
        ("--max-length", "1", 2),
        ("--threads", "-1", 0),
    ],
)
def test_bad_numbers(option: str, value: str, least: int, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        serve.main(["--bundle", "absent", option, value])
    message = f"serve: {option}: must be a whole number of at least {least}, got '{value}'"
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--http-prot=8000", "; did you mean --http-port?"),
        ("--plane", "; did you mean --plain?"),
        ("--log-verbos=1", "; did you mean --log-verbose?"),
        ("--unheard-of", ""),
    ],
)
def test_an_option_that_nobody_knows(
    option: str, message: str, tiny_bundle_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve.main(["--bundle", str(tiny_bundle_dir), option]) == 2
    name = option.partition("=")[0]
    expected = f"serve: {name}: neither an option of this command nor of tritonserver{message}\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("--allow-http=true", "Triton's own HTTP port is closed, because this server answers HTTP itself"),
        (
            "--http-thread-count=2",
            "Triton's own HTTP port is closed, because this server answers HTTP itself",
        ),
        (
            "--grpc-use-ssl=true",
            "this server reaches Triton by gRPC without TLS; put a proxy with TLS in front of it",
        ),
    ],
)
def test_an_option_of_tritonserver_that_contradicts_the_launcher(
    option: str, reason: str, tiny_bundle_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve.main(["--bundle", str(tiny_bundle_dir), option]) == 2
    expected = f"serve: {option.partition('=')[0]}: is no option of the server: {reason}\n"
    assert capsys.readouterr().err == expected


def test_a_port_in_use_starts_no_server(tiny_bundle_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        command = ["--bundle", str(tiny_bundle_dir), *ports(), "--log-verbose=1"]
        assert serve.main([*command, f"--metrics-port={number}"]) == 2
    expected = f"serve: --metrics-port: cannot listen on 127.0.0.1:{number}: Address already in use\n"
    assert capsys.readouterr().err == expected


def test_two_equal_ports(tiny_bundle_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    http, *_ = free_ports(1)
    command = ["--bundle", str(tiny_bundle_dir), *ports(), f"--http-port={http}", f"--openai-port={http}"]
    assert serve.main(command) == 2
    expected = f"serve: --openai-port: must differ from --http-port, got {http} for both\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize("value", ["0", "65536", "-1", "x"])
def test_a_bad_port(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        serve.main(["--bundle", "absent", f"--grpc-port={value}"])
    message = f"serve: --grpc-port: must be a whole number between 1 and 65535, got '{value}'"
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("value", ["65536", "-1", ""])
def test_a_bad_port_that_may_be_none(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        serve.main(["--bundle", "absent", f"--openai-port={value}"])
    message = f"serve: --openai-port: must be a whole number between 0 and 65535, got '{value}'"
    assert message in capsys.readouterr().err

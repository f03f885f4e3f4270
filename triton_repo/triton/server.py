"""Which server runs the models: a Triton that can be trusted, or a worker of our own; and what it needs.

tritonserver is found in a container or in the nvidia-pytriton wheel.

Its options are checked before it is started, and so are its ports.
"""

import argparse
import difflib
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from runtime.core.cli import AUTO
from runtime.core.errors import RequestError, UserError
from triton_repo.triton.config import REPOSITORY, config_text
from triton_repo.triton.guard import shared_memory_prefix

CONTAINER = Path("/opt/tritonserver")
LOCAL_HOST = "127.0.0.1"
ROOT = Path(__file__).resolve().parents[2]
# Running requests get this long to end after SIGTERM.
DRAIN_SECONDS = 30
# APIs that open or write files. Our clients do not use them.
RESTRICTED = "shared-memory,trace,logging"
# Where the launcher listens. Port 0 switches OpenAI's interface off.
PORTS = ("http", "grpc", "metrics", "openai")
# The beginnings of tritonserver's options that contradict the launcher, and why.
OWN_HTTP = "Triton's own HTTP port is closed, because this server answers HTTP itself"
REFUSED = {
    "--allow-http": OWN_HTTP,
    "--http-": OWN_HTTP,
    "--reuse-http-port": OWN_HTTP,
    "--allow-grpc": "this server reaches Triton by gRPC",
    "--grpc-use-ssl": "this server reaches Triton by gRPC without TLS; put a proxy with TLS in front of it",
}


@dataclass(frozen=True)
class Installation:
    """A server binary, its backends and its libraries; None if the binary finds them by itself."""

    binary: Path
    backends: Path | None
    libraries: Path | None


def find_server() -> Installation:
    """Look on PATH, in NVIDIA's container and in the wheel. Raises UserError if none has a server."""
    binary = shutil.which("tritonserver")
    if binary:
        return Installation(Path(binary), None, None)
    if (CONTAINER / "bin" / "tritonserver").is_file():
        return Installation(CONTAINER / "bin" / "tritonserver", None, None)
    spec = find_spec("pytriton")
    if spec is not None and spec.origin is not None:
        package = Path(spec.origin).parent
        home = package / "tritonserver"
        if (home / "bin" / "tritonserver").is_file():
            libraries = package.parent / "nvidia_pytriton.libs"
            return Installation(home / "bin" / "tritonserver", home, libraries)
    raise UserError(
        f"tritonserver is neither on PATH nor in {CONTAINER}, nor in an installed nvidia-pytriton: "
        "pip install -c constraints.txt -e '.[cpu,triton]', or run inside NVIDIA's Triton container"
    )


def write_repository(
    directory: Path,
    names: list[str],
    parameters: Mapping[str, str],
    *,
    num_instances: int = 1,
    gpus: Sequence[int] | None = None,
) -> None:
    """Copy these models to a directory, with these parameters and instances in their ``config.pbtxt``."""
    for name in names:
        shutil.copytree(REPOSITORY / name, directory / name, ignore=shutil.ignore_patterns("__pycache__"))
        text = config_text(name, parameters, num_instances=num_instances, gpus=gpus)
        (directory / name / "config.pbtxt").write_text(text, encoding="utf-8")


def write_backend(directory: Path, home: Path) -> None:
    """Write a backend directory: the Python backend of the wheel, with the stub for this Python's version."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = home / "python_backend_stubs" / version / "triton_python_backend_stub"
    if not stub.is_file():
        raise UserError(f"python: nvidia-pytriton has no backend for Python {version}")
    target = directory / "python"
    target.mkdir(parents=True)
    for file in (*(home / "backends" / "python").iterdir(), stub):
        if file.is_file():
            shutil.copy(file, target / file.name)
    (target / stub.name).chmod(0o755)


def environment(installation: Installation | None) -> dict[str, str]:
    """The server's environment, in which it finds this Python, its packages and this project.

    installation: Triton's; None for a server of our own
    """
    variables = dict(os.environ)
    packages = [str(ROOT), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    variables["PYTHONPATH"] = _joined(dict.fromkeys(packages), variables.get("PYTHONPATH"))
    # The stub takes its prefix from the first python3 on PATH.
    variables["PATH"] = _joined([str(Path(sys.executable).parent)], variables.get("PATH"))
    if installation is not None and installation.libraries is not None:
        libraries = [str(installation.libraries), sysconfig.get_config_var("LIBDIR") or ""]
        variables["LD_LIBRARY_PATH"] = _joined(libraries, variables.get("LD_LIBRARY_PATH"))
    return variables


def server_command(
    installation: Installation | None,
    args: argparse.Namespace,
    rest: list[str],
    directory: Path,
    metrics_port: int,
) -> list[str]:
    """Triton's command, whose backend is written first, or our own worker's.

    metrics_port: of its own metrics, for this machine alone
    """
    models = f"--model-repository={directory / 'models'}"
    if installation is None:
        address = [f"--grpc-address={args.grpc_host}", f"--grpc-port={args.grpc_port}"]
        command = [sys.executable, "-m", "triton_repo.worker", models, *address]
        return [*command, f"--metrics-port={metrics_port}"]
    prefix = shared_memory_prefix(directory)
    command = [str(installation.binary), models, f"--backend-config=python,shm-region-prefix-name={prefix}"]
    if installation.backends is not None:
        write_backend(directory / "backends", installation.backends)
        command.append(f"--backend-directory={directory / 'backends'}")
    return command + server_options(args, rest, metrics_port)


def server_options(args: argparse.Namespace, rest: list[str], metrics_port: int) -> list[str]:
    """tritonserver's options, except those that say where its files are. The user's own come last."""
    options = [
        "--model-control-mode=none",
        "--disable-auto-complete-config",
        f"--exit-timeout-secs={DRAIN_SECONDS}",
        # If one model does not load, the others are still served.
        "--exit-on-error=false",
        # One deeply nested body ends Triton 2.51, so triton_repo.kserve answers HTTP in front of it.
        "--allow-http=false",
        *(f"--grpc-address={args.grpc_host}", f"--grpc-port={args.grpc_port}"),
        *(f"--metrics-address={LOCAL_HOST}", f"--metrics-port={metrics_port}"),
    ]
    option = "--grpc-restricted-protocol"
    if not any(given.startswith(option) for given in rest):
        # These APIs answer only to requests with this random header, which is not published.
        options.append(f"{option}={RESTRICTED}:{secrets.token_hex()}={secrets.token_hex()}")
    return [*options, *rest]


def own_url(host: str, port: int) -> str:
    """The address at which this machine reaches a server that listens on ``host``."""
    host = {"0.0.0.0": LOCAL_HOST, "::": "::1"}.get(host, host)
    return f"{in_address(host)}:{port}"


def in_address(host: str) -> str:
    """A host as addresses have it: one of IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host


def check_rest(
    args: argparse.Namespace, rest: Sequence[str], gpus: Sequence[int] | None, choice: "Choice"
) -> None:
    """Raises RequestError for the first option that the chosen server does not have.

    rest: the options that the launcher does not know. An own one is proposed where it was mistyped.
    """
    own = [f"--{name.replace('_', '-')}" for name in vars(args)]
    if choice.installation is not None:
        _check_known(rest, own, choice.installation)
        return
    if rest:
        option = rest[0].partition("=")[0]
        near = difflib.get_close_matches(option, own, n=1)
        problem = f"is no option of our own server, which runs because {choice.reason}"
        if near:
            problem = f"is no option of the server; did you mean {near[0]}?"
        raise RequestError(problem, field=option)
    hint = f"our own server has one process; start several servers, or take --server {TRITON}"
    if args.num_instances > 1:
        raise RequestError(f"must be 1, got {args.num_instances}: {hint}", field="--num-instances")
    if gpus is not None and len(gpus) > 1:
        raise RequestError(f"must be one GPU, got {','.join(map(str, gpus))}: {hint}", field="--gpus")


def _check_known(rest: Sequence[str], own: Sequence[str], installation: Installation) -> None:
    """Raises RequestError for the first option that is not in the help text of tritonserver."""
    given = [option.partition("=")[0] for option in rest if option.startswith("-")]
    for option in given:
        for beginning, reason in REFUSED.items():
            if option.startswith(beginning) and not difflib.get_close_matches(option, own, 1, 0.9):
                raise RequestError(f"is no option of the server: {reason}", field=option)
    if not given:
        return
    command = [str(installation.binary), "--help"]
    shown = subprocess.run(
        command, env=environment(installation), capture_output=True, text=True, check=False
    )
    known = re.findall(r"^\s*(--[a-z][\w-]*)", shown.stdout + shown.stderr, re.MULTILINE)
    for option in given:
        if known and option not in known:
            near = difflib.get_close_matches(option, [*own, *known], n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            problem = f"neither an option of this command nor of tritonserver{hint}"
            raise RequestError(problem, field=option)


def check_ports(args: argparse.Namespace) -> None:
    """Raises UserError for the first port that is given twice, or that another program listens on."""
    options: dict[int, str] = {}
    for name in PORTS:
        number, option = getattr(args, f"{name}_port"), f"--{name}-port"
        host = args.grpc_host if name == "grpc" else args.host
        if not number:
            continue
        if number in options:
            raise UserError(f"must differ from {options[number]}, got {number} for both", field=option)
        options[number] = option
        try:
            with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
                # As for a server, connections of an earlier server that are still closing are no hindrance.
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind((host, number))
        except OSError as error:
            message = f"cannot listen on {host}:{number}: {error.strerror}"
            raise UserError(message, field=option) from None


def _joined(first: Iterable[str], rest: str | None) -> str:
    return os.pathsep.join([*(path for path in first if path), *([rest] if rest else [])])


TRITON, OWN = "triton", "own"
SERVERS = (AUTO, TRITON, OWN)
# The first version whose known vulnerabilities are fixed (docs/serving.md), and NVIDIA's name of its release.
LEAST_VERSION, LEAST_RELEASE = (2, 59), "25.07"
LEAST = f"{'.'.join(map(str, LEAST_VERSION))} (release {LEAST_RELEASE})"
# NVIDIA's images have the version in this variable, and in this file beside the directory of the binary.
VERSION_VARIABLE, VERSION_FILE = "TRITON_SERVER_VERSION", "TRITON_VERSION"


@dataclass(frozen=True)
class Choice:
    """What runs the models.

    installation: Triton's, or None for our own worker
    reason: why, as a sentence goes on after "because"
    """

    installation: Installation | None
    reason: str

    @property
    def line(self) -> str:
        server = "our own server" if self.installation is None else "Triton"
        return f"{server} runs the models, because {self.reason}"


def choose_server(wanted: str, find: Callable[[], Installation]) -> Choice:
    """The server that is wanted; with AUTO, Triton where one is found that can be trusted.

    find: looks for Triton, and raises UserError if there is none
    """
    if wanted == OWN:
        return Choice(None, f"--server is {OWN}")
    if wanted == TRITON:
        return Choice(find(), f"--server is {TRITON}")
    try:
        installation = find()
    except UserError:
        return Choice(None, "no tritonserver is installed")
    version = version_of(installation)
    if version is None:
        reason = f"the version of {installation.binary} is not known, and Triton is trusted from {LEAST} on"
        return Choice(None, reason)
    if _numbers(version) < LEAST_VERSION:
        reason = f"{installation.binary} is Triton {version}, which is trusted from {LEAST} on"
        return Choice(None, reason)
    return Choice(installation, f"{installation.binary} is Triton {version}")


def version_of(installation: Installation) -> str | None:
    """Triton's version, such as 2.59.0; None where nothing says it, as in the nvidia-pytriton wheel."""
    path = installation.binary.resolve().parent.parent / VERSION_FILE
    found = path.read_text(encoding="utf-8").strip() if path.is_file() else None
    if found is None and installation.backends is None:
        found = os.environ.get(VERSION_VARIABLE)
    return found if found and len(_numbers(found)) > 1 else None


def _numbers(version: str) -> tuple[int, ...]:
    """2.59.0 -> (2, 59); the empty tuple for a text that is no version."""
    major, _, rest = version.partition(".")
    minor = rest.partition(".")[0]
    return (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else ()

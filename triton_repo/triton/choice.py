"""Which server runs the models: a Triton that can be trusted, or a worker of our own."""

import difflib
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from runtime.core.cli import AUTO
from runtime.core.errors import RequestError, UserError
from triton_repo.triton.server import Installation

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


def check_own(rest: Sequence[str], own: Collection[str], choice: Choice) -> None:
    """Raises RequestError for the first option that our own server does not have.

    rest: the options that no parser knew; own: all options of the launcher
    """
    for option in (given.partition("=")[0] for given in rest):
        near = difflib.get_close_matches(option, own, n=1)
        if near:
            hint = f"is no option of the server; did you mean {near[0]}?"
        else:
            hint = f"is no option of our own server, which runs because {choice.reason}"
        raise RequestError(hint, field=option)


def _numbers(version: str) -> tuple[int, ...]:
    """2.59.0 -> (2, 59); the empty tuple for a text that is no version."""
    major, _, rest = version.partition(".")
    minor = rest.partition(".")[0]
    return (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else ()

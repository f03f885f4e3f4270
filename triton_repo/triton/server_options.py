"""tritonserver's own options: what it is told, and checks of what the user adds, before it is started."""

import argparse
import difflib
import re
import secrets
import socket
import subprocess

from runtime.core.errors import RequestError, UserError
from triton_repo.triton.server import Installation, environment

# Running requests get this long to end after SIGTERM.
DRAIN_SECONDS = 30
# APIs that open or write files. Our clients do not use them.
RESTRICTED = "shared-memory,trace,logging"
PORTS = ("http", "grpc", "metrics")


def server_options(args: argparse.Namespace, rest: list[str]) -> list[str]:
    """tritonserver's options, except those that say where its files are. The user's own come last."""
    options = [
        "--model-control-mode=none",
        "--disable-auto-complete-config",
        f"--exit-timeout-secs={DRAIN_SECONDS}",
        # If one model does not load, the others are still served.
        "--exit-on-error=false",
    ]
    for name in PORTS:
        options += [f"--{name}-address={args.host}", f"--{name}-port={getattr(args, f'{name}_port')}"]
    for option in ("--http-restricted-api", "--grpc-restricted-protocol"):
        if not any(given.startswith(option) for given in rest):
            # These APIs answer only to requests with this random header, which is not published.
            options.append(f"{option}={RESTRICTED}:{secrets.token_hex()}={secrets.token_hex()}")
    return [*options, *rest]


def check_known(rest: list[str], own: list[str], installation: Installation) -> None:
    """Raises RequestError for the first option that is not in the help text of tritonserver.

    rest: the options that are passed to tritonserver
    own: the launcher's options, which are proposed too where one of them was mistyped
    """
    given = [option.partition("=")[0] for option in rest if option.startswith("-")]
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
            raise RequestError(f"{option}: neither an option of this command nor of tritonserver{hint}")


def check_ports(args: argparse.Namespace, rest: list[str]) -> None:
    """Raises UserError for the first port that another program listens on."""
    for name in PORTS:
        if any(given.startswith((f"--reuse-{name}-port", f"--allow-{name}")) for given in rest):
            continue
        number = getattr(args, f"{name}_port")
        try:
            with socket.socket(socket.AF_INET6 if ":" in args.host else socket.AF_INET) as listener:
                # As for a server, connections of an earlier server that are still closing are no hindrance.
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind((args.host, number))
        except OSError as error:
            raise UserError(
                f"--{name}-port: cannot listen on {args.host}:{number}: {error.strerror}"
            ) from None

"""A server of one's own, for a benchmark or a test: the launcher in a process, on ports that are free."""

import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from runtime.errors import UserError

READY_SECONDS = 600.0


class ServerProcess:
    """``python -m triton_repo.serve`` with ports of its own.

    Returns from ``__init__`` once every model is ready, or has been found not to load (``is_ready``).
    """

    def __init__(self, bundle: Path, log: Path, *options: str):
        """log: a file for what the server writes. Raises UserError when the server ends instead."""
        self.log = log
        self.http_port, self.grpc_port, self.metrics_port = free_ports(3)
        command = [sys.executable, "-m", "triton_repo.serve", "--bundle", str(bundle.resolve())]
        command += ["--http-port", str(self.http_port), "--grpc-port", str(self.grpc_port)]
        command += ["--metrics-port", str(self.metrics_port), *options]
        with log.open("wb") as stream:
            self.process = subprocess.Popen(
                command, cwd=Path(__file__).resolve().parents[1], stdout=stream, stderr=stream
            )
        end = time.monotonic() + READY_SECONDS
        while not self.is_ready and "did not load" not in self._written():
            if self.process.poll() is not None or time.monotonic() > end:
                self.process.kill()
                raise UserError(f"the server did not start; it wrote:\n{self._written()[-2000:]}")
            time.sleep(0.1)

    @property
    def is_ready(self) -> bool:
        return "\nserving " in self._written()

    @property
    def url(self) -> str:
        """The gRPC address."""
        return f"localhost:{self.grpc_port}"

    def stop(self) -> int:
        """Let running requests end, then the server; its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait()

    def _written(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on at the moment."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]

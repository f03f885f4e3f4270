"""Start a server on free ports in a process, for a benchmark or a test."""

import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from runtime.core.errors import UserError
from triton_repo.triton.server import PORTS, ROOT

READY_SECONDS = 600.0


class ServerProcess:
    """A running ``python -m triton_repo.serve``.

    The constructor returns when every model is ready, or when one has failed to load (``is_ready`` is False).
    """

    def __init__(self, bundle: Path, log: Path, *options: str):
        """log: file for the server's output. Raises UserError if the server ends or is not ready in time."""
        self.log = log
        ports = free_ports(len(PORTS))
        self.http_port, self.grpc_port, self.metrics_port, self.openai_port = ports
        command = [sys.executable, "-m", "triton_repo.serve", "--bundle", str(bundle.resolve())]
        command += [f"--{name}-port={number}" for name, number in zip(PORTS, ports, strict=True)]
        command += options
        with log.open("wb") as output:
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output)
        end = time.monotonic() + READY_SECONDS
        while not self.is_ready and "did not load" not in self._output():
            if self.process.poll() is not None or time.monotonic() > end:
                self.process.kill()
                raise UserError(f"the server did not start; it wrote:\n{self._output()[-2000:]}")
            time.sleep(0.1)

    @property
    def is_ready(self) -> bool:
        return re.search('(^|"message": ")serving ', self._output(), re.MULTILINE) is not None

    @property
    def url(self) -> str:
        """The gRPC address."""
        return f"localhost:{self.grpc_port}"

    def stop(self) -> int:
        """Stop the server after its running requests and return its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait()

    def _output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")


def free_ports(count: int) -> list[int]:
    """Ports on which nobody listens at the moment."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for free in sockets:
            free.bind(("127.0.0.1", 0))
        return [free.getsockname()[1] for free in sockets]

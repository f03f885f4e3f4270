"""The kernels of a step on the host: their source compiled by g++, with the threads of a block as fibers.

It finds wrong results without a GPU. A race shows as a result that depends on the order in which the threads
of a phase and the blocks of a launch run, which the caller chooses. What only a GPU has is not found: its
speed, its rounding of ``exp`` and ``log``, and its limits on registers.
"""

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from export.verify.comparison import Tensors
from export.verify.runner import DevicePasses
from runtime.core.bundle import GraphSpec
from runtime.device.device import Device, DeviceEngine, HostDevice
from runtime.device.kernels.arguments import KERNELS, KernelLaunch
from runtime.device.kernels.driver import SOURCE

HEADER = Path(__file__).with_name("host_cuda.h")
# Without contraction a sum of products is rounded as NVRTC's code rounds it with --fmad=false.
FLAGS = ("-O2", "-std=c++17", "-ffp-contract=off", "-shared", "-fPIC", "-x", "c++", "-include", str(HEADER))
FAULTS = {1: "some of its threads end while others wait for them", 2: "it writes behind its shared memory"}
# Orders of threads and blocks; every other number is a random order.
ASCENDING, DESCENDING = 0, 1


def compiler() -> str | None:
    """The C++ compiler, if there is one."""
    return shutil.which("g++")


class KernelFault(AssertionError):
    """A mistake of a kernel or of its launch."""


class HostKernels:
    """Runs launches at once, on memory of the host. One thread at a time may use it.

    source: the file to compile, by default that of all kernels
    """

    def __init__(self, source: Path = SOURCE):
        self.max_shared_bytes = 99 * 1024  # of the GPUs with the least: compute capability 8.6, 8.9 and 12.0
        # ASCENDING, DESCENDING or the seed of a random order; every launch begins with it anew.
        self.order = ASCENDING
        with tempfile.TemporaryDirectory() as directory:
            library = Path(directory) / "kernels.so"
            command = ["g++", *FLAGS, str(source), "-o", str(library)]
            subprocess.run(command, check=True, capture_output=True, text=True)
            # The file may go once it is loaded.
            self._library = ctypes.CDLL(str(library))
        for name, arguments in KERNELS.items():
            size = getattr(self._library, f"size_of_{name}")()
            if size != ctypes.sizeof(arguments):
                raise KernelFault(f"{name}: takes {size} bytes, got {ctypes.sizeof(arguments)}")

    def launch(self, launch: KernelLaunch) -> None:
        fault = getattr(self._library, launch.kernel)(
            ctypes.byref(launch.arguments),
            (ctypes.c_int * 3)(*launch.grid),
            launch.threads,
            launch.shared_bytes,
            ctypes.c_ulonglong(self.order),
        )
        if fault:
            raise KernelFault(f"{launch.kernel}: {FAULTS[fault]}")


def run_on_host(engine: Callable[[Device], DeviceEngine], contract: GraphSpec, inputs: Tensors) -> Tensors:
    """The outputs of one pass of an engine whose memory is the host's.

    engine: makes it on the device
    inputs: of the whole batch, by name; caches are not changed, and come out as ``present_*``
    """
    device = HostDevice()
    return DevicePasses(device, engine(device), contract)(inputs)

"""The compiled kernels: one file for each compute capability, and one that a driver compiles for others."""

import gzip
import re
from pathlib import Path

# All kernels as one source, and where the compiled files are.
SOURCE = Path(__file__).with_name("source") / "step.cu"
IMAGES = Path(__file__).with_name("images")
# Compute capabilities that have machine code, and the least one that the intermediate code is for.
CAPABILITIES = ("80", "86", "89", "90", "100", "120")
LEAST_CAPABILITY = "75"


def image_name(capability: str) -> str:
    """The file for GPUs of a capability such as ``sm89``.

    Machine code runs on GPUs of the same major number and the same or a larger minor number. Where there is
    none, the driver compiles the intermediate code, which needs a driver of CUDA 12.9 or later.
    """
    found = re.fullmatch(r"sm(\d+)(\d)", capability)
    assert found
    major, minor = int(found[1]), int(found[2])
    fitting = [each for each in CAPABILITIES if int(each[:-1]) == major and int(each[-1]) <= minor]
    return f"step.sm_{fitting[-1]}.cubin.gz" if fitting else f"step.compute_{LEAST_CAPABILITY}.ptx.gz"


def read_image(capability: str) -> bytes:
    """The compiled kernels for a GPU of this capability."""
    return gzip.decompress((IMAGES / image_name(capability)).read_bytes())

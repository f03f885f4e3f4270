"""Compiles the kernels of a step with NVRTC, which needs no GPU.

    python -m export.step.compile_kernels
    python -m export.step.compile_kernels --check

The files are part of the package, so that nobody who runs them needs a compiler. ``--check`` compiles again
and compares instead of writing. The same version of NVRTC writes the same bytes; the extra ``dev`` pins it.
"""

import gzip
import importlib
from collections.abc import Sequence
from typing import Any

from export.errors import ExportError
from runtime.core.cli import Parser, exit_status
from runtime.device.kernels.driver import CAPABILITIES, IMAGES, LEAST_CAPABILITY, SOURCE, image_name

# Contraction would round sums of products otherwise than the host's compiler does in the tests.
FLAGS = ("--std=c++17", "--fmad=false", f"--include-path={SOURCE.parent}")


def main(argv: list[str] | None = None) -> int:
    """Command line; 1 if a file differs, 2 for input that cannot be used."""
    parser = Parser("compile-kernels", "export.step.compile_kernels", __doc__)
    parser.add_argument("--check", action="store_true", help="compare with the files, and write nothing")

    def run() -> int:
        return check() if parser.parse_args(argv).check else write()

    return exit_status("compile-kernels", run)


def write() -> int:
    """Write all files."""
    IMAGES.mkdir(exist_ok=True)
    for name, content in compiled().items():
        # Without a time of writing, so that the same content is the same file.
        (IMAGES / name).write_bytes(gzip.compress(content, mtime=0))
        print(f"{name}: {len(content)} bytes")
    return 0


def check() -> int:
    """Compare all files with what their source becomes."""
    differing = [
        name
        for name, content in compiled().items()
        if not (IMAGES / name).exists() or gzip.decompress((IMAGES / name).read_bytes()) != content
    ]
    for name in differing:
        print(f"{name}: is not what {SOURCE.name} becomes; python -m export.step.compile_kernels writes it")
    return int(bool(differing))


def compiled(capabilities: Sequence[str] = (*CAPABILITIES, LEAST_CAPABILITY)) -> dict[str, bytes]:
    """The content of the files for these capabilities, by the files' names.

    Raises ExportError without NVRTC or for a wrong source.
    """
    nvrtc = load_nvrtc()
    kinds = {each: "sm" if each in CAPABILITIES else "compute" for each in capabilities}
    return {image_name(f"sm{each}"): _compile(nvrtc, f"{kind}_{each}") for each, kind in kinds.items()}


def load_nvrtc() -> Any:
    """NVRTC's bindings. Raises ExportError where these or the library are missing."""
    try:
        nvrtc = importlib.import_module("cuda.bindings.nvrtc")
        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        raise ExportError(
            f"NVRTC is not installed ({error}); pip install -c constraints.txt -e '.[dev]' brings it"
        ) from error
    return nvrtc


def _compile(nvrtc: Any, architecture: str) -> bytes:
    """sm_*: machine code; compute_*: code that a driver compiles"""
    error, program = nvrtc.nvrtcCreateProgram(SOURCE.read_bytes(), SOURCE.name.encode(), 0, [], [])
    flags = [flag.encode() for flag in (f"--gpu-architecture={architecture}", *FLAGS)]
    (error,) = nvrtc.nvrtcCompileProgram(program, len(flags), flags)
    try:
        if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = _content(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
            raise ExportError(f"{SOURCE.name} for {architecture}: {log.decode()}")
        if architecture.startswith("sm_"):
            return _content(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
        return _content(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _content(get_size: Any, get: Any, program: Any) -> bytes:
    content = b" " * get_size(program)[1]
    get(program, content)
    return content


if __name__ == "__main__":
    raise SystemExit(main())

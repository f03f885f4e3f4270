"""Errors that the CUDA runtime returns, as exceptions."""

from typing import Any

from runtime.core.errors import DeviceError, DeviceMemoryError


def describe_error(cudart: Any, error: Any) -> str:
    """What the driver calls an error."""
    text = cudart.cudaGetErrorString(error)[1]
    return text.decode() if isinstance(text, bytes) else str(text)


def check_result(cudart: Any, function: str, error: Any) -> None:
    """Raises DeviceError if a function returned an error."""
    if error != cudart.cudaError_t.cudaSuccess:
        raise DeviceError(f"{function}: {describe_error(cudart, error)}")


def memory_error(function: str, reason: str, size: int, free: str) -> DeviceMemoryError:
    """What to raise where ``size`` bytes cannot be had. ``free`` says what is free on the GPU."""
    if function == "cudaHostAlloc":
        return DeviceMemoryError(
            f"{function}: {reason}: {size} bytes of the host's memory wanted, for the GPU to read and write; "
            "smaller max_num_seqs or max_nodes need less, and a limit of locked memory (ulimit -l) may be low"
        )
    return DeviceMemoryError(
        f"{function}: {reason}: {size} bytes wanted, {free}; smaller max_length, max_num_seqs or max_nodes "
        "need less"
    )

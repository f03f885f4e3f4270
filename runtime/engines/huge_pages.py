"""Memory in huge pages, for weights and caches that every pass reads from beginning to end.

A processor looks up the address of every page, and reads ahead only within one. Pages of 2 MiB in place of
4 KiB make a pass over all weights faster. Linux gives them to programs that ask for them, and ONNX Runtime
does not ask. So they are asked for afterwards, for the memory that came while a session was made. Where the
system has none, or its administrator wants none, nothing changes.
"""

import ctypes
import logging
import mmap
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

LOGGER = logging.getLogger(__name__)
SIZE = 2 * 1024 * 1024
# Of <asm-generic/mman-common.h>. Collapsing, which Linux has from 6.1 on, moves what is in small pages now;
# before, the kernel does so by and by for memory that it was advised about.
MADV_HUGEPAGE, MADV_COLLAPSE = 14, 25
MAPS = Path("/proc/self/maps")
# Collapsing would not obey this by itself.
ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@contextmanager
def huge_pages() -> Iterator[None]:
    """Move the memory that is mapped within the block, and still is at its end, to huge pages."""
    before = set(_places())
    yield
    if not _are_allowed():
        return
    places = [place for place in _places() if place not in before]
    if not places:
        return
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    moved = 0
    for place in places:
        if madvise(place, SIZE, MADV_HUGEPAGE):
            break  # a kernel without huge pages
        moved += madvise(place, SIZE, MADV_COLLAPSE) == 0
    LOGGER.debug("%d of %d MiB are in huge pages", 2 * moved, 2 * len(places))


def huge_zeros(size: int) -> NDArray[np.uint8]:
    """Zeros [size], in huge pages from the first write on where the system has any. Raises MemoryError."""
    if not size or not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.zeros(size, np.uint8)
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"the system has no memory for {size} bytes") from error
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def _are_allowed() -> bool:
    try:
        return "[never]" not in ENABLED.read_text(encoding="utf-8")
    except OSError:
        return False


def _places() -> list[int]:
    """The addresses of the huge pages that this process's private memory could have."""
    try:
        lines = MAPS.read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return []
    places: list[int] = []
    for line in lines:
        addresses, permissions, _, _, inode, *name = line.split(maxsplit=5)
        is_stack = bool(name) and name[0].startswith("[stack")
        if permissions != "rw-p" or inode != "0" or is_stack:
            continue
        start, end = (int(address, 16) for address in addresses.split("-"))
        places.extend(range(-(-start // SIZE) * SIZE, end // SIZE * SIZE, SIZE))
    return places

"""Memory that comes within the block is moved to huge pages, unchanged; other memory is left alone. Zeros."""

import mmap
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.engines import huge_pages

SIZE = 8 * huge_pages.SIZE


def filled() -> tuple[mmap.mmap, bytes]:
    """Private memory with random content, in small pages."""
    content = np.random.default_rng(0).bytes(SIZE)
    memory = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(content)
    return memory, content


def num_huge(memory: Any) -> int:
    """The bytes of the mapping that are in huge pages, by the kernel's own account."""
    address = np.frombuffer(memory, np.uint8).ctypes.data
    found = 0
    for block in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        start, end = (int(each, 16) for each in block.split(" ", 1)[0].split("-"))
        if start < address + SIZE and end > address:
            match = re.search(r"AnonHugePages:\s+(\d+) kB", block)
            found += 1024 * int(match[1]) if match else 0
    return found


@pytest.mark.skipif(not huge_pages._are_allowed(), reason="this kernel gives no huge pages")
def test_new_memory_is_moved_and_keeps_its_content() -> None:
    with huge_pages.huge_pages():
        memory, content = filled()
        before = num_huge(memory)
    assert num_huge(memory) >= max(before, SIZE // 2)
    assert memory[:] == content


def test_an_administrator_may_want_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    enabled = tmp_path / "enabled"
    enabled.write_text("always madvise [never]\n")
    monkeypatch.setattr(huge_pages, "ENABLED", enabled)
    with huge_pages.huge_pages():
        memory, _ = filled()
        before = num_huge(memory)
    assert num_huge(memory) == before


def test_a_system_without_a_map_of_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huge_pages, "MAPS", tmp_path / "missing")
    with huge_pages.huge_pages():
        memory, content = filled()
    assert memory[:] == content


@pytest.mark.skipif(not huge_pages._are_allowed(), reason="this kernel gives no huge pages")
def test_zeros_are_in_huge_pages_from_the_first_write() -> None:
    zeros = huge_pages.huge_zeros(SIZE)
    assert not zeros.any()
    zeros[:] = 1
    assert num_huge(zeros) >= SIZE // 2


def test_zeros_that_do_not_fit_into_memory() -> None:
    with pytest.raises(MemoryError, match="the system has no memory for 1000000000000000000 bytes"):
        huge_pages.huge_zeros(10**18)
    assert huge_pages.huge_zeros(0).size == 0

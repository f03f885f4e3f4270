"""Shared by all parts of one run: the device with its properties, the prompts, the limits."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from benchmarks.arguments import all_prompts
from benchmarks.gpu.decoders import Decoders, Limits, Skip
from runtime.core.bundle import DRAFT, PLAIN, Bundle
from runtime.core.errors import UserError
from runtime.core.prompts import Prompt
from runtime.device import cuda
from runtime.device.device import CPU
from runtime.text import PromptTokenizer

# New tokens of the sequences whose steps are timed, before they begin again, so that contexts stay alike.
WINDOW = 128
# Tokens of the context of which steps are timed, if nothing else is said.
USUAL_CONTEXT = 512
TIME_IS_OVER = "the time for the whole run was over; --minutes gives more"
# Without --prompts. The answers are long enough to measure, and of different kinds.
DEFAULT_PROMPTS = (
    "Explain how a refrigerator keeps food cold.",
    "A train travels 180 km in 2.5 hours. What is its average speed? Show every step.",
    "Write a Python function that returns the prime numbers below n, and explain it.",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "What are the causes of the seasons on Earth?",
    "List ten tips for a first-time gardener.",
    "Summarise the plot of Romeo and Juliet in five sentences.",
    "Compare TCP and UDP, and say when to use which.",
)


@dataclass(frozen=True)
class DeviceFacts:
    """Properties of a device, as far as the driver reports them.

    bandwidth: most bytes a second between the device and its memory; None if it is unknown
    bandwidth_source: the driver or the flag
    """

    name: str
    is_gpu: bool
    capability: str | None = None
    memory_bytes: int | None = None
    driver: int | None = None
    bandwidth: float | None = None
    bandwidth_source: str = "unknown"


def device_facts(device: str, bandwidth_gb: float | None) -> DeviceFacts:
    """Ask the driver; ``bandwidth_gb`` (GB/s) replaces what its clock and bus width give."""
    given = {"bandwidth": 1e9 * bandwidth_gb, "bandwidth_source": "--bandwidth"} if bandwidth_gb else {}
    cudart = None if device == CPU else cuda.load_cudart()
    if cudart is None:
        return DeviceFacts(device, is_gpu=device != CPU, **given)  # type: ignore[arg-type]
    index = cuda.check_device_name(device)
    properties = _ask(cudart, "cudaGetDeviceProperties", index)
    name = getattr(properties, "name", device)
    found: dict[str, Any] = {
        "capability": cuda.capability_of_gpu(cudart, index),
        "memory_bytes": getattr(properties, "totalGlobalMem", None),
        "driver": _ask(cudart, "cudaDriverGetVersion"),
    }
    clock = _attribute(cudart, "cudaDevAttrMemoryClockRate", index)
    width = _attribute(cudart, "cudaDevAttrGlobalMemoryBusWidth", index)
    if clock and width:
        # Memory of GPUs moves data twice in a cycle; the clock is in kHz, the width in bits.
        found["bandwidth"] = 2 * 1e3 * clock * width / 8
        found["bandwidth_source"] = f"the driver: {clock / 1e3:g} MHz, {width} bits, twice a cycle"
    name = name.decode() if isinstance(name, bytes) else str(name)
    return DeviceFacts(name, is_gpu=True, **{**found, **given})


def _attribute(cudart: Any, name: str, index: int) -> int | None:
    attribute = getattr(cudart.cudaDeviceAttr, name, None)
    return None if attribute is None else _ask(cudart, "cudaDeviceGetAttribute", attribute, index)


def _ask(cudart: Any, function: str, *arguments: Any) -> Any:
    """Call a function of the driver; None if these bindings lack it or if it fails."""
    call = getattr(cudart, function, None)
    if call is None:
        return None
    error, *values = call(*arguments)
    return values[0] if error == cudart.cudaError_t.cudaSuccess else None


def encoded_prompts(bundle: Bundle, paths: Sequence[Path], limit: int | None) -> list[list[int]]:
    """The token ids of the files' prompts, or of ``DEFAULT_PROMPTS``; the first ``limit`` of every file."""
    found = all_prompts(paths, limit) or [Prompt(text) for text in DEFAULT_PROMPTS[:limit]]
    tokenizer = PromptTokenizer(bundle)
    encoded = [tokenizer.encode_prompt(prompt) for prompt in found]
    if not all(encoded):
        raise UserError("--prompts: a prompt has no tokens")
    return encoded


def contexts(prompts: Sequence[Sequence[int]], length: int, count: int) -> list[list[int]]:
    """``count`` prompts of ``length`` tokens each: all prompts, one after the other, from another one on."""
    tokens = []
    for first in range(count):
        start = first % len(prompts)
        endless = cycle([*prompts[start:], *prompts[:start]])
        tokens.append(list(islice((token for prompt in endless for token in prompt), length)))
    return tokens


@dataclass
class Job:
    """One run of ``benchmarks.gpu``.

    prompts: token ids; limits: of one measurement

    max_new_tokens: of a prompt that is decoded as a whole
    deadline: of ``time.monotonic``, after which nothing more is begun
    num_nodes: draft nodes of the measurements that have one size; the fastest once it is known
    """

    bundle: Bundle
    decoders: Decoders
    facts: DeviceFacts
    prompts: Sequence[Sequence[int]]
    limits: Limits
    max_new_tokens: int
    deadline: float
    batches: list[int]
    contexts: list[int]
    num_nodes: int
    reference: Path | None = None
    peer_model: Path | None = None

    @property
    def has_head(self) -> bool:
        return self.sizes[-1] > 0

    @property
    def sizes(self) -> tuple[int, ...]:
        """Draft nodes of the trees that the bundle has graphs for; 0 is a step without drafts."""
        return self.bundle.manifest.step_nodes

    @property
    def settings(self) -> list[tuple[str, str, int]]:
        """Name, method and draft nodes of every kind of step: plain decoding, then all trees."""
        trees = [(f"{size} nodes", DRAFT, size) for size in self.sizes if size]
        return [(PLAIN, PLAIN, 0), *trees]

    @property
    def is_over(self) -> bool:
        """Whether the time for the whole run is over."""
        return time.monotonic() > self.deadline

    def check_time(self) -> None:
        """Raises Skip once the time for the whole run is over."""
        if self.is_over:
            raise Skip(TIME_IS_OVER)

    def usual_context(self) -> list[int]:
        """A prompt, so long that a window of new tokens fits behind it."""
        most = min(self.decoders.max_length, USUAL_CONTEXT)
        return contexts(self.prompts, max(1, most - self.window), 1)[0]

    @property
    def window(self) -> int:
        return min(WINDOW, self.decoders.max_length // 2)

"""What the decode loop needs of an engine, whatever runs the graph.

An engine owns one graph and its KV cache. A *step* is a set of static buffers for one shape of
inputs: the caller fills all ``inputs``, calls ``run`` and reads ``outputs``, so that a target which
replays captured device graphs has the same surface as one that does not. Steps may share memory: what
one has put out is there until another step of the engine is filled.
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from runtime.engines.kv_cache import KVCache


class Step(Protocol):
    """Buffers of one input shape. ``outputs`` are written in place by every run."""

    inputs: dict[str, NDArray[np.generic]]
    outputs: dict[str, NDArray[np.generic]]

    def run(self) -> None: ...


class Engine(Protocol):
    """One graph with its KV cache."""

    kv: KVCache

    def step(self, also: tuple[str, ...] = (), /, *, row: int = 0, **axes: int) -> Step:
        """The buffers for the given symbolic axes, such as ``B=1, N=17, M=17``.

        also: outputs to bring to the host beside those the engine always brings
        row: the first of the cache's B sequences that the step works on
        """
        ...

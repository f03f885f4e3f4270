"""What the host tells a device of every slot before a step."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.device.device import Device
from runtime.device.program import BlockPool, PackedArrays
from runtime.device.step_buffers import StepBuffers

# A plain step needs the first two, and only EAGLE the last.
TOLD = ("lengths", "anchor_ids", "counts", "path_tokens")


class SlotState:
    """Lengths, last tokens and the last step's tokens of all slots, which one upload brings to the device.

    The host knows them, since it reads every step's tokens. A slot without a sequence is idle: the upload
    sets it anew in every step, so that it neither grows nor needs work of its own.

    buffers: its arrays of these names are replaced, so it must not have been used before
    idle_length: the length of an idle slot
    """

    def __init__(self, device: Device, buffers: StepBuffers, *, idle_length: int):
        wanted = {name: buffers.arrays[name] for name in TOLD if name in buffers.arrays}
        packed = PackedArrays(device, BlockPool(device), "state", wanted)
        buffers.arrays.update(packed.on_device)
        # Heads that draft level by level have a further axis, of one element.
        flat = {name: values.reshape(values.shape[0], -1) for name, values in packed.on_host.items()}
        self._values: tuple[NDArray[Any], ...] = tuple(flat.values())
        self._lengths, self._anchors = flat["lengths"][:, 0], flat["anchor_ids"][:, 0]
        self._counts = flat["counts"][:, 0] if "counts" in flat else np.empty_like(self._lengths)
        self._path = flat.get("path_tokens")
        self._rows = np.arange(self._lengths.size)
        self._idle_length = idle_length
        self.upload = packed.upload

    def enter(self, slot: int, length: int, token: int) -> None:
        """A sequence of this length decodes in a slot from now on; ``token`` is its last."""
        self._lengths[slot], self._anchors[slot], self._counts[slot] = length, token, 1
        if self._path is not None:
            self._path[slot] = 0
            self._path[slot, 0] = token

    def advance(self, tokens: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        """A step added the first ``counts[b]`` of ``tokens`` [B, W] to the sequence in slot b."""
        count = counts.size
        self._lengths[:count] += counts
        self._anchors[:count] = tokens[self._rows[:count], counts - 1]
        self._counts[:count] = counts
        if self._path is not None:
            self._path[:count] = 0
            self._path[:count, : tokens.shape[1]] = tokens

    def leave_idle(self, first: int) -> None:
        """No sequence decodes in the slots from ``first`` on in the next step."""
        if first == self._rows.size:
            return
        self._lengths[first:] = self._idle_length
        self._anchors[first:] = 0
        self._counts[first:] = 1
        if self._path is not None:
            self._path[first:] = 0

    def move(self, source: int, target: int) -> None:
        for values in self._values:
            values[target] = values[source]

"""What the host tells a device of every slot before a step."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.decoding.program import BlockPool, PackedArrays
from runtime.decoding.step_buffers import StepBuffers
from runtime.engines.device import Device

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
        self._values: dict[str, NDArray[Any]] = packed.on_host
        self._idle_length = idle_length
        self.upload = packed.upload

    def enter(self, slot: int, length: int, token: int) -> None:
        """A sequence of this length decodes in a slot from now on; ``token`` is its last."""
        self._set(slice(slot, slot + 1), np.array([length]), np.array([[token]]), np.array([1]))

    def advance(self, tokens: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        """A step added the first ``counts[b]`` of ``tokens`` [B, W] to the sequence in slot b."""
        count = counts.size
        self._set(slice(0, count), self._values["lengths"][:count] + counts, tokens, counts)

    def leave_idle(self, first: int) -> None:
        """No sequence decodes in the slots from ``first`` on in the next step."""
        idle = slice(first, None)
        for name, values in self._values.items():
            values[idle] = {"lengths": self._idle_length, "counts": 1}.get(name, 0)

    def move(self, source: int, target: int) -> None:
        for values in self._values.values():
            values[target] = values[source]

    def _set(self, slots: slice, lengths: Any, tokens: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        found = {"lengths": lengths, "counts": counts}
        found["anchor_ids"] = np.take_along_axis(tokens, counts[:, None] - 1, 1)
        for name, values in found.items():
            if name in self._values:
                # Heads that draft level by level have a further axis, of one element.
                rows = self._values[name][slots]
                rows[...] = values.reshape(rows.shape)
        if "path_tokens" in self._values:
            path = self._values["path_tokens"][slots]
            path[:] = 0
            path[:, : tokens.shape[1]] = tokens

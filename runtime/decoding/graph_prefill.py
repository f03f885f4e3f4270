"""A prompt on a device: the passes of target model and head over its parts."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.decoding.step_buffers import StepBuffers
from runtime.decoding.step_plan import StepPlan
from runtime.engines.device import Device, DeviceArray, DeviceEngine, write_array
from runtime.engines.masks import fill_causal_mask, fill_frame_mask


class GraphPrefill:
    """Reads prompts into slots, one part after another.

    engines: ``backbone`` and, with a head, ``drafter``
    """

    def __init__(
        self, device: Device, engines: Mapping[str, DeviceEngine], buffers: StepBuffers, plan: StepPlan
    ):
        self._device = device
        self._engines = engines
        self._buffers = buffers
        self._plan = plan
        # Host arrays of ``_fetch`` by shape and type: the device keeps what it hands out until it is closed.
        self._fetched: dict[tuple[tuple[int, ...], str], NDArray[Any]] = {}

    def read(self, slot: int, prompt: NDArray[np.int64], start: int, end: int) -> None:
        """Read the tokens from ``start`` to ``end`` of a prompt [L]; the work is on the stream afterwards."""
        is_last = end == prompt.size
        self._read(slot, prompt[start:end], start)
        if self._plan.head:
            # The step that follows reads the last token's features, as it reads those of a step before it.
            self._read_context(slot, prompt, start, end - is_last)
            if is_last:
                self._keep_features(slot, end - start - 1)

    def choices(self, *, logits: bool) -> tuple[NDArray[np.int64], NDArray[np.float32] | None]:
        """The target model's next token [1] after what was read last and, if wanted, its logits [1, V]."""
        tokens = self._fetch(self._buffers.arrays["next_tokens"].view((1, 1)))
        if not logits:
            return tokens[0], None
        array = self._buffers.arrays["logits"]
        return tokens[0], self._fetch(array.view((1, 1, array.shape[-1])))[0]

    def _read(self, slot: int, tokens: NDArray[np.int64], start: int) -> None:
        """The target model's pass over a part of a prompt."""
        count = tokens.size
        arrays = self._buffers.of_pass(self._plan.prompt_passes(count)[0], 1, slot=slot)
        mask = np.empty(arrays["attn_mask"].shape, np.bool_)
        fill_causal_mask(mask[0, 0], start)
        for name, values in (
            ("input_ids", tokens),
            ("position_ids", np.arange(start, start + count)),
            ("attn_mask", mask),
            ("write_index", np.array([start])),
            ("logit_indices", np.array([count - 1])),
        ):
            write_array(self._device, arrays[name], values)
        self._engines["backbone"].run(arrays)

    def _read_context(self, slot: int, prompt: NDArray[np.int64], start: int, end: int) -> None:
        """The head's pass over the features of these tokens; what it drafts is not used."""
        head = self._plan.head
        if head is None or not head.has_cache or start == end:
            return
        arrays = self._buffers.of_pass(head.read(end - start), 1, slot=slot)
        following = prompt[start + 1 : end + 1]
        mask = np.empty(arrays["attn_mask"].shape, np.bool_)
        fill_frame_mask(mask[0, 0], end, end)
        # Every head has some of these inputs.
        for name, values in {
            "context_position_ids": np.arange(start, end),
            "context_token_ids": following,
            "frame_position_ids": np.array([end]),
            "query_indices": np.array([end - start - 1]),
            "path_ids_0": following[-1:],
            "attn_mask": mask,
            "write_index": np.array([start]),
        }.items():
            if name in arrays:
                write_array(self._device, arrays[name], values)
        self._engines["drafter"].run(arrays)

    def _keep_features(self, slot: int, index: int) -> None:
        """Make the features of the pass's input ``index`` those of the path that the next step reads."""
        features, path = self._buffers.arrays["features"], self._buffers.arrays["path_features"]
        rows = features.view((features.shape[0] * features.shape[1], features.shape[2]))
        self._device.copy(rows.rows(index, index + 1), path.rows(slot, slot + 1))

    def _fetch(self, array: DeviceArray) -> NDArray[Any]:
        key = array.shape, array.dtype
        if key not in self._fetched:
            self._fetched[key] = self._device.host_array(*key)
        values = self._fetched[key]
        self._device.download(array, values)
        self._device.synchronize()
        return values.copy()

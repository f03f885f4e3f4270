"""A prompt on a device: the passes of target model and head over its parts."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.device.device import BlockPool, Device, DeviceArray, DeviceEngine, PackedArrays
from runtime.device.plan import GraphPass, StepBuffers, StepPlan
from runtime.engines.kv_cache import fill_causal_mask, fill_frame_mask

# The inputs of passes over prompts, but for the mask.
INPUTS = (
    *("input_ids", "position_ids", "write_index", "logit_indices", "context_position_ids"),
    *("context_token_ids", "frame_position_ids", "query_indices", "path_ids_0"),
)


class GraphPrefill:
    """Reads prompts into slots, one part after another.

    A pass gets its mask by one copy and all other inputs by another, from host memory that only the passes
    over prompts use. So the passes of one part need no wait between them, and the caller has to synchronize
    before it reads the next part.

    engines: ``backbone`` and, with a head, ``drafter``
    """

    def __init__(
        self, device: Device, engines: Mapping[str, DeviceEngine], buffers: StepBuffers, plan: StepPlan
    ):
        self._device = device
        self._engines = engines
        self._buffers = buffers
        self._plan = plan
        self._blocks = BlockPool(device)
        # By purpose. The device keeps its host arrays until it is closed, so they are used again.
        self._pinned: dict[str, NDArray[Any]] = {}

    def prepare(self, num_tokens: int) -> None:
        """Allocate the memory for parts of at most so many tokens."""
        for each in self._plan.prompt_passes(num_tokens):
            arrays = self._buffers.of_pass(each, 1)
            self._packed(each.graph, {name: arrays[name] for name in INPUTS if name in arrays})
            # A head without a cache reads no prompts.
            if "attn_mask" in arrays:
                self._host_array(f"mask of {each.graph}", arrays["attn_mask"])

    def read(self, slot: int, prompt: NDArray[np.int64], start: int, end: int) -> None:
        """Put the passes over the tokens from ``start`` to ``end`` of a prompt [L] on the stream."""
        is_last = end == prompt.size
        self._read(slot, prompt[start:end], start)
        if self._plan.head:
            # The first step reads the last token's features, as later ones read those of the step before.
            self._read_context(slot, prompt, start, end - is_last)
            if is_last:
                self._keep_features(slot, end - start - 1)

    def choices(self, *, logits: bool) -> tuple[NDArray[np.int64], NDArray[np.float32] | None]:
        """The target model's next token [1] after the part read last and, if asked for, its logits [1, V]."""
        arrays = {"next_tokens": self._buffers.shared("next_tokens").view((1, 1))}
        if logits:
            array = self._buffers.shared("logits")
            arrays["logits"] = array.view((1, 1, array.shape[-1]))
        found = {name: self._host_array(name, array) for name, array in arrays.items()}
        for name, array in arrays.items():
            self._device.download(array, found[name])
        self._device.synchronize()
        return found["next_tokens"][0].copy(), found["logits"][0].copy() if logits else None

    def _read(self, slot: int, tokens: NDArray[np.int64], start: int) -> None:
        """The target model's pass over a part of a prompt."""
        count = tokens.size
        values = {
            "input_ids": tokens,
            "position_ids": np.arange(start, start + count),
            "write_index": np.array([start]),
            "logit_indices": np.array([count - 1]),
        }
        graph_pass = self._plan.prompt_passes(count)[0]
        self._run(graph_pass, slot, start + count, values, lambda mask: fill_causal_mask(mask, start))

    def _read_context(self, slot: int, prompt: NDArray[np.int64], start: int, end: int) -> None:
        """The head's pass over the features of these tokens; its drafts are not used."""
        head = self._plan.head
        if head is None or not self._plan.head_has_cache or start == end:
            return
        following = prompt[start + 1 : end + 1]
        # Every head has some of these inputs.
        values = {
            "context_position_ids": np.arange(start, end),
            "context_token_ids": following,
            "frame_position_ids": np.array([end]),
            "query_indices": np.array([end - start - 1]),
            "path_ids_0": following[-1:],
            "write_index": np.array([start]),
        }
        self._run(head.read(end - start), slot, end, values, lambda mask: fill_frame_mask(mask, end, end))

    def _run(
        self,
        graph_pass: GraphPass,
        slot: int,
        end: int,
        values: Mapping[str, NDArray[np.int64]],
        fill_mask: Callable[[NDArray[np.bool_]], None],
    ) -> None:
        """Put a pass with these inputs on the stream; inputs that its graph does not have are left out.

        end: tokens of the prompt that have been read after the pass
        """
        length = self._plan.length_for(end)
        arrays = self._buffers.of_pass(graph_pass, 1, slot=slot, length=length)
        packed = self._packed(graph_pass.graph, {name: arrays[name] for name in values if name in arrays})
        for name, array in packed.on_host.items():
            array[...] = values[name].reshape(array.shape)
        packed.upload()
        mask = self._host_array(f"mask of {graph_pass.graph}", arrays["attn_mask"])
        fill_mask(mask[0, 0])
        self._device.upload(mask, arrays["attn_mask"])
        self._engines[graph_pass.graph].run({**arrays, **packed.on_device})

    def _keep_features(self, slot: int, index: int) -> None:
        """Copy the features of the pass's input ``index`` to where the next step reads them."""
        features, path = self._buffers.shared("features"), self._buffers.shared("path_features")
        rows = features.view((features.shape[0] * features.shape[1], features.shape[2]))
        self._device.copy(rows.rows(index, index + 1), path.rows(slot, slot + 1))

    def _packed(self, graph: str, arrays: Mapping[str, DeviceArray]) -> PackedArrays:
        return PackedArrays(self._device, self._blocks, graph, arrays)

    def _host_array(self, purpose: str, array: DeviceArray) -> NDArray[Any]:
        """A host array in the shape of a device array; calls of the same purpose share its memory."""
        count = math.prod(array.shape)
        if purpose not in self._pinned or self._pinned[purpose].size < count:
            self._pinned[purpose] = self._device.host_array((count,), array.dtype)
        return self._pinned[purpose][:count].reshape(array.shape)

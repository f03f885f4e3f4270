"""A prompt on a device: the passes of target model and head over its parts."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.device.device import BlockPool, Device, DeviceArray, DeviceEngine, PackedArrays
from runtime.device.plan import GraphPass, StepPlan
from runtime.device.program import StepBuffers
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
    sizes: tokens of a pass, ascending to the longest part; shorter parts are padded. Without sizes a pass has
        as many tokens as are read
    Padding repeats the last token. Its keys lie behind the text, where no token sees them, until others are
    written there.
    """

    def __init__(
        self,
        device: Device,
        engines: Mapping[str, DeviceEngine],
        buffers: StepBuffers,
        plan: StepPlan,
        *,
        sizes: Sequence[int] = (),
    ):
        self._device = device
        self._engines = engines
        self._buffers = buffers
        self._plan = plan
        # Positions of the caches up to which a pass may write. The head writes a frame behind its context.
        self._last = plan.capacity
        if plan.head_has_cache:
            self._last = min(self._last, plan.head_capacity - 1)
        # Engines of older bundles have no room for padding.
        has_room = bool(sizes) and plan.max_length + sizes[0] <= self._last
        self._sizes = tuple(sizes) if has_room else ()
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

    def run_all_sizes(self) -> None:
        """Run passes of all sizes over the first slot, which is free: requests bring no new shapes then."""
        for length in self._plan.lengths:
            for size in self._sizes:
                if size <= length or length == self._plan.max_length:
                    self._read_part(0, np.zeros(size + 1, np.int64), 0, size, length)
                    self._device.synchronize()

    def read(self, slot: int, prompt: NDArray[np.int64], start: int, end: int) -> None:
        """Put the passes over the tokens from ``start`` to ``end`` of a prompt [L] on the stream."""
        while start < end:
            stop = self._end_of_part(start, end)
            length = self._plan.length_for(start + self._size(stop - start))
            self._read_part(slot, prompt, start, stop, length)
            if stop < end:
                self._device.synchronize()
            start = stop

    def _size(self, count: int) -> int:
        """Tokens of the pass over so many."""
        return next((size for size in self._sizes if size >= count), count)

    def _end_of_part(self, start: int, end: int) -> int:
        """Where a pass from ``start`` on ends. At the end of the caches there is no room for long padding."""
        if start + self._size(end - start) <= self._last:
            return end
        return start + max((size for size in self._sizes if size <= end - start), default=end - start)

    def _read_part(self, slot: int, prompt: NDArray[np.int64], start: int, end: int, length: int) -> None:
        """length: of the plan's ``lengths``, for the text with its padding"""
        is_last = end == prompt.size
        self._read(slot, prompt[start:end], start, length)
        if self._plan.head:
            # The first step reads the last token's features, as later ones read those of the step before.
            self._read_context(slot, prompt, start, end - is_last, length)
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

    def _read(self, slot: int, tokens: NDArray[np.int64], start: int, length: int) -> None:
        """The target model's pass over a part of a prompt."""
        count = tokens.size
        values = {
            "input_ids": tokens,
            "position_ids": np.arange(start, start + count),
            "write_index": np.array([start]),
            "logit_indices": np.array([count - 1]),
        }
        graph_pass = self._plan.prompt_passes(self._size(count))[0]
        self._run(graph_pass, slot, length, values, lambda mask: fill_causal_mask(mask, start))

    def _read_context(self, slot: int, prompt: NDArray[np.int64], start: int, end: int, length: int) -> None:
        """The head's pass over the features of these tokens; its drafts are not used."""
        head = self._plan.head
        if head is None or not self._plan.head_has_cache or start == end:
            return
        following, size = prompt[start + 1 : end + 1], self._size(end - start)
        # Every head has some of these inputs.
        values = {
            "context_position_ids": np.arange(start, end),
            "context_token_ids": following,
            "frame_position_ids": np.array([end]),
            "query_indices": np.array([end - start - 1]),
            "path_ids_0": following[-1:],
            "write_index": np.array([start]),
        }
        self._run(
            head.read(size), slot, length, values, lambda mask: fill_frame_mask(mask, end, start + size)
        )

    def _run(
        self,
        graph_pass: GraphPass,
        slot: int,
        length: int,
        values: Mapping[str, NDArray[np.int64]],
        fill_mask: Callable[[NDArray[np.bool_]], None],
    ) -> None:
        """Put a pass with these inputs on the stream; inputs that its graph does not have are left out."""
        arrays = self._buffers.of_pass(graph_pass, 1, slot=slot, length=length)
        packed = self._packed(graph_pass.graph, {name: arrays[name] for name in values if name in arrays})
        for name, array in packed.on_host.items():
            array.reshape(-1)[...] = values[name][-1]
            array.reshape(-1)[: values[name].size] = values[name]
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

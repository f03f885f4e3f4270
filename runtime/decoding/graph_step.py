"""One decode step as graphs on a device: the host launches them and reads the new tokens.

prepare    lengths                      -> positions and mask of the head's pass
draft      path features, anchor        -> lattice
search     lattice, anchor, lengths     -> tree, and the inputs of the target model's pass over it
verify     tree, caches                 -> next tokens, logits, features
accept     tree, next tokens            -> path, new tokens, new lengths
commit     path, caches, features       -> caches with the path packed, the path's features

The state of every sequence stays in arrays of the device: its caches, ``lengths``, ``anchor_ids`` (the last
token), ``counts`` (tokens of the last step, which the head has not read yet) and ``path_features`` (theirs).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.decoding.sequence import SequenceState
from runtime.decoding.step import StepResult, step_result
from runtime.decoding.step_buffers import StepBuffers
from runtime.engines.device import ITEM_SIZES, Device, DeviceArray, DeviceEngine
from runtime.engines.masks import fill_causal_mask, fill_frame_mask
from runtime.engines.recorder import NullRecorder, Recorder
from runtime.errors import DeviceError
from runtime.trees.token_tree import TokenTree

# What a step sets anew for every sequence, and from what.
STATE = {"lengths": "new_lengths", "counts": "new_counts", "anchor_ids": "new_anchor_ids"}
# What the host reads of a step, and of one whose tokens it chooses itself.
RESULTS = ("new_tokens", "new_counts", "node_log_probs")
CHOSEN_FROM = ("next_tokens", "input_ids", "parents", "depths", "node_log_probs", "logits")

# Bytes, of which an array's address has to be a multiple.
ALIGNMENT = 256

Launch = Callable[[], None]
Stage = tuple[str, list[Launch]]


@dataclass(frozen=True)
class StepShape:
    """What the graphs of a bundle's steps are made for.

    nodes: sizes of a tree, ascending from 0
    path_length: P, new tokens of a step at most
    num_frames: of the head; 0 where there is none
    head_has_cache: whether the head keeps keys and values of its context
    """

    nodes: tuple[int, ...]
    path_length: int
    num_frames: int
    head_has_cache: bool


class Program:
    """A sequence of launches in stages, which a device may capture and repeat as one.

    The first run is launched one by one, since engines allocate what they need in their first pass with new
    shapes.
    """

    def __init__(self, device: Device, stages: Sequence[Stage]):
        self._device = device
        self._stages = stages
        self._replay: Launch | None = None
        self._was_run = False

    def run(self, *, capture: bool) -> None:
        """Put all stages on the stream."""
        if not (capture and self._was_run):
            self._launch_all()
            self._was_run = True
            return
        if self._replay is None:
            self._replay = self._device.capture(self._launch_all)
        self._replay()

    def run_in_stages(self) -> list[tuple[str, Any]]:
        """The same, launched one by one; returns the event at the end of every stage."""
        events = []
        for stage, launches in self._stages:
            for launch in launches:
                launch()
            events.append((stage, self._device.mark()))
        self._was_run = True
        return events

    def _launch_all(self) -> None:
        for _, launches in self._stages:
            for launch in launches:
                launch()


class PackedArrays:
    """Arrays in one block of a device's memory, which one copy brings to the host.

    arrays: by name, those with the widest types first; only their shapes and types matter
    """

    def __init__(self, device: Device, arrays: Mapping[str, DeviceArray]):
        size = sum(array.nbytes + ALIGNMENT for array in arrays.values())
        self._device = device
        self._block = device.allocate((size,), "bool")
        self._host = device.host_array((size,), "bool")
        self.on_device: dict[str, DeviceArray] = {}
        self.on_host: dict[str, NDArray[Any]] = {}
        offset = 0
        for name, array in arrays.items():
            end = offset + array.nbytes
            self.on_device[name] = replace(array, address=self._block.address + offset)
            self.on_host[name] = self._host[offset:end].view(array.dtype).reshape(array.shape)
            # Engines want aligned addresses.
            offset = -(-end // ALIGNMENT) * ALIGNMENT

    def download(self) -> None:
        """Bring all of them to the host."""
        self._device.download(self._block, self._host)


@dataclass(frozen=True)
class _Step:
    """The programs of a step of some sequences and nodes, and the arrays that it brings to the host.

    commit: what follows when the host has chosen the tokens; None where the device chooses them
    """

    program: Program
    results: dict[str, NDArray[Any]]
    commit: Program | None = None


class GraphStep:
    """The ``StepRunner`` whose steps run on a device. The graphs are those of ``export.step``.

    engines: ``backbone``, ``search_0`` and ``accept``; with a head ``drafter``, ``prepare``, ``commit`` and
        ``search_N`` for every size of a tree
    capture: whether steps are captured on their second run and replayed from then on
    Tokens that the graphs cannot choose are chosen on the host between two halves of a step, from the logits.
    """

    def __init__(
        self,
        device: Device,
        engines: Mapping[str, DeviceEngine],
        buffers: StepBuffers,
        shape: StepShape,
        *,
        max_num_seqs: int,
        prefill_chunk_size: int,
        capture: bool = True,
    ):
        self.max_num_seqs = max_num_seqs
        self.prefill_chunk_size = prefill_chunk_size
        self.recorder: Recorder = NullRecorder()
        self._device = device
        self._engines = engines
        self._buffers = buffers
        self._shape = shape
        self._capture = capture
        self._has_head = "drafter" in engines
        self._steps: dict[tuple[int, int, bool], _Step] = {}
        self._start = device.allocate((1,), "int64")
        for name in ("positions", "drafter_positions"):
            if name in buffers.arrays:
                self._set(buffers.arrays[name], np.arange(buffers.arrays[name].shape[0]))

    def step(self, sequences: Sequence[SequenceState], num_nodes: int) -> StepResult:
        self._check_open()
        recorder, count = self.recorder, len(sequences)
        recorder.begin()
        nodes = self._nodes_of_step(num_nodes)
        key = count, nodes, any(sequence.acceptor.needs_logits for sequence in sequences)
        step = self._steps.get(key)
        if step is None:
            step = self._steps[key] = self._make_step(*key)
        self._run(step.program)
        if step.commit is None:
            result = _result(step.results)
        else:
            result = self._accept_on_host(sequences, step.results)
            recorder.mark("accept")
            step.commit.run(capture=self._capture)
            self._device.synchronize()
            recorder.mark("commit")
        recorder.end(count, count * (nodes + 1), int(result.counts.sum()) - count)
        return result

    def prefill(self, slot: int, sequence: SequenceState, num_tokens: int) -> StepResult | None:
        self._check_open()
        start, end = sequence.length, sequence.length + num_tokens
        is_last = end == sequence.prompt.size
        self._read(slot, sequence.prompt[start:end], start)
        if self._has_head:
            # The step that follows reads the last token's features, as it reads those of a step before it.
            self._read_context(slot, start, num_tokens - is_last)
        if not is_last:
            self._device.synchronize()
            return None
        tokens = self._fetch(self._buffers.arrays["next_tokens"].view((1, 1)))
        logits = None
        if sequence.acceptor.needs_logits:
            array = self._buffers.arrays["logits"]
            logits = self._fetch(array.view((1, 1, array.shape[-1])))[0]
        # A lone root that is in the cache already: there is nothing to verify, only the first token to draw.
        tree = TokenTree.root(int(sequence.prompt[-1]))
        acceptance = sequence.acceptor.accept(tree, tokens[0], logits)
        for name, value in (("lengths", end), ("counts", 1), ("anchor_ids", acceptance.bonus)):
            self._set(self._buffers.arrays[name].rows(slot, slot + 1), np.array([value]))
        return step_result([tree], [acceptance])

    def move(self, source: int, target: int, length: int) -> None:
        for cache in self._buffers.caches():
            row = cache.shape[3] * ITEM_SIZES[cache.dtype]
            self._device.copy_blocks(
                cache.rows(source, source + 1),
                cache.rows(target, target + 1),
                count=cache.shape[1],
                size=length * row,
                pitch=cache.shape[2] * row,
            )
        for name in (*STATE, "path_features"):
            if name in self._buffers.arrays:
                array = self._buffers.arrays[name]
                self._device.copy(array.rows(source, source + 1), array.rows(target, target + 1))

    def release(self, slot: int) -> None:
        """Nothing is to be done: whoever gets the slot writes it anew."""

    def close(self) -> None:
        """Free the device's memory, and the engines', which live as long as something refers to them.

        Raises DeviceError if the last work failed, after freeing all.
        """
        try:
            self._device.close()
        finally:
            self._steps.clear()
            self._engines = {}

    def _check_open(self) -> None:
        """Addresses of memory that was freed must not be written to."""
        if not self._engines:
            raise DeviceError("the engines are closed")

    def _nodes_of_step(self, num_nodes: int) -> int:
        """The smallest tree with at least so many nodes, or else the largest there is."""
        if not (num_nodes and self._has_head):
            return 0
        sizes = self._shape.nodes
        return next((size for size in sizes if size >= num_nodes), sizes[-1])

    def _run(self, program: Program) -> None:
        """Run a program to its end. A recorder that wants stages hears when each of them ended."""
        if not self.recorder.wants_stages:
            program.run(capture=self._capture)
            self._device.synchronize()
            return
        begin = self._device.mark()
        events = program.run_in_stages()
        self._device.synchronize()
        for stage, event in events:
            self.recorder.mark(stage, self._device.milliseconds(begin, event))

    def _make_step(self, count: int, nodes: int, on_host: bool) -> _Step:
        device, search = self._device, f"search_{nodes}"
        draft = ["prepare", "drafter"] if self._has_head else []
        accept = [] if on_host else ["accept"]
        commit = ["commit"] if self._has_head else []
        arrays = {
            graph: self._buffers.of_pass(
                graph,
                B=count,
                N=nodes + 1,
                M=nodes + 1,
                A=self._shape.path_length,
                T=self._shape.num_frames,
            )
            for graph in (*draft, search, "backbone", *accept, *commit)
        }
        # The model's choices are wanted after every node.
        indices = device.allocate((count, nodes + 1), "int64")
        self._set(indices, np.tile(np.arange(nodes + 1), (count, 1)))
        arrays["backbone"]["logit_indices"] = indices
        named = arrays[search] | arrays["backbone"]
        results: dict[str, NDArray[Any]]
        downloads: list[Launch]
        if on_host:
            fetched = {name: named[name] for name in CHOSEN_FROM}
            results = {name: device.host_array(array.shape, array.dtype) for name, array in fetched.items()}
            downloads = [partial(device.download, array, results[name]) for name, array in fetched.items()]
        else:
            named |= arrays["accept"]
            packed = PackedArrays(device, {name: named[name] for name in RESULTS})
            results, downloads = packed.on_host, [packed.download]
            for each in arrays.values():
                each |= {name: array for name, array in packed.on_device.items() if name in each}
        chosen = arrays["accept"] if accept else self._buffers.arrays
        copies: list[Launch] = [
            partial(device.copy, chosen[new].rows(0, count), self._buffers.arrays[state].rows(0, count))
            for state, new in STATE.items()
        ]

        def stage(*graphs: str) -> list[Launch]:
            return [self._engines[graph].bind(arrays[graph]) for graph in graphs]

        stages: list[Stage] = [
            ("draft", stage(*draft)),
            ("transform", stage(search)),
            ("verify", stage("backbone")),
        ]
        last: Stage = ("commit", [*stage(*commit), *copies])
        if on_host:
            program = Program(device, [*stages, ("accept", downloads)])
            return _Step(program, results, Program(device, [last]))
        stages += [("accept", stage("accept")), last, ("read", downloads)]
        return _Step(Program(device, stages), results)

    def _accept_on_host(
        self, sequences: Sequence[SequenceState], results: Mapping[str, NDArray[Any]]
    ) -> StepResult:
        """Let every sequence choose from the logits, and tell the device what was chosen."""
        trees, accepted = [], []
        for index, sequence in enumerate(sequences):
            found = {name: values[index] for name, values in results.items()}
            log_probs = found["node_log_probs"].astype(np.float64)
            tree = TokenTree(found["input_ids"], found["parents"], found["depths"], log_probs)
            trees.append(tree)
            accepted.append(sequence.acceptor.accept(tree, found["next_tokens"], found["logits"]))
        result = step_result(trees, accepted)
        count = len(sequences)
        path = np.tile(np.arange(self._shape.path_length), (count, 1))
        for row, acceptance in zip(path, accepted, strict=True):
            row[: acceptance.path.size] = acceptance.path
        lengths = np.array([sequence.length for sequence in sequences]) + result.counts
        chosen = {
            "path": path,
            "new_lengths": lengths,
            "new_counts": result.counts,
            "new_anchor_ids": np.array([acceptance.bonus for acceptance in accepted])[:, None],
        }
        for name, values in chosen.items():
            if name in self._buffers.arrays:
                self._set(self._buffers.arrays[name].view(values.shape), values)
        return result

    def _read(self, slot: int, tokens: NDArray[np.int64], start: int) -> None:
        """The target model's pass over a part of a prompt."""
        count = tokens.size
        arrays = self._buffers.of_pass("backbone", slot=slot, B=1, N=count, M=1)
        arrays["write_index"] = self._start
        mask = np.empty(arrays["attn_mask"].shape, np.bool_)
        fill_causal_mask(mask[0, 0], start)
        for name, values in (
            ("input_ids", tokens),
            ("position_ids", np.arange(start, start + count)),
            ("attn_mask", mask),
            ("write_index", np.array([start])),
            ("logit_indices", np.array([count - 1])),
        ):
            self._set(arrays[name], values)
        self._engines["backbone"].run(arrays)

    def _read_context(self, slot: int, start: int, count: int) -> None:
        """The head's pass over the features of ``count`` tokens; what it drafts is not used.

        The features of the token behind them, if there is one, become the path of the step to come.
        """
        buffers, features = self._buffers, self._buffers.arrays["features"]
        rows = features.view((features.shape[0] * features.shape[1], features.shape[2]))
        if self._shape.head_has_cache and count:
            arrays = buffers.of_pass("drafter", slot=slot, B=1, A=count, T=1)
            arrays["features"] = rows.rows(0, count).view(arrays["features"].shape)
            end = start + count
            mask = np.empty(arrays["attn_mask"].shape, np.bool_)
            fill_frame_mask(mask[0, 0], end, end)
            for name, values in (
                ("context_position_ids", np.arange(start, end)),
                ("frame_position_ids", np.array([end])),
                ("attn_mask", mask),
                ("write_index", np.array([start])),
            ):
                self._set(arrays[name], values)
            self._engines["drafter"].run(arrays)
        self._device.copy(rows.rows(count, count + 1), buffers.arrays["path_features"].rows(slot, slot + 1))

    def _set(self, array: DeviceArray, values: NDArray[Any]) -> None:
        """Write an array, and wait until it has been read."""
        values = np.ascontiguousarray(values)
        if values.nbytes != array.nbytes:
            raise ValueError(f"{values.nbytes} bytes do not fill an array of {array.nbytes}")
        self._device.upload(values, array)
        self._device.synchronize()

    def _fetch(self, array: DeviceArray) -> NDArray[Any]:
        values = self._device.host_array(array.shape, array.dtype)
        self._device.download(array, values)
        self._device.synchronize()
        return values


def _result(arrays: Mapping[str, NDArray[Any]]) -> StepResult:
    """Copies, because the next step brings its results to the same memory."""
    counts = arrays["new_counts"].copy()
    log_probs = arrays["node_log_probs"][:, 1:].astype(np.float64)
    return StepResult(arrays["new_tokens"].copy(), counts, ((),) * counts.size, log_probs)

"""One decode step as graphs on a device: the host launches them and reads the new tokens.

prepare    lengths                      -> positions and mask of the head's pass
draft      path features, anchor        -> lattice; or children, level by level, with ``expand`` between
search     drafts, anchor, lengths      -> tree, and the inputs of the target model's pass over it
verify     tree, caches                 -> next tokens, logits, features
accept     tree, next tokens            -> path, new tokens, their counts
commit     path, caches, features       -> caches with the path packed, the path's features

The device keeps the caches of every sequence, and ``path_features``: the features of the last step's tokens,
which the head has not read yet. Before every step the host uploads ``lengths``, ``anchor_ids`` (the last
token), ``counts`` (tokens of the last step) and, for EAGLE, ``path_tokens`` (the token after each of them).

A step works on the first slots; their number is one of ``batch_sizes``. A slot among them without a sequence
is idle: it writes to its caches behind the longest text, and its results are not read.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from runtime.core.errors import DeviceError, DeviceMemoryError
from runtime.core.options import SAMPLING_FILTERS
from runtime.core.token_tree import TokenTree
from runtime.decode.acceptance import Acceptor, TokenScore
from runtime.decode.sequence import SequenceState
from runtime.decode.step import NumVerified, StepResult, step_result
from runtime.device.block_store import BlockStore, StoredBlock, copy_positions
from runtime.device.device import Device, DeviceEngine, PackedArrays, write_array
from runtime.device.plan import ACCEPT_GRAPHS, StepPlan, size_that_runs
from runtime.device.prefill import GraphPrefill
from runtime.device.program import ON_HOST, Program, Step, StepBuffers, StepPrograms
from runtime.engines.recorder import NullRecorder, Recorder

LOGGER = logging.getLogger(__name__)


class GraphStep:
    """The ``StepRunner`` whose steps run on a device. The graphs are those of ``export.step``.

    engines: those of all passes of the plan, by graph
    batch_sizes: numbers of slots that a step may work on, ascending to ``max_num_seqs``; by default all
    prompt_sizes: as of ``GraphPrefill``
    capture: whether steps are captured on their second run and replayed from then on; may be changed
    times_device: whether a recorder that wants no stages is told of one, ``device``: the time from the step's
        first launch to the end of its last
    Tokens that the graphs cannot choose (with penalties, a logit bias or a large ``top_k``) are chosen on the
    host between two halves of a step, from the logits.
    """

    def __init__(
        self,
        device: Device,
        engines: Mapping[str, DeviceEngine],
        plan: StepPlan,
        *,
        batch_sizes: Sequence[int] = (),
        prompt_sizes: Sequence[int] = (),
    ):
        self.max_num_seqs = plan.max_num_seqs
        self.prefill_chunk_size = plan.prefill_chunk_size
        self.tree_sizes: Sequence[int] = plan.nodes
        self.recorder: Recorder = NullRecorder()
        self.capture = True
        self.times_device = False
        self.scores_prompts = False
        self._device = device
        # Shared with the objects that use them, until ``close`` empties it.
        self._engines = dict(engines)
        self._plan = plan
        self._buffers = StepBuffers(device, plan)
        self._blocks: BlockStore | None = None
        self._slots = SlotState(self._buffers.inputs, idle_length=plan.max_length)
        self._prefill = GraphPrefill(device, self._engines, self._buffers, plan, sizes=prompt_sizes)
        self._programs = StepPrograms(device, self._engines, self._buffers, plan, self._slots.upload)
        self._steps: dict[tuple[int, int, str, int], Step] = {}
        self._batch_sizes = tuple(batch_sizes) or tuple(range(1, plan.max_num_seqs + 1))

    def step(
        self, sequences: Sequence[SequenceState], num_nodes: int, num_verified: NumVerified | None = None
    ) -> StepResult:
        self._check_open()
        recorder, count = self.recorder, len(sequences)
        recorder.begin()
        # Without a head there is nothing to verify but the root.
        nodes = size_that_runs(self._plan.nodes, num_nodes) if num_nodes and self._plan.head else 0
        acceptors = [sequence.acceptor for sequence in sequences]
        size = next(size for size in self._batch_sizes if size >= count)
        length = self._plan.length_for(self._slots.longest(count))
        step = self._prepared(size, nodes, choose_accept_graph(acceptors), length)
        self._slots.leave_idle(count)
        if step.draws:
            write_draws(acceptors, step.draws)
        self._run(step.program)
        if step.commit is None:
            result = read_result(acceptors, step.results)
        else:
            result, path = accept_on_host(sequences, step.results, self._plan.path_length)
            if step.path:
                write_array(self._device, step.path.view(path.shape), path)
            recorder.mark("accept")
            step.commit.run(capture=self.capture)
            self._device.synchronize()
            recorder.mark("commit")
        self._slots.advance(result.tokens, result.counts)
        recorder.end(count, count * (nodes + 1), int(result.counts.sum()) - count)
        return result

    def prefill(self, slot: int, sequence: SequenceState, num_tokens: int) -> StepResult | None:
        self._check_open()
        end = sequence.length + num_tokens
        if not sequence.length:
            self._clear(slot)
        self._prefill.read(slot, sequence.prompt, sequence.length, end)
        if end < sequence.prompt.size:
            self._device.synchronize()
            return None
        tokens, logits = self._prefill.choices(logits=sequence.acceptor.needs_logits)
        # The tree is a root that is in the cache already: nothing is verified, only the first token is drawn.
        tree = TokenTree.root(int(sequence.prompt[-1]))
        acceptance = sequence.acceptor.accept(tree, tokens, logits)
        self._slots.enter(slot, end, acceptance.bonus)
        return step_result([tree], [acceptance])

    def swap(self, first: int, second: int, lengths: tuple[int, int]) -> None:
        if all(lengths):
            for array in self._buffers.slot_arrays:
                one, other = array.rows(first, first + 1), array.rows(second, second + 1)
                spare = replace(one, address=self._buffers.spare_row.address)
                self._device.copy(one, spare)
                self._device.copy(other, one)
                self._device.copy(spare, other)
        elif lengths[1]:
            self._move(second, first, lengths[1])
        elif lengths[0]:
            self._move(first, second, lengths[0])
        self._slots.swap(first, second)

    def _move(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` positions of a slot to a free one."""
        self._clear(target)
        for cache in (*self._buffers.caches, *self._buffers.head_caches):
            copy_positions(self._device, (cache, source, 0), (cache, target, 0), length)
        features = self._buffers.path_features
        if features:
            self._device.copy(features.rows(source, source + 1), features.rows(target, target + 1))

    def _clear(self, slot: int) -> None:
        """Set a slot's caches and features to zeros.

        Attention multiplies masked positions by zero. If a sequence has left values there that are not
        finite, the products are not finite either, and would spoil the next sequence of the slot.
        """
        for array in self._buffers.slot_arrays:
            self._device.clear(array.rows(slot, slot + 1))

    def keep_prefixes(self, max_bytes: int) -> int:
        buffers = self._buffers
        try:
            self._blocks = BlockStore(self._device, buffers.caches, buffers.head_caches, max_bytes)
        except DeviceMemoryError as error:
            LOGGER.warning("no memory for prefixes: %s", error)
            return 0
        return self._blocks.num_bytes

    def save_block(self, slot: int, start: int, end: int) -> StoredBlock | None:
        if self._blocks is None or self._slots.context_length(slot) < end - 1:
            return None
        return self._blocks.save(slot, start, end)

    def load_blocks(self, slot: int, tokens: NDArray[np.int64], blocks: Sequence[StoredBlock]) -> None:
        assert self._blocks is not None
        self._clear(slot)
        self._blocks.load(slot, blocks)

    def release(self, slot: int) -> None:
        """No-op: the next sequence overwrites the slot."""

    def close(self) -> None:
        """Free the memory of the device, and that of the engines by dropping all references to them.

        Raises DeviceError if the last work failed, after freeing all.
        """
        try:
            self._device.close()
        finally:
            self._steps.clear()
            self._programs.clear()
            self._engines.clear()

    def warm_up(self) -> None:
        """Run every kind of step twice with idle slots only, the largest first, after passes over prompts.

        In the first run libraries allocate memory for the new shapes and compile kernels for them; in the
        second the step is captured.
        """
        self._prefill.prepare(self.prefill_chunk_size)
        self._prefill.run_all_sizes()
        self._slots.leave_idle(0)
        sizes = (self._batch_sizes, self._plan.nodes, self._plan.lengths)
        kinds = list(product(*(tuple(reversed(each)) for each in sizes), ACCEPT_GRAPHS))
        for size, nodes, length, accept in tqdm(kinds, desc="prepare steps", unit="step", leave=False):
            for _ in range(2):
                self._prepared(size, nodes, accept, length).program.run(capture=self.capture)
                self._device.synchronize()

    def _prepared(self, size: int, nodes: int, accept: str, length: int) -> Step:
        """The step of the first ``size`` slots, for texts of at most ``length`` tokens."""
        key = size, nodes, accept, length
        step = self._steps.get(key)
        if step is None:
            step = self._steps[key] = self._programs.make(*key)
        return step

    def _check_open(self) -> None:
        """Raises DeviceError after ``close``, which frees the memory that all passes write to."""
        if not self._engines:
            raise DeviceError("the engines are closed")

    def _run(self, program: Program) -> None:
        """Run a program and wait; a recorder that wants stages is told when each of them ended."""
        if not self.recorder.wants_stages:
            begin = self._device.mark() if self.times_device else None
            program.run(capture=self.capture)
            end = self._device.mark() if self.times_device else None
            self._device.synchronize()
            if self.times_device:
                self.recorder.mark("device", self._device.milliseconds(begin, end))
            return
        begin = self._device.mark()
        events = program.run_in_stages()
        self._device.synchronize()
        for stage, event in events:
            self.recorder.mark(stage, self._device.milliseconds(begin, event))


class SlotState:
    """Lengths, last tokens and the last step's tokens of all slots, which one upload brings to the device.

    The host knows them, since it reads the tokens of every step. Idle slots are set again before every step,
    so that they do not grow and the device needs no work of its own for them.

    inputs: the arrays of ``runtime.device.program.STEP_INPUTS``
    idle_length: the length of an idle slot
    """

    def __init__(self, inputs: PackedArrays, *, idle_length: int):
        # Some heads read arrays with a further axis, of one element.
        flat = {name: values.reshape(values.shape[0], -1) for name, values in inputs.on_host.items()}
        self._values: tuple[NDArray[Any], ...] = tuple(flat.values())
        self._lengths, self._anchors = flat["lengths"][:, 0], flat["anchor_ids"][:, 0]
        self._counts = flat["counts"][:, 0] if "counts" in flat else np.empty_like(self._lengths)
        self._path = flat.get("path_tokens")
        self._rows = np.arange(self._lengths.size)
        self._idle_length = idle_length
        self.upload = inputs.upload

    def enter(self, slot: int, length: int, token: int) -> None:
        """Begin to decode a sequence in a slot: it has this length, and ``token`` is its last."""
        self._lengths[slot], self._anchors[slot], self._counts[slot] = length, token, 1
        if self._path is not None:
            self._path[slot] = 0
            self._path[slot, 0] = token

    def advance(self, tokens: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        """Record a step that added the first ``counts[b]`` of ``tokens`` [B, W] to the sequence in slot b."""
        count = counts.size
        self._lengths[:count] += counts
        self._anchors[:count] = tokens[self._rows[:count], counts - 1]
        self._counts[:count] = counts
        if self._path is not None:
            self._path[:count] = 0
            self._path[:count, : tokens.shape[1]] = tokens

    def longest(self, count: int) -> int:
        """Tokens of the longest text in the first ``count`` slots."""
        return int(self._lengths[:count].max(initial=0))

    def context_length(self, slot: int) -> int:
        """Tokens that the head has read of a sequence that decodes: all but those of its last step."""
        return int(self._lengths[slot] - self._counts[slot])

    def leave_idle(self, first: int) -> None:
        """Make the slots from ``first`` on idle in the next step."""
        self._lengths[first:] = self._idle_length
        self._anchors[first:] = 0
        self._counts[first:] = 1
        if self._path is not None:
            self._path[first:] = 0

    def swap(self, first: int, second: int) -> None:
        for values in self._values:
            values[[first, second]] = values[[second, first]]


def choose_accept_graph(acceptors: Sequence[Acceptor]) -> str:
    """The graph that can accept for all sequences, or ``ON_HOST`` if there is none."""
    if not any(acceptor.needs_logits for acceptor in acceptors):
        return "accept"
    return ON_HOST if any(acceptor.graph_sampling is None for acceptor in acceptors) else "accept_sampled"


def write_draws(acceptors: Sequence[Acceptor], draws: Mapping[str, NDArray[Any]]) -> None:
    """Write the sampling options and the next random numbers of every sequence."""
    for index, acceptor in enumerate(acceptors):
        sampling = acceptor.graph_sampling
        assert sampling is not None
        for name in SAMPLING_FILTERS:
            draws[name][index] = getattr(sampling, name)
        acceptor.fill_uniforms(draws["uniforms"][index])
    for values in draws.values():
        values[len(acceptors) :] = 0  # greedy, in slots without a sequence


def read_result(acceptors: Sequence[Acceptor], arrays: Mapping[str, NDArray[Any]]) -> StepResult:
    """The result of a step whose tokens the device chose; copies, because the next step overwrites it."""
    arrays = {name: values[: len(acceptors)] for name, values in arrays.items()}
    counts = arrays["new_counts"].copy()
    scores: list[tuple[TokenScore, ...]] = [()] * counts.size
    if "new_log_probs" in arrays:
        for index, (acceptor, count) in enumerate(zip(acceptors, counts.tolist(), strict=True)):
            acceptor.advance(count)
            if acceptor.graph_sampling and acceptor.graph_sampling.log_probs:
                scores[index] = tuple(map(TokenScore, arrays["new_log_probs"][index, :count].tolist()))
    node_log_probs = arrays["node_log_probs"][:, 1:].astype(np.float64)
    return StepResult(arrays["new_tokens"].copy(), counts, tuple(scores), node_log_probs)


def accept_on_host(
    sequences: Sequence[SequenceState], results: Mapping[str, NDArray[Any]], path_length: int
) -> tuple[StepResult, NDArray[np.int64]]:
    """Choose every sequence's tokens from the logits. Returns the nodes of the paths, [B, P], too.

    results: the arrays of ``program.CHOSEN_FROM``, of at least as many slots as there are sequences
    path_length: P, new tokens of a step at most
    """
    trees, accepted = [], []
    for index, sequence in enumerate(sequences):
        found = {name: values[index] for name, values in results.items()}
        log_probs = found["node_log_probs"].astype(np.float64)
        tree = TokenTree(found["input_ids"], found["parents"], found["depths"], log_probs)
        trees.append(tree)
        accepted.append(sequence.acceptor.accept(tree, found["next_tokens"], found["logits"]))
    path = np.tile(np.arange(path_length), (len(sequences), 1))
    for row, acceptance in zip(path, accepted, strict=True):
        row[: acceptance.path.size] = acceptance.path
    return step_result(trees, accepted), path

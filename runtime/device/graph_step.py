"""One decode step as graphs on a device: the host launches them and reads the new tokens.

prepare    lengths                      -> positions and mask of the head's pass
draft      path features, anchor        -> lattice; or children, level by level, with ``expand`` between
search     drafts, anchor, lengths      -> tree, and the inputs of the target model's pass over it
verify     tree, caches                 -> next tokens, logits, features
accept     tree, next tokens            -> path, new tokens, new lengths
commit     path, caches, features       -> caches with the path packed, the path's features

Of every sequence the device keeps its caches and ``path_features``, those of the last step's tokens, which
the head has not read yet. In every step the host tells it ``lengths``, ``anchor_ids`` (the last token),
``counts`` (tokens of the last step) and, for EAGLE, ``path_tokens`` (the token after each of them).

A step works on the first slots, and on as many as one of ``batch_sizes``. A slot among them that no sequence
decodes in is idle: it writes to its caches behind the longest text, and nobody reads its results.
"""

from collections.abc import Mapping, Sequence
from itertools import product

import numpy as np
from tqdm import tqdm

from runtime.core.errors import DeviceError
from runtime.core.token_tree import TokenTree
from runtime.decode.sequence import SequenceState
from runtime.decode.step import StepResult, step_result
from runtime.device.device import ITEM_SIZES, Device, DeviceEngine, write_array
from runtime.device.graph_prefill import GraphPrefill
from runtime.device.program import Program
from runtime.device.slot_state import SlotState
from runtime.device.step_buffers import StepBuffers
from runtime.device.step_exchange import accept_on_host, read_result, who_accepts, write_draws
from runtime.device.step_plan import StepPlan
from runtime.device.step_programs import ACCEPT_GRAPHS, Step, StepPrograms
from runtime.engines.recorder import NullRecorder, Recorder


class GraphStep:
    """The ``StepRunner`` whose steps run on a device. The graphs are those of ``export.step``.

    engines: those of all passes of the plan, by graph
    max_num_seqs: slots
    batch_sizes: numbers of slots that a step may work on, ascending to ``max_num_seqs``; by default all
    idle_length: the length of the longest text, behind which idle slots write to their caches
    capture: whether steps are captured on their second run and replayed from then on; may be set at any time
    times_device: whether a recorder that wants no stages hears of one, ``device``: what the device did, from
        its first launch to its last
    Tokens that the graphs cannot choose (with penalties, a logit bias or a large ``top_k``) are chosen on the
    host between two halves of a step, from the logits.
    """

    def __init__(
        self,
        device: Device,
        engines: Mapping[str, DeviceEngine],
        buffers: StepBuffers,
        plan: StepPlan,
        *,
        max_num_seqs: int,
        prefill_chunk_size: int,
        batch_sizes: Sequence[int] = (),
        idle_length: int = 0,
        capture: bool = True,
    ):
        self.max_num_seqs = max_num_seqs
        self.prefill_chunk_size = prefill_chunk_size
        self.recorder: Recorder = NullRecorder()
        self._device = device
        # Shared with those that use them, until ``close`` empties it.
        self._engines = dict(engines)
        self._buffers = buffers
        self._plan = plan
        self.capture = capture
        self.times_device = False
        self.tree_sizes: Sequence[int] = plan.nodes
        self._slots = SlotState(device, buffers, idle_length=idle_length)
        self._prefill = GraphPrefill(device, self._engines, buffers, plan)
        self._programs = StepPrograms(device, self._engines, buffers, plan, self._slots.upload)
        self._steps: dict[tuple[int, int, str], Step] = {}
        self._batch_sizes = tuple(batch_sizes) or tuple(range(1, max_num_seqs + 1))
        for name in ("positions", "drafter_positions"):
            if name in buffers.arrays:
                write_array(device, buffers.arrays[name], np.arange(buffers.arrays[name].shape[0]))
        for each in plan.all_passes():
            for tensor, value in each.constants.items():
                write_array(device, buffers.arrays[each.names[tensor]], np.array([value]))

    def step(self, sequences: Sequence[SequenceState], num_nodes: int) -> StepResult:
        self._check_open()
        recorder, count = self.recorder, len(sequences)
        recorder.begin()
        nodes = self._nodes_of_step(num_nodes)
        acceptors = [sequence.acceptor for sequence in sequences]
        size = next(size for size in self._batch_sizes if size >= count)
        step = self._prepared(size, nodes, who_accepts(acceptors))
        self._slots.leave_idle(count)
        if step.draws:
            write_draws(acceptors, step.draws)
        self._run(step.program)
        if step.commit is None:
            result = read_result(acceptors, step.results)
        else:
            result, path = accept_on_host(sequences, step.results, self._plan.path_length)
            write_array(self._device, self._buffers.arrays["path"].view(path.shape), path)
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
        # A lone root that is in the cache already: there is nothing to verify, only the first token to draw.
        tree = TokenTree.root(int(sequence.prompt[-1]))
        acceptance = sequence.acceptor.accept(tree, tokens, logits)
        self._slots.enter(slot, end, acceptance.bonus)
        return step_result([tree], [acceptance])

    def move(self, source: int, target: int, length: int) -> None:
        self._clear(target)
        for cache in self._buffers.caches():
            row = cache.shape[3] * ITEM_SIZES[cache.dtype]
            self._device.copy_blocks(
                cache.rows(source, source + 1),
                cache.rows(target, target + 1),
                count=cache.shape[1],
                size=length * row,
                pitch=cache.shape[2] * row,
            )
        features = self._buffers.arrays.get("path_features")
        if features:
            self._device.copy(features.rows(source, source + 1), features.rows(target, target + 1))
        self._slots.move(source, target)

    def _clear(self, slot: int) -> None:
        """Forget what a slot held before.

        Attention multiplies even what is masked, with a weight of zero. A sequence whose numbers were not
        finite would therefore spoil those that get its slot after it.
        """
        for array in (*self._buffers.caches(), self._buffers.arrays.get("path_features")):
            if array:
                self._device.clear(array.rows(slot, slot + 1))

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
            self._programs.clear()
            self._engines.clear()

    def warm_up(self) -> None:
        """Run every kind of step twice with idle slots alone, the largest first.

        What a library allocates in its first pass is then allocated, and the steps are captured.
        """
        self._prefill.prepare(self.prefill_chunk_size)
        self._slots.leave_idle(0)
        kinds = list(product(reversed(self._batch_sizes), reversed(self._plan.nodes), ACCEPT_GRAPHS))
        for size, nodes, accept in tqdm(kinds, desc="prepare steps", unit="step", leave=False):
            for _ in range(2):
                self._prepared(size, nodes, accept).program.run(capture=self.capture)
                self._device.synchronize()

    def _prepared(self, size: int, nodes: int, accept: str) -> Step:
        """The step of the first ``size`` slots."""
        key = size, nodes, accept
        step = self._steps.get(key)
        if step is None:
            step = self._steps[key] = self._programs.make(*key)
        return step

    def _check_open(self) -> None:
        """Addresses of memory that was freed must not be written to."""
        if not self._engines:
            raise DeviceError("the engines are closed")

    def _nodes_of_step(self, num_nodes: int) -> int:
        """The smallest tree with at least so many nodes, or else the largest there is."""
        if not (num_nodes and self._plan.head):
            return 0
        sizes = self._plan.nodes
        return next((size for size in sizes if size >= num_nodes), sizes[-1])

    def _run(self, program: Program) -> None:
        """Run a program to its end. A recorder that wants stages hears when each of them ended."""
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

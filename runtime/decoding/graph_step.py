"""One decode step as graphs on a device: the host launches them and reads the new tokens.

prepare    lengths                      -> positions and mask of the head's pass
draft      path features, anchor        -> lattice; or children, level by level, with ``expand`` between
search     drafts, anchor, lengths      -> tree, and the inputs of the target model's pass over it
verify     tree, caches                 -> next tokens, logits, features
accept     tree, next tokens            -> path, new tokens, new lengths
commit     path, caches, features       -> caches with the path packed, the path's features

The state of every sequence stays in arrays of the device: its caches, ``lengths``, ``anchor_ids`` (the last
token), ``counts`` (tokens of the last step, which the head has not read yet), ``path_features`` (theirs) and,
for EAGLE, ``path_tokens`` (the token after each of them).

A step works on the first slots, and on as many as one of ``batch_sizes``. A slot among them that no sequence
decodes in is idle: it writes to its caches behind the longest text, and nobody reads its results.
"""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.decoding.acceptance import Acceptor
from runtime.decoding.program import Program
from runtime.decoding.sequence import SequenceState
from runtime.decoding.step import StepResult, step_result
from runtime.decoding.step_buffers import StepBuffers
from runtime.decoding.step_plan import StepPlan
from runtime.decoding.step_programs import ACCEPT_GRAPHS, ON_HOST, STATE, Step, StepPrograms
from runtime.engines.device import ITEM_SIZES, Device, DeviceArray, DeviceEngine
from runtime.engines.masks import fill_causal_mask, fill_frame_mask
from runtime.engines.recorder import NullRecorder, Recorder
from runtime.errors import DeviceError
from runtime.trees.token_tree import TokenTree


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
        self._engines = engines
        self._buffers = buffers
        self._plan = plan
        self.capture = capture
        self.times_device = False
        self._state = {name: buffers.arrays[name] for name in STATE if name in buffers.arrays}
        self._programs = StepPrograms(device, engines, buffers, plan)
        self._steps: dict[tuple[int, int, str], Step] = {}
        self._batch_sizes = tuple(batch_sizes) or tuple(range(1, max_num_seqs + 1))
        self._idle_state: dict[str, DeviceArray] = {}
        for name, value in {"lengths": idle_length, "counts": 1}.items():
            if name in self._state:
                self._idle_state[name] = device.allocate(self._state[name].shape, self._state[name].dtype)
                self._set(self._idle_state[name], np.full(self._state[name].shape, value))
        # Host arrays of ``_fetch`` by shape and type: the device keeps what it hands out until it is closed.
        self._fetched: dict[tuple[tuple[int, ...], str], NDArray[Any]] = {}
        for name in ("positions", "drafter_positions"):
            if name in buffers.arrays:
                self._set(buffers.arrays[name], np.arange(buffers.arrays[name].shape[0]))
        for each in plan.all_passes():
            for tensor, value in each.constants.items():
                self._set(buffers.arrays[each.names[tensor]], np.array([value]))

    def step(self, sequences: Sequence[SequenceState], num_nodes: int) -> StepResult:
        self._check_open()
        recorder, count = self.recorder, len(sequences)
        recorder.begin()
        nodes = self._nodes_of_step(num_nodes)
        acceptors = [sequence.acceptor for sequence in sequences]
        size = next(size for size in self._batch_sizes if size >= count)
        step = self._prepared(size, nodes, _who_accepts(acceptors), count)
        if step.draws:
            _write_draws(acceptors, step.draws)
        self._run(step.program)
        if step.commit is None:
            result = _result(acceptors, step.results)
        else:
            result = self._accept_on_host(sequences, step.results)
            recorder.mark("accept")
            step.commit.run(capture=self.capture)
            self._device.synchronize()
            recorder.mark("commit")
        recorder.end(count, count * (nodes + 1), int(result.counts.sum()) - count)
        return result

    def prefill(self, slot: int, sequence: SequenceState, num_tokens: int) -> StepResult | None:
        self._check_open()
        start, end = sequence.length, sequence.length + num_tokens
        is_last = end == sequence.prompt.size
        self._read(slot, sequence.prompt[start:end], start)
        if self._plan.head:
            # The step that follows reads the last token's features, as it reads those of a step before it.
            self._read_context(slot, sequence.prompt, start, end - is_last)
            if is_last:
                self._keep_features(slot, num_tokens - 1)
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
        first = acceptance.bonus
        for name, value in {"lengths": end, "counts": 1, "anchor_ids": first, "path_tokens": first}.items():
            if name in self._state:
                self._set(self._state[name].rows(slot, slot + 1).view((1,)), np.array([value]))
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
        for array in self._state.values():
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

    def warm_up(self) -> None:
        """Run every kind of step twice with idle slots alone, the largest first.

        What a library allocates in its first pass is then allocated, and the steps are captured.
        """
        for size, nodes in product(reversed(self._batch_sizes), reversed(self._plan.nodes)):
            for accept in ACCEPT_GRAPHS:
                for _ in range(2):
                    self._prepared(size, nodes, accept, 0).program.run(capture=self.capture)
                    self._device.synchronize()

    def _prepared(self, size: int, nodes: int, accept: str, count: int) -> Step:
        """The step of the first ``size`` slots; those from ``count`` on are made ready to be idle in it."""
        key = size, nodes, accept
        step = self._steps.get(key)
        if step is None:
            step = self._steps[key] = self._programs.make(*key)
        if count < size:
            for name, idle in self._idle_state.items():
                self._device.copy(idle.rows(count, size), self._state[name].rows(count, size))
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
        count, length = len(sequences), self._plan.path_length
        path = np.tile(np.arange(length), (count, 1))
        for row, acceptance in zip(path, accepted, strict=True):
            row[: acceptance.path.size] = acceptance.path
        lengths = np.array([sequence.length for sequence in sequences]) + result.counts
        chosen = {
            "path": path,
            "new_lengths": lengths,
            "new_counts": result.counts,
            "new_tokens": np.pad(result.tokens, ((0, 0), (0, length - result.tokens.shape[1]))),
            "new_anchor_ids": np.array([acceptance.bonus for acceptance in accepted])[:, None],
        }
        for name, values in chosen.items():
            if name in self._buffers.arrays:
                self._set(self._buffers.arrays[name].view(values.shape), values)
        return result

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
            self._set(arrays[name], values)
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
                self._set(arrays[name], values)
        self._engines["drafter"].run(arrays)

    def _keep_features(self, slot: int, index: int) -> None:
        """Make the features of the pass's input ``index`` those of the path that the next step reads."""
        features, path = self._buffers.arrays["features"], self._buffers.arrays["path_features"]
        rows = features.view((features.shape[0] * features.shape[1], features.shape[2]))
        self._device.copy(rows.rows(index, index + 1), path.rows(slot, slot + 1))

    def _set(self, array: DeviceArray, values: NDArray[Any]) -> None:
        """Write an array, and wait until it has been read."""
        values = np.ascontiguousarray(values)
        if values.nbytes != array.nbytes:
            raise ValueError(f"{values.nbytes} bytes do not fill an array of {array.nbytes}")
        self._device.upload(values, array)
        self._device.synchronize()

    def _fetch(self, array: DeviceArray) -> NDArray[Any]:
        key = array.shape, array.dtype
        if key not in self._fetched:
            self._fetched[key] = self._device.host_array(*key)
        values = self._fetched[key]
        self._device.download(array, values)
        self._device.synchronize()
        return values.copy()


def _who_accepts(acceptors: Sequence[Acceptor]) -> str:
    """The graph that can accept for all sequences, or ``ON_HOST`` if there is none."""
    if not any(acceptor.needs_logits for acceptor in acceptors):
        return "accept"
    return ON_HOST if any(acceptor.graph_sampling is None for acceptor in acceptors) else "accept_sampled"


def _write_draws(acceptors: Sequence[Acceptor], draws: Mapping[str, NDArray[Any]]) -> None:
    """Write how every sequence draws its tokens, and its next numbers."""
    for index, acceptor in enumerate(acceptors):
        sampling = acceptor.graph_sampling
        assert sampling is not None
        for name in ("temperature", "top_k", "top_p", "min_p"):
            draws[name][index] = getattr(sampling, name)
        acceptor.fill_uniforms(draws["uniforms"][index])
    for values in draws.values():
        values[len(acceptors) :] = 0  # greedy, in slots without a sequence


def _result(acceptors: Sequence[Acceptor], arrays: Mapping[str, NDArray[Any]]) -> StepResult:
    """Copies, because the next step brings its results to the same memory."""
    arrays = {name: values[: len(acceptors)] for name, values in arrays.items()}
    counts = arrays["new_counts"].copy()
    log_probs: list[tuple[float, ...]] = [()] * counts.size
    if "new_log_probs" in arrays:
        for index, (acceptor, count) in enumerate(zip(acceptors, counts.tolist(), strict=True)):
            acceptor.advance(count)
            if acceptor.graph_sampling and acceptor.graph_sampling.log_probs:
                log_probs[index] = tuple(arrays["new_log_probs"][index, :count].tolist())
    node_log_probs = arrays["node_log_probs"][:, 1:].astype(np.float64)
    return StepResult(arrays["new_tokens"].copy(), counts, tuple(log_probs), node_log_probs)

"""A language model and engines without graphs, for tests without torch.

``FakeTargetEngine`` is a small language model behind the real engine's inputs, masks and key/value cache. Its
cache holds (token, position) in place of keys, and what it says after a token is a hash of the tokens and
positions that the token's mask shows. So a wrong mask, position, slot, move or commit changes the text, and
``FakeLanguage`` knows, without any engine, what the text must be.
"""

import zlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.core.bundle import GraphSpec, TensorSpec
from runtime.core.token_tree import TokenTree
from runtime.decode.acceptance import Sampler
from runtime.decode.sampling_params import GREEDY, SamplingParams
from runtime.decode.target_model import USUAL_NODES
from runtime.engines.kv_cache import SlabKVCache
from runtime.engines.ort import NUMPY_TYPES, OrtForwardPass

# The bytes and an end-of-text token, which has id 0.
VOCAB_SIZE = 257
MAX_LENGTH = 512
# A token's feature: its position, and the two halves of the state after it, which float32 holds exactly.
FEATURE_SIZE = 3
# What an input holds until it is filled, and an output until it is computed. A mask shows nothing.
POISON: Mapping[str, Any] = {"int64": 2**40, "float32": np.nan, "bool": False}


class FakeLanguage:
    """A deterministic language model: other logits after every text.

    A text's state is the checksum of its (token, position) pairs.
    """

    def __init__(self, vocab_size: int = VOCAB_SIZE):
        self.vocab_size = vocab_size

    def state(self, tokens: Sequence[int], state: int = 0, start: int = 0) -> int:
        """The state of a text, or of one that goes on at position ``start`` after another ``state``."""
        positions = np.arange(start, start + len(tokens))
        return zlib.crc32(np.column_stack((np.asarray(tokens, np.int64), positions)).tobytes(), state)

    def logits(self, state: int) -> NDArray[np.float32]:
        """[V]"""
        return _logits(state, self.vocab_size)

    def feature(self, state: int, position: int) -> NDArray[np.float32]:
        """[FEATURE_SIZE], of the token at ``position``, where ``state`` is that of the text up to it."""
        return np.array([position, state >> 16, state & 0xFFFF], np.float32)

    def state_after(self, feature: Sequence[int], tokens: Sequence[int]) -> int:
        """The state of a text whose last token has this feature, and of ``tokens`` after it."""
        position, high, low = (int(value) for value in feature)
        return self.state(tokens, high << 16 | low, position + 1)

    def continuation(self, prompt: Sequence[int], count: int, sampling: SamplingParams = GREEDY) -> list[int]:
        """The next ``count`` tokens of a text, decoded one by one."""
        sampler = Sampler(sampling, prompt, self.vocab_size)
        text = list(prompt)
        for _ in range(count):
            logits = self.logits(self.state(text))
            text.append(
                sampler.accept(TokenTree.root(text[-1]), logits.argmax(keepdims=True), logits[None]).bonus
            )
        return text[len(prompt) :]


@lru_cache(maxsize=100_000)
def _logits(state: int, vocab_size: int) -> NDArray[np.float32]:
    found = np.random.default_rng(state).normal(size=vocab_size, scale=2.0).astype(np.float32)
    found.flags.writeable = False
    return found


LANGUAGE = FakeLanguage()


class FakeForwardPass(OrtForwardPass):
    """A pass with the real engine's masks, whose graph is the engine's ``compute``."""

    def __init__(self, engine: "FakeEngine", axes: Mapping[str, int], slot: int, also: Sequence[str]):
        self.engine, self.slot, self.axes = engine, slot, {**axes, "S": engine.kv.capacity}
        outputs = [tensor for tensor in engine.spec.outputs if tensor.name in engine.outputs.union(also)]
        self.inputs = {tensor.name: self._poisoned(tensor) for tensor in engine.spec.inputs}
        self.outputs = {tensor.name: self._poisoned(tensor) for tensor in outputs}

    def _poisoned(self, tensor: TensorSpec) -> NDArray[Any]:
        shape = [self.axes[size] if isinstance(size, str) else size for size in tensor.shape]
        return np.full(shape, POISON[tensor.dtype], NUMPY_TYPES[tensor.dtype])

    def run(self) -> None:
        assert self.axes["S"] == self.engine.kv.capacity, "the cache has moved since this pass was prepared"
        for name, array in self.inputs.items():
            poisoned = np.isnan(array) if array.dtype == np.float32 else array == POISON["int64"]
            assert not poisoned.any(), f"{name} was not filled: {array}"
        self.engine.passes.append(self.axes)
        self.engine.compute(self, self.inputs, self.outputs)


class FakeEngine:
    """An engine whose graph is ``compute``; ``spec`` names its tensors as a bundle does, without the cache's.

    outputs: those that every pass brings
    buckets: for an axis, the sizes up to which it is rounded
    passes: the axes of every pass that was run
    """

    key_block: int | None = None
    min_rows = 1
    row_multiple = 1

    def __init__(
        self,
        spec: GraphSpec,
        kv: SlabKVCache,
        *,
        outputs: Sequence[str],
        buckets: Mapping[str, Sequence[int]] | None = None,
    ):
        self.spec = spec
        self.kv = kv
        self.outputs = frozenset(outputs)
        self.buckets = buckets or {}
        self.passes: list[dict[str, int]] = []
        self._last: FakeForwardPass | None = None

    def round_up(self, **axes: int) -> dict[str, int]:
        return {
            name: min((bucket for bucket in self.buckets.get(name, ()) if bucket >= size), default=size)
            for name, size in axes.items()
        }

    def forward_pass(
        self, also: tuple[str, ...] = (), /, *, slot: int = 0, reads: int | None = None, **axes: int
    ) -> FakeForwardPass:
        """A pass of new buffers; the outputs of the pass before are spoilt, as if they shared memory."""
        assert self.round_up(**axes) == axes, f"no pass was captured for {axes}"
        for array in self._last.outputs.values() if self._last else ():
            array[...] = POISON[array.dtype.name]
        self._last = FakeForwardPass(self, axes, slot, also)
        return self._last

    def compute(
        self, forward: FakeForwardPass, inputs: dict[str, NDArray[Any]], outputs: dict[str, NDArray[Any]]
    ) -> None:
        """Fill ``outputs``; the cache's keys of sequence b are in slot ``forward.slot + b``."""
        raise NotImplementedError

    def write_keys(self, slot: int, start: int, keys: NDArray[Any]) -> NDArray[np.float32]:
        """Write ``keys`` [N, D] behind ``start`` positions of a slot; returns all its keys [S, D]."""
        cached = self.kv.slab[0, slot, 0]
        assert start + len(keys) <= len(cached), "the cache was not reserved"
        cached[start : start + len(keys), : keys.shape[1]] = keys
        return cached


class FakeTargetEngine(FakeEngine):
    """``FakeLanguage`` as a target model with a cache. A feature is ``FakeLanguage.feature``."""

    def __init__(
        self,
        *,
        language: FakeLanguage = LANGUAGE,
        max_num_seqs: int = 1,
        buckets: Mapping[str, Sequence[int]] | None = None,
    ):
        inputs = (
            TensorSpec("input_ids", ("B", "N"), "int64"),
            TensorSpec("position_ids", ("B", "N"), "int64"),
            TensorSpec("attn_mask", ("B", 1, "N", "S"), "bool"),
            TensorSpec("write_index", ("B",), "int64"),
            TensorSpec("logit_indices", ("B", "M"), "int64"),
        )
        outputs = (
            TensorSpec("logits", ("B", "M", language.vocab_size), "float32"),
            TensorSpec("next_tokens", ("B", "M"), "int64"),
            TensorSpec("features", ("B", "N", FEATURE_SIZE), "float32"),
        )
        widest = max([USUAL_NODES, *(buckets or {}).get("N", ())])
        kv = fake_cache(max_num_seqs, head_dim=2, max_capacity=MAX_LENGTH + widest)
        super().__init__(GraphSpec(inputs, outputs), kv, outputs=("next_tokens", "features"), buckets=buckets)
        self.language = language

    def compute(
        self, forward: FakeForwardPass, inputs: dict[str, NDArray[Any]], outputs: dict[str, NDArray[Any]]
    ) -> None:
        for index, (tokens, start) in enumerate(zip(inputs["input_ids"], inputs["write_index"], strict=True)):
            positions, masks = inputs["position_ids"][index], inputs["attn_mask"][index, 0]
            keys = self.write_keys(forward.slot + index, start, np.column_stack((tokens, positions)))
            own = np.arange(start, start + tokens.size)
            assert masks[np.arange(tokens.size), own].all(), "an input does not attend to itself"
            states = [self._state(keys[mask]) for mask in masks]
            for node, (state, position) in enumerate(zip(states, positions, strict=True)):
                outputs["features"][index, node] = self.language.feature(state, position)
            logits = np.stack([self.language.logits(states[node]) for node in inputs["logit_indices"][index]])
            outputs["next_tokens"][index] = logits.argmax(-1)
            if "logits" in outputs:
                outputs["logits"][index] = logits

    def _state(self, seen: NDArray[np.float32]) -> int:
        """The state of the (token, position) pairs that a mask shows, in the order of their positions."""
        pairs = seen.astype(np.int64)
        return zlib.crc32(pairs[np.lexsort((pairs[:, 0], pairs[:, 1]))].tobytes())


def fake_cache(
    max_num_seqs: int,
    *,
    head_dim: int,
    max_capacity: int = 2 * MAX_LENGTH,
    bucket: int = 64,
    num_layers: int = 1,
) -> SlabKVCache:
    return SlabKVCache(
        num_layers=num_layers,
        num_slots=max_num_seqs,
        num_kv_heads=1,
        head_dim=head_dim,
        max_capacity=max_capacity,
        bucket=bucket,
    )

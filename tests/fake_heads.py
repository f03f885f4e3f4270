"""Engines of draft heads without graphs: they draft from a function and check what they are given.

A head in service reads the target model's features, which ``FakeLanguage`` makes; ``eagle_truth``
and ``hydra_truth`` draft what that language would say, so that drafts are accepted.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.core.bundle import GraphSpec, TensorSpec
from runtime.core.prefix_search import prefix_search
from runtime.decode.proposers.autoregressive import AutoregressiveProposer
from runtime.decode.proposers.parallel import ParallelProposer
from tests.fake_engines import FEATURE_SIZE, LANGUAGE, FakeEngine, FakeForwardPass, FakeLanguage, fake_cache

# Children's tokens [K] and log-probabilities [K], best first, from what a head knows of a node.
Children = Callable[[Sequence[int]], tuple[NDArray[np.int64], NDArray[np.float32]]]

Tensors = dict[str, NDArray[Any]]


def best_children(
    language: FakeLanguage, state: int, width: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The language's ``width`` best tokens after a text, with their log-probabilities."""
    logits = language.logits(state).astype(np.float64)
    tokens = np.argsort(-logits)[:width]
    log_probs = logits[tokens] - np.log(np.exp(logits).sum())
    return tokens, log_probs.astype(np.float32)


def eagle_truth(first_token: int, width: int, language: FakeLanguage = LANGUAGE) -> Children:
    """For texts that begin with ``first_token``, which the head does not read."""
    return lambda path: best_children(language, language.state([first_token, *path]), width)


def hydra_truth(width: int, language: FakeLanguage = LANGUAGE) -> Children:
    """From the last feature and the path."""

    def children(key: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        state = language.state_after(key[:FEATURE_SIZE], key[FEATURE_SIZE:])
        return best_children(language, state, width)

    return children


class FakeHead(FakeEngine):
    """An autoregressive head, whose children are ``children`` of what a node can see."""

    def __init__(
        self,
        children: Children,
        width: int,
        inputs: Sequence[TensorSpec],
        *,
        state_size: int,
        num_layers: int,
        max_num_seqs: int,
    ):
        outputs = (
            TensorSpec("child_tokens", ("B", "M", width), "int64"),
            TensorSpec("child_logprobs", ("B", "M", width), "float32"),
            TensorSpec("new_states", ("B", "P", state_size), "float32"),
        )
        kv = fake_cache(max_num_seqs, num_layers=num_layers, head_dim=2, bucket=16)
        super().__init__(GraphSpec(tuple(inputs), outputs), kv, outputs=[tensor.name for tensor in outputs])
        self.children = children

    @property
    def nodes_expanded(self) -> list[int]:
        """Of every pass that was run."""
        return [axes["M"] for axes in self.passes]


class FakeEagle(FakeHead):
    """Reads tokens back from the positions that a query's mask shows it, and states from their parents'.

    The cache holds (token, position) in place of keys. A state is (checksum of the path, its length).
    """

    STATE_SIZE = 2

    def __init__(self, children: Children, width: int, *, max_num_seqs: int = 1):
        inputs = (
            TensorSpec("features", ("B", "A", FEATURE_SIZE), "float32"),
            TensorSpec("context_token_ids", ("B", "A"), "int64"),
            TensorSpec("context_position_ids", ("B", "A"), "int64"),
            TensorSpec("query_indices", ("B", "Q"), "int64"),
            TensorSpec("states", ("B", "N", self.STATE_SIZE), "float32"),
            TensorSpec("token_ids", ("B", "N"), "int64"),
            TensorSpec("position_ids", ("B", "N"), "int64"),
            TensorSpec("attn_mask", ("B", 1, "P", "S"), "bool"),
            TensorSpec("write_index", ("B",), "int64"),
        )
        super().__init__(
            children, width, inputs, state_size=self.STATE_SIZE, num_layers=1, max_num_seqs=max_num_seqs
        )

    def compute(self, forward: FakeForwardPass, inputs: Tensors, outputs: Tensors) -> None:
        given = {name: array[0] for name, array in inputs.items()}
        tokens = np.concatenate((given["context_token_ids"], given["token_ids"]))
        positions = np.concatenate((given["context_position_ids"], given["position_ids"]))
        start, count = int(given["write_index"]), given["context_token_ids"].size
        keys = self.write_keys(forward.slot, start, np.column_stack((tokens, positions)))
        # A feature holds its own position.
        assert np.array_equal(given["features"][:, 0], given["context_position_ids"])
        queries = [*given["query_indices"], *range(count, tokens.size)]
        for index, query in enumerate(queries):
            seen = keys[given["attn_mask"][0, index]]
            seen = seen[np.argsort(seen[:, 1])]
            assert np.array_equal(seen[:, 1], np.arange(len(seen)))  # every position once, none missing
            assert int(seen[-1, 0]) == tokens[query]
            assert int(seen[-1, 1]) == positions[query]
            path = seen[:, 0].astype(int).tolist()
            if query >= count:
                assert np.array_equal(given["states"][query - count], self.state_of(path[:-1]))
            outputs["new_states"][0, index] = self.state_of(path)
            outputs["child_tokens"][0, index], outputs["child_logprobs"][0, index] = self.children(path)

    @staticmethod
    def state_of(path: Sequence[int]) -> NDArray[np.float32]:
        return np.array([hash(tuple(path)) % 65521, len(path)], np.float32)


class FakeHydra(FakeHead):
    """Reads a node's path from its depth's input; the state is the last feature.

    ``children`` is asked for the feature and the path. With a layer (Hydra++) the head attends to the
    context, and its cache holds the features' positions.
    """

    def __init__(
        self, children: Children, width: int, depth: int, *, num_layers: int = 0, max_num_seqs: int = 1
    ):
        self.depth = depth
        inputs = [
            TensorSpec("features", ("B", "A", FEATURE_SIZE), "float32"),
            TensorSpec("query_indices", ("B", "Q"), "int64"),
            TensorSpec("states", ("B", "N", FEATURE_SIZE), "float32"),
            *(TensorSpec(f"path_ids_{d}", ("B", f"M{d}", d + 1), "int64") for d in range(depth)),
        ]
        if num_layers:
            inputs += [
                TensorSpec("context_position_ids", ("B", "A"), "int64"),
                TensorSpec("attn_mask", ("B", 1, "Q", "S"), "bool"),
                TensorSpec("write_index", ("B",), "int64"),
            ]
        super().__init__(
            children, width, inputs, state_size=FEATURE_SIZE, num_layers=num_layers, max_num_seqs=max_num_seqs
        )

    def compute(self, forward: FakeForwardPass, inputs: Tensors, outputs: Tensors) -> None:
        given = {name: array[0] for name, array in inputs.items()}
        roots = given["features"][given["query_indices"]]
        if "attn_mask" in given and roots.size:
            keys = self.write_keys(forward.slot, int(given["write_index"]), given["features"][:, :1])
            assert np.array_equal(given["context_position_ids"], given["features"][:, 0])
            assert np.array_equal(keys[given["attn_mask"][0, 0], 0], np.arange(roots[0, 0] + 1))
        states = np.concatenate((roots, given["states"]))
        assert states.shape == (1, FEATURE_SIZE)
        outputs["new_states"][0] = states
        paths = [path for d in range(self.depth) for path in given[f"path_ids_{d}"].tolist()]
        for index, path in enumerate(paths):
            outputs["child_tokens"][0, index], outputs["child_logprobs"][0, index] = self.children(
                [*states[0].astype(int).tolist(), *path]
            )


class FakeParallelHead(FakeEngine):
    """A head whose frames hold what the language says greedily after the last feature and the root.

    Frame t's most probable token is right; a second label is wrong, and a blank has some probability. The
    cache holds the features' first two values.
    """

    WIDTH = 2

    def __init__(self, *, max_num_seqs: int = 1, buckets: Mapping[str, Sequence[int]] | None = None):
        inputs = (
            TensorSpec("features", ("B", "A", FEATURE_SIZE), "float32"),
            TensorSpec("context_position_ids", ("B", "A"), "int64"),
            TensorSpec("anchor_ids", ("B", 1), "int64"),
            TensorSpec("frame_position_ids", ("B", "T"), "int64"),
            TensorSpec("attn_mask", ("B", 1, "T", "S"), "bool"),
            TensorSpec("write_index", ("B",), "int64"),
        )
        outputs = (
            TensorSpec("frame_tokens", ("B", "T", self.WIDTH), "int64"),
            TensorSpec("frame_logprobs", ("B", "T", self.WIDTH), "float32"),
            TensorSpec("blank_logprobs", ("B", "T"), "float32"),
        )
        kv = fake_cache(max_num_seqs, head_dim=FEATURE_SIZE)
        super().__init__(
            GraphSpec(inputs, outputs), kv, outputs=[tensor.name for tensor in outputs], buckets=buckets
        )

    def compute(self, forward: FakeForwardPass, inputs: Tensors, outputs: Tensors) -> None:
        outputs["frame_logprobs"][...] = np.log([0.7, 0.1])
        outputs["blank_logprobs"][...] = np.log(0.15)
        for index in range(len(inputs["features"])):
            given = {name: array[index] for name, array in inputs.items()}
            frames = given["frame_position_ids"]
            # Frames have no features: their own positions follow the padded context.
            rows = np.concatenate((given["features"], np.zeros((frames.size, FEATURE_SIZE), np.float32)))
            rows[len(given["features"]) :, 0] = frames
            keys = self.write_keys(forward.slot + index, int(given["write_index"]), rows)
            masks = given["attn_mask"][0]
            assert (masks == masks[0]).all()
            seen = keys[masks[0]]
            assert np.array_equal(np.sort(seen[:, 0]), np.arange(frames[-1] + 1))
            last = seen[seen[:, 0] == frames[0] - 1][0]
            root = int(given["anchor_ids"][0])
            outputs["frame_tokens"][index] = [
                (token, (token + 1) % LANGUAGE.vocab_size) for token in self._greedy(last, root, frames.size)
            ]

    def _greedy(self, feature: NDArray[np.float32], root: int, count: int) -> list[int]:
        tokens: list[int] = []
        for _ in range(count):
            state = LANGUAGE.state_after(feature.astype(int).tolist(), [root, *tokens])
            tokens.append(int(LANGUAGE.logits(state).argmax()))
        return tokens


def parallel_proposer(
    engine: FakeParallelHead, *, num_frames: int = 6, max_num_seqs: int = 1
) -> ParallelProposer:
    return ParallelProposer(
        engine, num_frames=num_frames, search=prefix_search, spare_frames=1, max_num_seqs=max_num_seqs
    )


def autoregressive_proposer(
    engine: FakeEagle | FakeHydra, max_depth: int, *, max_num_seqs: int = 1, **options: Any
) -> AutoregressiveProposer:
    """options: those of ``AutoregressiveProposer``; by default no level is narrowed or left out."""
    return AutoregressiveProposer(
        engine,
        max_depth=max_depth,
        heads_per_depth=isinstance(engine, FakeHydra),
        max_num_seqs=max_num_seqs,
        **{"beam_width": 10_000, "min_level_probability": 0.0, **options},
    )

"""Sequential drafting against an exhaustive search, on engines that check what they are given."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from runtime.engines.kv_cache import KVCache
from runtime.proposers.autoregressive import AutoregressiveProposer
from runtime.trees.level_expansion import TreeExpansion
from runtime.trees.token_tree import ROOT_PARENT, TokenTree

ANCHOR, FEATURE_SIZE, STATE_SIZE = 7, 3, 2
UNLIMITED = 10_000
# Both sides start from the same float32 log-probabilities and add in float64, in the same order.
RTOL = 1e-12

# (context and path) -> children's tokens and log-probabilities, best first
Language = Callable[[Sequence[int]], tuple[NDArray[np.int64], NDArray[np.float32]]]


def make_language(seed: int, width: int, sharpness: float = 2.0) -> Language:
    """A random distribution over children after every sequence of tokens."""

    def children(tokens: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        random = np.random.default_rng((seed, len(tokens), *tokens))
        weights = np.exp(random.normal(size=width + 2) * sharpness)
        log_probs = np.sort(np.log(weights / weights.sum()))[::-1][:width]
        return random.permutation(20)[:width], log_probs.astype(np.float32)

    return children


def exhaustive(language: Language, context: Sequence[int], depth: int) -> dict[tuple[int, ...], float]:
    """Log-probabilities of every path below the context's last token."""
    found: dict[tuple[int, ...], float] = {}
    level: dict[tuple[int, ...], float] = {(): 0.0}
    for _ in range(depth):
        below = {}
        for path, score in level.items():
            tokens, log_probs = language([*context, *path])
            for token, log_prob in zip(tokens.tolist(), log_probs.tolist(), strict=True):
                below[*path, token] = score + log_prob
        found |= below
        level = below
    return found


def check_best(tree: TokenTree, expected: dict[tuple[int, ...], float], num_nodes: int) -> None:
    """The tree holds the best nodes of all, best first, each after its parent."""
    paths = [tuple(tree.path(node)) for node in range(1, len(tree))]
    assert len(paths) == len(set(paths)) == min(num_nodes, len(expected))
    np.testing.assert_allclose(tree.log_probs[1:], [expected[path] for path in paths], rtol=RTOL)
    best = sorted(expected.values(), reverse=True)[:num_nodes]
    np.testing.assert_allclose(tree.log_probs[1:], best, rtol=RTOL)
    check_valid(tree)


def check_valid(tree: TokenTree) -> None:
    assert (tree.tokens[0], tree.parents[0], tree.depths[0]) == (ANCHOR, ROOT_PARENT, 0)
    assert tree.log_probs[0] == 0.0
    assert np.all(tree.parents[1:] < np.arange(1, len(tree)))
    assert np.array_equal(tree.depths[1:], tree.depths[tree.parents[1:]] + 1)
    assert np.all(np.diff(tree.log_probs) <= 0)
    assert [a.dtype for a in (tree.tokens, tree.parents, tree.depths)] == [np.int64] * 3
    assert tree.log_probs.dtype == np.float64


def grow(language: Language, depth: int, num_nodes: int, width: int) -> tuple[TokenTree, list[int]]:
    """The grown tree, and how many nodes of every level were expanded."""
    growth = TreeExpansion(ANCHOR, num_nodes)
    paths: list[tuple[int, ...]] = [()]
    expanded = []
    for level in range(depth):
        found = [language([ANCHOR, *path]) for path in paths]
        growth.add(np.array([tokens for tokens, _ in found]), np.array([probs for _, probs in found]))
        frontier = growth.frontier(width)
        paths = [(*paths[row], int(token)) for row, token in zip(frontier.rows, frontier.tokens, strict=True)]
        if not paths:
            break
        if level < depth - 1:
            expanded.append(len(paths))
    return growth.tree(), expanded


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    width=st.integers(1, 4),
    depth=st.integers(1, 4),
    num_nodes=st.integers(1, 60),
    sharpness=st.sampled_from([0.0, 0.5, 3.0]),
)
def test_growth_finds_the_best_nodes_of_all(
    seed: int, width: int, depth: int, num_nodes: int, sharpness: float
) -> None:
    language = make_language(seed, width, sharpness)
    tree, _ = grow(language, depth, num_nodes, UNLIMITED)
    check_best(tree, exhaustive(language, [ANCHOR], depth), num_nodes)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), num_nodes=st.integers(1, 40), beam_width=st.integers(1, 5))
def test_a_limited_width_still_gives_the_best_of_what_was_seen(
    seed: int, num_nodes: int, beam_width: int
) -> None:
    language = make_language(seed, 4)
    tree, expanded = grow(language, 4, num_nodes, beam_width)
    assert max(expanded, default=0) <= beam_width
    check_valid(tree)
    expected = exhaustive(language, [ANCHOR], 4)
    for node in range(1, len(tree)):
        assert tree.log_probs[node] == pytest.approx(expected[tuple(tree.path(node))], rel=RTOL)
    # Every expanded level offers its best nodes' children: the greedy path is never missed.
    exact, _ = grow(language, 4, num_nodes, UNLIMITED)
    assert tree.path(1) == exact.path(1)


def table(probs: list[float]) -> Language:
    """The same distribution after everything."""
    tokens = np.arange(10, 10 + len(probs))
    return lambda path: (tokens, np.log(np.array(probs)).astype(np.float32))


@pytest.mark.parametrize(
    ("probs", "num_nodes", "expanded"),
    [
        ([0.6, 0.3], 1, []),  # the best child is the tree
        ([0.6, 0.3], 2, [1]),  # a child of the first, 0.36, beats the second
        ([0.5, 0.45], 2, [1]),  # 0.25 does not, but who knows before the pass
        ([0.4, 0.35, 0.2], 3, [2]),  # of four children of 0.16 and less none comes in: it ends there
        ([1.0, 0.0], 4, [1, 1, 1]),  # what has no probability is never a node
    ],
)
def test_no_pass_without_a_chance(probs: list[float], num_nodes: int, expanded: list[int]) -> None:
    with np.errstate(divide="ignore"):
        tree, found = grow(table(probs), 4, num_nodes, UNLIMITED)
    assert found == expanded
    assert len(tree) <= num_nodes + 1


@pytest.mark.parametrize(
    ("min_level_probability", "levels"),
    [(0.0, 3), (0.7, 3), (0.75, 2), (0.85, 1), (0.95, 0)],
)
def test_no_pass_for_a_level_that_is_hardly_reached(min_level_probability: float, levels: int) -> None:
    """Of two children, 0.6 and 0.3, all are on the frontier: levels are reached with 0.9, 0.81, 0.729."""
    growth = TreeExpansion(ANCHOR, 40)
    tokens, log_probs = np.array([[5, 6]]), np.log(np.array([[0.6, 0.3]], np.float32))
    growth.add(tokens, log_probs)
    found = 0
    while (count := growth.frontier(UNLIMITED, min_level_probability).tokens.size) and found < 3:
        growth.add(tokens.repeat(count, axis=0), log_probs.repeat(count, axis=0))
        found += 1
    assert found == levels


def test_a_certain_child_comes_after_its_parent() -> None:
    """Even where rounding puts its log-probability above zero."""
    growth = TreeExpansion(ANCHOR, 4)
    for token in (5, 6, 5):
        growth.add(np.array([[token]]), np.array([[1e-6]], np.float32))
        growth.frontier(1)
    tree = growth.tree()
    assert tree.path(3) == [5, 6, 5]
    assert tree.log_probs.tolist() == [0.0] * 4
    check_valid(tree)


def test_an_empty_tree_is_a_lone_anchor() -> None:
    growth = TreeExpansion(ANCHOR, 0)
    growth.add(np.array([[5]]), np.zeros((1, 1), np.float32))
    assert growth.frontier(4).tokens.size == 0
    assert len(growth.tree()) == 1


class FakeStep:
    """Buffers of one shape; whoever made the step computes."""

    def __init__(self, engine: "FakeEngine", axes: dict[str, int]):
        self.engine, self.axes = engine, axes
        self.inputs = {
            name: np.zeros([axes.get(size, size) for size in shape], dtype)
            for name, (shape, dtype) in engine.tensors(axes["S"]).items()
        }
        self.outputs: dict[str, NDArray[Any]] = {
            "child_tokens": np.full((1, axes["M"], engine.width), -1),
            "child_logprobs": np.full((1, axes["M"], engine.width), np.nan, np.float32),
            "new_states": np.full((1, axes["P"], STATE_SIZE), np.nan, np.float32),
        }

    def run(self) -> None:
        self.engine.passes.append(self.axes["M"])
        self.engine.compute(self)


class FakeEngine:
    """A language behind a graph's inputs and outputs; shapes are kept as the real engine keeps them."""

    def __init__(self, language: Language, width: int, num_layers: int, bucket: int = 16):
        self.language, self.width = language, width
        self.kv = KVCache(
            num_layers=num_layers, batch_size=1, num_kv_heads=1, head_dim=2, max_capacity=400, bucket=bucket
        )
        self.steps: dict[tuple[tuple[str, int], ...], FakeStep] = {}
        self.passes: list[int] = []

    def step(self, *, row: int = 0, **axes: int) -> FakeStep:
        axes["S"] = self.kv.capacity
        return self.steps.setdefault(tuple(axes.items()), FakeStep(self, axes))

    def tensors(self, capacity: int) -> dict[str, tuple[tuple[Any, ...], Any]]:
        raise NotImplementedError

    def compute(self, step: FakeStep) -> None:
        raise NotImplementedError


class FakeEagle(FakeEngine):
    """Reads tokens back from the rows that a query's mask shows it, and states from their parents'.

    The cache holds (token, position) in place of keys. A state is (hash of the path, its length).
    """

    def __init__(self, language: Language, width: int):
        super().__init__(language, width, num_layers=1)

    def tensors(self, capacity: int) -> dict[str, tuple[tuple[Any, ...], Any]]:
        return {
            "features": ((1, "A", FEATURE_SIZE), np.float32),
            "context_token_ids": ((1, "A"), np.int64),
            "context_position_ids": ((1, "A"), np.int64),
            "query_indices": ((1, "Q"), np.int64),
            "states": ((1, "N", STATE_SIZE), np.float32),
            "token_ids": ((1, "N"), np.int64),
            "position_ids": ((1, "N"), np.int64),
            "attn_mask": ((1, 1, "P", capacity), np.bool_),
            "write_index": ((1,), np.int64),
        }

    def compute(self, step: FakeStep) -> None:
        given = {name: array[0] for name, array in step.inputs.items()}
        tokens = np.concatenate((given["context_token_ids"], given["token_ids"]))
        positions = np.concatenate((given["context_position_ids"], given["position_ids"]))
        keys = self.kv.slab[0, 0, 0]
        start = int(given["write_index"])
        keys[start : start + tokens.size, 0] = tokens
        keys[start : start + tokens.size, 1] = positions
        # Context features are their own positions.
        assert np.array_equal(given["features"][:, 0], given["context_position_ids"])
        count = given["context_token_ids"].size
        queries = [*given["query_indices"], *range(count, tokens.size)]
        for row, query in enumerate(queries):
            seen = keys[given["attn_mask"][0, row]]
            seen = seen[np.argsort(seen[:, 1])]
            assert np.array_equal(seen[:, 1], np.arange(len(seen)))  # one row a position, none missing
            assert int(seen[-1, 0]) == tokens[query]
            assert int(seen[-1, 1]) == positions[query]
            path = seen[:, 0].astype(int).tolist()
            if query >= count:
                assert np.array_equal(given["states"][query - count], state_of(path[:-1]))
            step.outputs["new_states"][0, row] = state_of(path)
            children = self.language(path)
            step.outputs["child_tokens"][0, row], step.outputs["child_logprobs"][0, row] = children


def state_of(path: Sequence[int]) -> NDArray[np.float32]:
    return np.array([hash(tuple(path)) % 65521, len(path)], np.float32)


class FakeHydra(FakeEngine):
    """Reads the path from its input of the row's depth; the state is the last feature.

    The language is asked for the context's length and the path.
    """

    def __init__(self, language: Language, width: int, depth: int, num_layers: int):
        self.depth = depth
        super().__init__(language, width, num_layers)

    def tensors(self, capacity: int) -> dict[str, tuple[tuple[Any, ...], Any]]:
        found: dict[str, tuple[tuple[Any, ...], Any]] = {
            "features": ((1, "A", FEATURE_SIZE), np.float32),
            "query_indices": ((1, "Q"), np.int64),
            "states": ((1, "N", STATE_SIZE), np.float32),
        }
        if self.kv.slab.shape[0]:
            found |= {
                "context_position_ids": ((1, "A"), np.int64),
                "attn_mask": ((1, 1, "Q", capacity), np.bool_),
                "write_index": ((1,), np.int64),
            }
        return found | {f"path_ids_{d}": ((1, f"M{d}", d + 1), np.int64) for d in range(self.depth)}

    def compute(self, step: FakeStep) -> None:
        given = {name: array[0] for name, array in step.inputs.items()}
        roots = given["features"][given["query_indices"], 0]
        if "attn_mask" in given and roots.size:
            keys = self.kv.slab[0, 0, 0]
            start, count = int(given["write_index"]), len(given["features"])
            keys[start : start + count, 0] = given["features"][:, 0]
            assert np.array_equal(given["context_position_ids"], given["features"][:, 0])
            assert np.array_equal(keys[given["attn_mask"][0, 0], 0], np.arange(roots[0] + 1))
        states = np.concatenate((np.stack((roots, -roots), axis=1), given["states"]))
        assert states.shape == (1, STATE_SIZE)
        assert states[0, 0] == -states[0, 1]
        step.outputs["new_states"][0] = states
        rows = [path for d in range(self.depth) for path in given[f"path_ids_{d}"].tolist()]
        for row, path in enumerate(rows):
            children = self.language([int(states[0, 0]) + 1, *path])
            step.outputs["child_tokens"][0, row], step.outputs["child_logprobs"][0, row] = children


DEPTH, WIDTH = 4, 3


def eagle(seed: int, **options: Any) -> tuple[AutoregressiveProposer, FakeEagle]:
    engine = FakeEagle(make_language(seed, WIDTH), WIDTH)
    options = {"beam_width": UNLIMITED, "min_level_probability": 0.0, **options}
    return AutoregressiveProposer(
        engine, max_depth=DEPTH, heads_per_depth=False, has_cache=True, **options
    ), engine


def hydra(seed: int, num_layers: int, **options: Any) -> tuple[AutoregressiveProposer, FakeHydra]:
    engine = FakeHydra(make_language(seed, WIDTH), WIDTH, DEPTH, num_layers)
    options = {"beam_width": UNLIMITED, "min_level_probability": 0.0, "has_cache": num_layers > 0, **options}
    return AutoregressiveProposer(engine, max_depth=DEPTH, heads_per_depth=True, **options), engine


def features_of(start: int, end: int) -> NDArray[np.float32]:
    return np.repeat(np.arange(start, end, dtype=np.float32)[:, None], FEATURE_SIZE, axis=1)


def portions(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    ends = list(itertools.accumulate(sizes))
    return zip([0, *ends[:-1]], ends, strict=True)


STREAM = np.random.default_rng(5).integers(20, 60, 80)


@pytest.mark.parametrize("num_nodes", [1, 6, 30])
def test_eagle_drafts_the_best_tree_after_every_portion(num_nodes: int) -> None:
    """Tokens, positions, states, rows and masks are all checked by the fake engine on the way."""
    drafter, engine = eagle(1, beam_width=6)
    for start, end in portions([9, 1, 4, 1, 1, 3]):
        drafter.observe(0, STREAM[start:end], features_of(start, end))
        anchor = ANCHOR
        stream = [*STREAM[1:end].tolist(), anchor]
        tree = drafter.transform(drafter.draft([anchor], num_nodes)[0], anchor=anchor, num_nodes=num_nodes)
        check_valid(tree)
        expected, _ = grow(lambda path, s=stream: engine.language([*s[:-1], *path]), DEPTH, num_nodes, 6)
        assert [tree.path(n) for n in range(len(tree))] == [expected.path(n) for n in range(len(expected))]
        np.testing.assert_allclose(tree.log_probs, expected.log_probs, rtol=RTOL)
        # The bonus token is what the next portion begins with.
        STREAM[end] = anchor


@pytest.mark.parametrize("waiting", [1, 5, 512])
@pytest.mark.parametrize("sizes", [[12], [5, 7], [1, 1, 10], [4, 4, 4]])
def test_eagle_pairs_every_feature_with_the_next_token(
    sizes: list[int], waiting: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt in portions, without drafts between: each one's last row waits for the next one's token."""
    monkeypatch.setattr("runtime.chain_drafter.MAX_WAITING", waiting)
    drafter, engine = eagle(2)
    for start, end in portions(sizes):
        drafter.observe(0, STREAM[start:end], features_of(start, end))
    tree = drafter.transform(drafter.draft([ANCHOR], 20)[0], anchor=ANCHOR, num_nodes=20)
    check_best(tree, exhaustive(engine.language, [*STREAM[1:12].tolist(), ANCHOR], DEPTH), 20)


def test_eagle_outgrows_its_cache_bucket() -> None:
    drafter, engine = eagle(3, beam_width=4)
    for start in range(0, 60, 6):
        drafter.observe(0, STREAM[start : start + 6], features_of(start, start + 6))
    # No pass before a draft needs it: a step without drafts leaves the head out.
    assert engine.passes == []
    assert engine.kv.capacity == 16
    tree = drafter.transform(drafter.draft([ANCHOR], 20)[0], anchor=ANCHOR, num_nodes=5)
    assert engine.kv.capacity > 60
    best = max(exhaustive(engine.language, [*STREAM[1:60].tolist(), ANCHOR], 1).values())
    assert tree.log_probs[1] == pytest.approx(best)
    drafter.reset(0)
    assert engine.kv.capacity == 16


@pytest.mark.parametrize("num_layers", [0, 1], ids=["hydra", "hydra++"])
@pytest.mark.parametrize("num_nodes", [1, 7, 40])
def test_hydra_drafts_the_best_tree(num_layers: int, num_nodes: int) -> None:
    drafter, engine = hydra(4, num_layers)
    length = 0
    for sizes in ([7], [1], [2, 3], [4]):
        for size in sizes:
            drafter.observe(0, STREAM[length : length + size], features_of(length, length + size))
            length += size
        tree = drafter.transform(drafter.draft([ANCHOR], 20)[0], anchor=ANCHOR, num_nodes=num_nodes)
        check_best(tree, exhaustive(engine.language, [length, ANCHOR], DEPTH), num_nodes)


@pytest.mark.parametrize("make", [eagle, lambda seed, **kw: hydra(seed, 0, **kw)], ids=["eagle", "hydra"])
def test_passes_follow_the_size_of_the_tree(
    make: Callable[..., tuple[AutoregressiveProposer, FakeEngine]],
) -> None:
    found = []
    for num_nodes in (1, 4, 40):
        drafter, engine = make(6, beam_width=5)
        drafter.observe(0, STREAM[:3], features_of(0, 3))
        drafter.transform(drafter.draft([ANCHOR], 20)[0], anchor=ANCHOR, num_nodes=num_nodes)
        found.append(engine.passes)
        assert max(engine.passes) <= 5
        assert len(engine.passes) <= DEPTH
    assert found[0] == [1]
    assert sum(found[0]) < sum(found[1]) < sum(found[2])


def test_reset_forgets_the_context() -> None:
    drafter, engine = eagle(7)
    for start in range(0, 8, 2):
        drafter.observe(0, STREAM[start : start + 2], features_of(start, start + 2))
    drafter.draft([ANCHOR], 20)[0]
    drafter.observe(0, STREAM[8:9], features_of(8, 9))
    drafter.reset(0)
    with pytest.raises(RuntimeError, match="needs features: call observe"):
        drafter.draft([ANCHOR], 20)[0]
    # The same shape of pass as before, on a shorter context.
    drafter.observe(0, STREAM[:2], features_of(0, 2))
    tree = drafter.transform(drafter.draft([ANCHOR], 20)[0], anchor=ANCHOR, num_nodes=9)
    check_best(tree, exhaustive(engine.language, [int(STREAM[1]), ANCHOR], DEPTH), 9)

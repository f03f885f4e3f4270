"""Autoregressive drafting against an exhaustive search, on engines that check what they are given."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from runtime.core.token_tree import TokenTree
from runtime.decode.proposers.autoregressive import AutoregressiveProposer
from runtime.decode.proposers.base import Proposer
from runtime.engines.protocol import Features
from runtime.engines.recorder import NullRecorder, StageRecorder
from tests.fake_engines import FEATURE_SIZE
from tests.fake_heads import FakeEagle, FakeHydra, autoregressive_proposer
from tests.tree_oracles import ROOT, RTOL, check_best, check_valid, exhaustive, expand, random_children

DEPTH, WIDTH = 4, 3
STREAM: NDArray[np.int64] = np.random.default_rng(5).integers(20, 60, 80)


def eagle(seed: int, **options: Any) -> tuple[AutoregressiveProposer, FakeEagle]:
    engine = FakeEagle(random_children(seed, WIDTH), WIDTH, max_num_seqs=options.get("max_num_seqs", 1))
    return autoregressive_proposer(engine, DEPTH, **options), engine


def hydra(seed: int, num_layers: int = 0, **options: Any) -> tuple[AutoregressiveProposer, FakeHydra]:
    engine = FakeHydra(
        random_children(seed, WIDTH),
        WIDTH,
        DEPTH,
        num_layers=num_layers,
        max_num_seqs=options.get("max_num_seqs", 1),
    )
    return autoregressive_proposer(engine, DEPTH, **options), engine


def features_of(start: int, end: int) -> NDArray[np.float32]:
    """A feature holds its token's position."""
    return np.repeat(np.arange(start, end, dtype=np.float32)[:, None], FEATURE_SIZE, axis=1)


def tell(proposer: Proposer, start: int, end: int, slot: int = 0, stream: NDArray[np.int64] = STREAM) -> None:
    proposer.append_context([slot], [stream[start:end]], Features([features_of(start, end)]))


def propose(proposer: Proposer, num_nodes: int, roots: Sequence[int] = (ROOT,)) -> list[TokenTree]:
    return proposer.propose(roots, num_nodes, NullRecorder())


def portions(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    ends = list(itertools.accumulate(sizes))
    return zip([0, *ends[:-1]], ends, strict=True)


@pytest.mark.parametrize("num_nodes", [1, 6, 30])
def test_eagle_drafts_the_best_tree_after_every_portion(num_nodes: int) -> None:
    """Tokens, positions, states, slots and masks are all checked by the fake engine on the way."""
    stream = STREAM.copy()
    proposer, engine = eagle(1, beam_width=6)
    for start, end in portions([9, 1, 4, 1, 1, 3]):
        tell(proposer, start, end, stream=stream)
        (tree,) = propose(proposer, num_nodes)
        check_valid(tree)
        context = stream[1:end].tolist()
        expected, _ = expand(lambda path, c=context: engine.children([*c, *path]), DEPTH, num_nodes, 6)  # type: ignore[misc]
        assert [tree.path(n) for n in range(len(tree))] == [expected.path(n) for n in range(len(expected))]
        np.testing.assert_allclose(tree.log_probs, expected.log_probs, rtol=RTOL)
        # The bonus token is what the next portion begins with.
        stream[end] = ROOT


@pytest.mark.parametrize("max_pending", [1, 5, 512])
@pytest.mark.parametrize("sizes", [[12], [5, 7], [1, 1, 10], [4, 4, 4]])
def test_eagle_pairs_every_feature_with_the_next_token(
    sizes: list[int], max_pending: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt in portions, without drafts between: each one's last token waits for the next one's first."""
    monkeypatch.setattr("runtime.decode.proposers.base.MAX_PENDING_TOKENS", max_pending)
    proposer, engine = eagle(2)
    for start, end in portions(sizes):
        tell(proposer, start, end)
    (tree,) = propose(proposer, 20)
    check_best(tree, exhaustive(engine.children, [*STREAM[1:12].tolist(), ROOT], DEPTH), 20)


def test_eagle_outgrows_its_cache_bucket() -> None:
    proposer, engine = eagle(3, beam_width=4)
    for start in range(0, 60, 6):
        tell(proposer, start, start + 6)
    # No pass before a draft needs it: a step without drafts leaves the head out.
    assert engine.passes == []
    assert engine.kv.capacity == 16
    (tree,) = propose(proposer, 5)
    assert engine.kv.capacity > 60
    best = max(exhaustive(engine.children, [*STREAM[1:60].tolist(), ROOT], 1).values())
    assert tree.log_probs[1] == pytest.approx(best)
    proposer.release(0)
    assert engine.kv.capacity == 16


@pytest.mark.parametrize("num_layers", [0, 1], ids=["hydra", "hydra++"])
@pytest.mark.parametrize("num_nodes", [1, 7, 40])
def test_hydra_drafts_the_best_tree(num_layers: int, num_nodes: int) -> None:
    proposer, engine = hydra(4, num_layers)
    length = 0
    for sizes in ([7], [1], [2, 3], [4]):
        for size in sizes:
            tell(proposer, length, length + size)
            length += size
        (tree,) = propose(proposer, num_nodes)
        last_feature = [length - 1] * FEATURE_SIZE
        check_best(tree, exhaustive(engine.children, [*last_feature, ROOT], DEPTH), num_nodes)


MAKE: dict[str, Callable[..., tuple[AutoregressiveProposer, FakeEagle | FakeHydra]]] = {
    "eagle": eagle,
    "hydra": hydra,
    "hydra++": lambda seed, **options: hydra(seed, 1, **options),
}


@pytest.mark.parametrize("head", MAKE)
def test_passes_follow_the_size_of_the_tree(head: str) -> None:
    found = []
    for num_nodes in (1, 4, 40):
        proposer, engine = MAKE[head](6, beam_width=5)
        tell(proposer, 0, 3)
        propose(proposer, num_nodes)
        found.append(engine.nodes_expanded)
        assert max(found[-1]) <= 5
        assert len(found[-1]) <= DEPTH
    assert found[0] == [1]
    assert sum(found[0]) < sum(found[1]) < sum(found[2])


@pytest.mark.parametrize("head", MAKE)
def test_slots_do_not_see_each_other(head: str) -> None:
    """Three sequences draft what each drafts alone; one leaves, another takes its slot, a new one comes."""
    lengths = (9, 4, 13)
    streams = [np.random.default_rng(slot).integers(20, 60, 30) for slot in range(4)]

    def check(slots: Sequence[tuple[int, int]]) -> None:
        """slots: which stream every slot has, and how much of it; the next token is the root."""
        roots = [int(streams[stream][length]) for stream, length in slots]
        for tree, root, (stream, length) in zip(propose(proposer, 9, roots), roots, slots, strict=True):
            single, _ = MAKE[head](8)
            tell(single, 0, length, stream=streams[stream])
            (alone,) = propose(single, 9, [root])
            assert [tree.path(node) for node in range(10)] == [alone.path(node) for node in range(10)]

    proposer, _ = MAKE[head](8, max_num_seqs=3)
    for slot, length in enumerate(lengths):
        tell(proposer, 0, length - 1, slot, streams[slot])
    for slot, length in enumerate(lengths):
        tell(proposer, length - 1, length, slot, streams[slot])
    check([(0, 9), (1, 4), (2, 13)])

    proposer.release(0)
    proposer.swap(0, 2)
    tell(proposer, 13, 15, 0, streams[2])
    tell(proposer, 4, 5, 1, streams[1])
    tell(proposer, 0, 6, 2, streams[3])
    check([(2, 15), (1, 5), (3, 6)])


def test_stages() -> None:
    """All passes of the head are the draft."""
    proposer, engine = eagle(6, max_num_seqs=2)
    passes: list[int] = []

    class Recorder(StageRecorder):
        def mark(self, stage: str, after_ms: float | None = None) -> None:
            assert stage == "draft"
            passes.append(len(engine.passes))

    for slot in range(2):
        tell(proposer, 0, 3, slot)
    proposer.propose([ROOT, ROOT], 20, Recorder())
    assert passes == [len(engine.passes)]
    assert passes[0] > 4


def test_release_forgets_the_context() -> None:
    proposer, engine = eagle(7)
    for start in range(0, 8, 2):
        tell(proposer, start, start + 2)
    propose(proposer, 20)
    tell(proposer, 8, 9)
    proposer.release(0)
    with pytest.raises(RuntimeError, match="needs features: call append_context"):
        propose(proposer, 20)
    # The same shape of pass as before, on a shorter context.
    tell(proposer, 0, 2)
    (tree,) = propose(proposer, 9)
    check_best(tree, exhaustive(engine.children, [int(STREAM[1]), ROOT], DEPTH), 9)

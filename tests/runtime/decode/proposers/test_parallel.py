"""Parallel drafting on an engine that checks contexts, positions and masks, and drafts what is true."""

from collections.abc import Sequence

import numpy as np
import pytest

from runtime.decode.proposers.parallel import MAX_SHARED_CONTEXT, ParallelProposer
from runtime.engines.protocol import Features
from runtime.engines.recorder import NullRecorder
from tests.fake_engines import LANGUAGE
from tests.fake_heads import FakeParallelHead, parallel_proposer

TEXTS = [np.random.default_rng(slot).integers(2, 250, 120).tolist() for slot in range(3)]
NUM_FRAMES = 6


def make(max_num_seqs: int = 1) -> tuple[ParallelProposer, FakeParallelHead]:
    engine = FakeParallelHead(max_num_seqs=max_num_seqs)
    return parallel_proposer(engine, num_frames=NUM_FRAMES, max_num_seqs=max_num_seqs), engine


def tell(proposer: ParallelProposer, text: Sequence[int], start: int, end: int, slot: int = 0) -> None:
    """Append tokens ``start`` to ``end`` of a text to a slot's context."""
    features = [LANGUAGE.feature(LANGUAGE.state(text[: at + 1]), at) for at in range(start, end)]
    proposer.append_context([slot], [np.array(text[start:end])], Features([np.stack(features)]))


def check(proposer: ParallelProposer, contexts: Sequence[Sequence[int]], roots: Sequence[int]) -> None:
    """At every depth, the best node of a tree spells the true continuation."""
    trees = proposer.propose(roots, 8, NullRecorder())
    assert len(trees) == len(contexts)
    for tree, context, root in zip(trees, contexts, roots, strict=True):
        assert tree.tokens[0] == root
        assert 2 < len(tree) <= 9
        chain = [tree.path(int(np.flatnonzero(tree.depths == depth)[0])) for depth in range(1, 4)]
        expected = LANGUAGE.continuation([*context, root], 3)
        assert chain == [expected[:length] for length in (1, 2, 3)]


@pytest.mark.parametrize("max_pending", [1, 24, 512])
@pytest.mark.parametrize("sizes", [[60], [1] * 8, [30, 1, 29], [5] * 12])
def test_context_in_portions(sizes: list[int], max_pending: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What no draft has read yet is read in passes of its own once there is much of it."""
    monkeypatch.setattr("runtime.decode.proposers.base.MAX_PENDING_TOKENS", max_pending)
    proposer, engine = make()
    text, end = TEXTS[0], 0
    for size in sizes:
        tell(proposer, text, end, end + size)
        end += size
    check(proposer, [text[:end]], [7])
    # Drafts were written behind the context; the next context takes their place.
    tell(proposer, [*text[:end], 7, 8], end, end + 2)
    check(proposer, [[*text[:end], 7, 8]], [9])
    assert (len(engine.passes) == 2) == (max_pending >= end or len(sizes) == 1)


@pytest.mark.parametrize("counts", [(3, 1, 2), (1, MAX_SHARED_CONTEXT, 5), (MAX_SHARED_CONTEXT + 1, 2, 90)])
def test_contexts_of_several_sequences(counts: tuple[int, ...]) -> None:
    """Their new tokens are padded to the longest; a sequence with many reads most of them alone."""
    proposer, engine = make(max_num_seqs=3)
    for slot, (text, count) in enumerate(zip(TEXTS, counts, strict=True)):
        tell(proposer, text, 0, count, slot)
    check(proposer, [text[:count] for text, count in zip(TEXTS, counts, strict=True)], [5, 6, 7])
    shared = engine.passes[-1]
    assert shared["B"] == 3
    assert shared["A"] == max(1 if count > MAX_SHARED_CONTEXT else count for count in counts)
    assert len(engine.passes) == 1 + sum(count > MAX_SHARED_CONTEXT for count in counts)


def test_slots_are_exchanged() -> None:
    """With a context that has been read, and with one that has not."""
    for has_read in (True, False):
        proposer, _ = make(max_num_seqs=3)
        for slot, text in enumerate(TEXTS):
            tell(proposer, text, 0, 4 + slot, slot)
        if has_read:
            proposer.propose([5, 6, 7], 8, NullRecorder())
        proposer.release(0)
        proposer.swap(0, 2)
        tell(proposer, TEXTS[2], 6, 9, 0)
        tell(proposer, TEXTS[1], 5, 6, 1)
        # A new sequence in the slot that is free.
        tell(proposer, TEXTS[0], 0, 2, 2)
        check(proposer, [TEXTS[2][:9], TEXTS[1][:6], TEXTS[0][:2]], [5, 6, 7])


@pytest.mark.parametrize(("num_nodes", "num_frames"), [(1, 2), (3, 4), (5, 6), (40, 6)])
def test_as_many_frames_as_the_nodes_can_use(num_nodes: int, num_frames: int) -> None:
    """One for each node and the spare one, at most all."""
    proposer, engine = make()
    tell(proposer, TEXTS[0], 0, 3)
    (tree,) = proposer.propose([5], num_nodes, NullRecorder())
    assert engine.passes[-1]["T"] == num_frames
    assert len(tree) <= num_nodes + 1


def test_release_forgets_the_context() -> None:
    proposer, _ = make()
    tell(proposer, TEXTS[0], 0, 3)
    proposer.propose([5], 8, NullRecorder())
    tell(proposer, TEXTS[0], 3, 4)
    proposer.release(0)
    with pytest.raises(RuntimeError, match="needs features: call append_context"):
        proposer.propose([5], 8, NullRecorder())
    tell(proposer, TEXTS[1], 0, 5)
    check(proposer, [TEXTS[1][:5]], [7])

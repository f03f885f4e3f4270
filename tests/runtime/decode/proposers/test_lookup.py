"""Prompt lookup: what it finds, how it joins a tree, and that texts stay the model's own."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.core.errors import RequestError
from runtime.core.lattice import Lattice
from runtime.core.prefix_search import prefix_search
from runtime.core.token_tree import ROOT_PARENT, TokenTree
from runtime.decode.proposers.lookup import (
    LONGEST_MATCH,
    MATCH_PROBABILITIES,
    LookupProposer,
    LookupText,
    MatchCounts,
    join_chain,
)
from runtime.decoder import SpeculativeDecoder

PROMPTS = ("how many and how many and how", "a b c d a b", "nothing twice")


def test_the_longest_match_is_continued() -> None:
    text = LookupText()
    text.extend([1, 2, 3, 9, 2, 3, 7, 8, 1, 2])
    assert text.continuation(3, 3) == (3, [9, 2, 3])
    assert text.continuation(5, 3) == (0, [])
    # Of equal matches the latest is taken.
    text.extend([5, 2])
    assert text.continuation(3, 2) == (2, [7, 8])


def test_a_text_that_repeats_itself_goes_on() -> None:
    text = LookupText()
    text.extend([4, 5, 6, 4, 5])
    assert text.continuation(6, 7) == (3, [4, 5, 6, 4, 5, 6, 4])
    alone = LookupText()
    alone.extend([4])
    assert alone.continuation(4, 3) == (1, [4, 4, 4])


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 9))
def test_continuations_equal_a_search_of_the_whole_text(tokens: list[int], count: int) -> None:
    *committed, last = tokens
    text = LookupText()
    text.extend(committed)
    expected: tuple[int, list[int]] = (0, [])
    for length in range(min(LONGEST_MATCH, len(tokens)), 0, -1):
        ends = [end for end in range(length, len(tokens)) if tokens[end - length : end] == tokens[-length:]]
        if ends:
            whole = list(tokens)
            for _ in range(count):
                whole.append(whole[ends[-1] + len(whole) - len(tokens)])
            expected = (length, whole[len(tokens) :])
            break
    assert text.continuation(last, count) == expected


def test_a_text_teaches_how_far_its_matches_can_be_trusted() -> None:
    """Drafts that were right raise the probabilities of their matches' lengths, and wrong ones lower them."""
    text = LookupText()
    text.extend([1, 2, 3, 4, 8, 1])
    before = text.counts.path_probabilities(1, 3)
    assert before == pytest.approx(np.cumprod(MATCH_PROBABILITIES[:3]))
    assert text.continuation(2, 3) == (2, [3, 4, 8])
    text.extend([2, 3])  # the first draft was right, the second is not: 7 follows
    text.continuation(7, 3)
    after = text.counts
    assert after.path_probabilities(2, 1) > MATCH_PROBABILITIES[1]
    assert after.path_probabilities(3, 1) < MATCH_PROBABILITIES[2]
    assert after.path_probabilities(4, 1) == pytest.approx(MATCH_PROBABILITIES[3])
    assert MatchCounts().path_probabilities(LONGEST_MATCH + 5, 1) == pytest.approx(MATCH_PROBABILITIES[-1])


def tree_of(*nodes: tuple[int, int, float]) -> TokenTree:
    """A tree below token 0 of nodes (parent, token, probability)."""
    parents = [-1, *(parent for parent, _, _ in nodes)]
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    tokens = [0, *(token for _, token, _ in nodes)]
    probs = [1.0, *(probability for _, _, probability in nodes)]
    return TokenTree(np.array(tokens), np.array(parents), np.array(depths), np.log(probs))


def paths_of(tree: TokenTree) -> dict[tuple[int, ...], float]:
    return {tuple(tree.path(node)): float(np.exp(tree.log_probs[node])) for node in range(1, len(tree))}


def test_a_chain_joins_a_tree() -> None:
    tree = tree_of((0, 5, 0.6), (0, 6, 0.3), (1, 7, 0.4), (3, 8, 0.1))
    joined = join_chain(tree, [5, 9], np.array([0.5, 0.25]), 5)
    assert paths_of(joined) == pytest.approx(
        {
            (5,): 0.5 + 0.5 * 0.6,
            (5, 7): 0.4 * (1 - 0.25),
            (5, 9): 0.25,
            (6,): 0.3 * (1 - 0.5),
            (5, 7, 8): 0.1 * (1 - 0.25),
        }
    )
    assert joined.log_probs[0] == 0
    assert list(paths_of(join_chain(tree, [5, 9], np.array([0.5, 0.25]), 3))) == [(5,), (5, 7), (5, 9)]
    assert join_chain(tree, [], np.zeros(0), 5) is tree
    alone = join_chain(TokenTree.root(0), [3, 4], np.array([0.5, 0.25]), 8)
    assert paths_of(alone) == pytest.approx({(3,): 0.5, (3, 4): 0.25})


@given(st.data())
def test_joined_trees_are_trees(data: Any) -> None:
    """Parents come first and are never less probable, no prefix stands twice, and the root is the same."""
    nodes: list[tuple[int, int, float]] = []
    for index in range(data.draw(st.integers(0, 7))):
        parent = data.draw(st.integers(0, index))
        token = data.draw(st.integers(0, 2))
        if (parent, token) in {(p, t) for p, t, _ in nodes}:
            continue
        if parent > len(nodes):
            continue
        most = 1.0 if parent == 0 else nodes[parent - 1][2]
        nodes.append((parent, token, most * data.draw(st.floats(0.01, 1.0))))
    chain = data.draw(st.lists(st.integers(0, 2), max_size=6))
    probabilities = np.cumprod([data.draw(st.floats(0.05, 1.0)) for _ in chain])
    count = data.draw(st.integers(1, 12))
    joined = join_chain(tree_of(*nodes), chain, probabilities, count)
    if chain:
        assert len(joined) <= count + 1
    assert (joined.parents[1:] < np.arange(1, len(joined))).all()
    assert (joined.parents[1:] >= 0).all()
    assert len(paths_of(joined)) == len(joined) - 1
    parents = joined.parents[1:]
    assert (joined.log_probs[1:] <= joined.log_probs[parents] + 1e-9).all()
    assert (joined.depths[1:] == joined.depths[parents] + 1).all()


def test_certain_frames_leave_a_tree_whose_root_is_first() -> None:
    """0.6 and 0.4 as float32 logarithms add up to 1 + 4e-8, in every second frame once more."""
    unsure = np.array([np.log(np.float32(0.6)), *[-np.inf] * 3, np.log(np.float32(0.4))])
    certain = np.array([40, -1, -2, -3, -4], np.float32)
    certain -= np.log(np.exp(certain).sum())
    frames = np.array([unsure, certain, unsure, certain], np.float32)
    lattice = Lattice(
        np.array([[5, 6, 8, 9], [5, 6, 8, 9], [6, 5, 8, 9], [6, 5, 8, 9]]), frames[:, :4], frames[:, 4]
    )
    searched = prefix_search(lattice, root_token=7, num_nodes=6)
    assert searched.path(2) == [5, 6]
    assert (searched.log_probs[1:] <= searched.log_probs[searched.parents[1:]]).all()
    # The same without the search's own limit, and in another order, as another proposer may draft.
    above = tree_of((0, 5, 1 + 4e-8), (0, 6, 1e-9), (1, 6, 1 + 8e-8))
    for tree, num_nodes in itertools.product((searched, above), (1, 2, 3)):
        joined = join_chain(tree, [8, 5], np.array([1e-12, 1e-12]), num_nodes)
        assert (joined.tokens[0], joined.parents[0], joined.depths[0]) == (tree.tokens[0], ROOT_PARENT, 0)
        assert [joined.path(node) for node in range(1, len(joined))][:2] == [[5], [5, 6]][:num_nodes]
        assert (joined.parents[1:] < np.arange(1, len(joined))).all()
        assert (joined.log_probs[1:] <= joined.log_probs[joined.parents[1:]]).all()


@pytest.mark.parametrize("method", ["plain", "draft"])
@pytest.mark.parametrize("num_nodes", [1, 6])
def test_texts_are_the_models_own(tiny_bundle_dir: Path, method: str, num_nodes: int) -> None:
    plain = SpeculativeDecoder.from_bundle(tiny_bundle_dir, method="plain")
    with_lookup = SpeculativeDecoder.from_bundle(
        tiny_bundle_dir, method=method, num_nodes=num_nodes, prompt_lookup=True
    )
    for prompt in PROMPTS:
        ids = plain.prompt_tokenizer.encode(prompt)
        texts, steps = [], []
        for decoder in (plain, with_lookup):
            chunks = list(decoder.stream(ids, max_new_tokens=60, stop_token_ids=()))
            texts.append([token for chunk in chunks for token in chunk.token_ids])
            steps.append(len(chunks))
        assert texts[0] == texts[1]
    # A random model soon repeats itself.
    assert steps[1] < steps[0]


def test_several_sequences_keep_their_own_texts(tiny_bundle_dir: Path) -> None:
    """Sequences that join, end and move to other slots are decoded as alone."""
    alone = SpeculativeDecoder.from_bundle(tiny_bundle_dir, prompt_lookup=True, num_nodes=8)
    decoder = SpeculativeDecoder.from_bundle(tiny_bundle_dir, prompt_lookup=True, max_num_seqs=3, num_nodes=8)
    ids = [alone.prompt_tokenizer.encode(prompt) for prompt in PROMPTS]
    lengths = (9, 40, 23)
    expected = [
        [
            token
            for chunk in alone.stream(prompt, max_new_tokens=n, stop_token_ids=())
            for token in chunk.token_ids
        ]
        for prompt, n in zip(ids, lengths, strict=True)
    ]
    budget, batch = decoder.new_budget(), decoder.batch
    batch.clear()
    found: dict[int, list[int]] = {}
    sequences = [
        decoder.new_sequence(prompt, max_new_tokens=n, stop_token_ids=())
        for prompt, n in zip(ids, lengths, strict=True)
    ]
    for index, sequence in enumerate(sequences):
        found[index] = list(batch.enter(sequence).token_ids)
    while batch.sequences:
        for sequence, chunk in batch.step(budget):
            found[sequences.index(sequence)] += chunk.token_ids
    assert [found[index] for index in range(3)] == expected


def test_by_itself_it_joins_a_head_where_it_can(tiny_bundle_dir: Path, tiny_step_bundle: Path) -> None:
    cases: tuple[tuple[Path, dict[str, Any], bool], ...] = (
        (tiny_bundle_dir, {}, True),
        (tiny_bundle_dir, {"method": "plain"}, False),
        (tiny_bundle_dir, {"tree": "chain"}, False),
        (tiny_step_bundle, {"step": "graph"}, False),
    )
    for bundle, options, joins in cases:
        decoder = SpeculativeDecoder.from_bundle(bundle, prompt_lookup=None, num_nodes=4, **options)
        proposer = getattr(decoder.batch.runner, "proposer", None)
        assert isinstance(proposer, LookupProposer) == joins
        decoder.close()


def test_what_cannot_be_joined_is_refused(
    tiny_bundle_dir: Path, tiny_step_bundle: Path, stream_bundle_of: Any
) -> None:
    cases: tuple[tuple[Path, dict[str, Any], str], ...] = (
        (tiny_bundle_dir, {"tree": "chain"}, "make a tree together, got a chain"),
        (tiny_step_bundle, {"step": "graph"}, "graph steps do not"),
        (stream_bundle_of("streaming"), {}, "streams of the verify pass draft after every node"),
    )
    for bundle, options, problem in cases:
        with pytest.raises(RequestError, match=rf"^prompt_lookup: .*{problem}"):
            SpeculativeDecoder.from_bundle(bundle, prompt_lookup=True, **options)

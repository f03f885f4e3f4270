"""Greedy acceptance against plain greedy decoding and one-path-at-a-time verification.

The target model is a hash of the tokens so far: deterministic, and different after every prefix.
"""

import zlib
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from runtime.core.token_tree import TokenTree
from runtime.decode.acceptance import Acceptance, GreedyAcceptor
from tests.fakes import make_tree

VOCAB_SIZE = 3  # so small that random trees are often right

NextToken = Callable[[Sequence[int]], int]


def language_model(seed: int) -> NextToken:
    return lambda tokens: zlib.crc32(bytes([seed, *tokens])) % VOCAB_SIZE


def greedy_accept(tree: TokenTree, next_tokens: NDArray[np.int64]) -> Acceptance:
    return GreedyAcceptor().accept(tree, next_tokens, None)


@st.composite
def random_drafts(draw: st.DrawFn) -> list[tuple[int, int]]:
    """A random tree in which no two children of a node have the same token."""
    drafts: list[tuple[int, int]] = []
    for _ in range(draw(st.integers(0, 14))):
        draft = (draw(st.integers(0, len(drafts))), draw(st.integers(0, VOCAB_SIZE - 1)))
        if draft not in drafts:
            drafts.append(draft)
    return drafts


def chain_drafts(tokens: Sequence[int]) -> list[tuple[int, int]]:
    return list(enumerate(tokens))


def star_drafts(tokens: Sequence[int]) -> list[tuple[int, int]]:
    return [(0, token) for token in tokens]


DRAFTS = {
    "chain": st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=8).map(chain_drafts),
    "star": st.permutations(range(VOCAB_SIZE)).map(star_drafts),
    "random": random_drafts(),
}


def verify(tree: TokenTree, prefix: Sequence[int], next_token: NextToken) -> NDArray[np.int64]:
    """What the target model returns: its choice after each node's own path."""
    context = [*prefix, int(tree.tokens[0])]
    return np.array([next_token([*context, *tree.path(node)]) for node in range(len(tree))], np.int64)


def accept_one_path_at_a_time(
    tree: TokenTree, prefix: Sequence[int], next_token: NextToken
) -> tuple[list[int], int]:
    """Check every root-to-node path on its own; the longest that greedy decoding writes wins."""
    context = [*prefix, int(tree.tokens[0])]
    accepted: list[int] = []
    for node in range(len(tree)):
        path = tree.path(node)
        if len(path) > len(accepted) and path == decode_greedily(context, len(path), next_token):
            accepted = path
    return accepted, next_token([*context, *accepted])


def decode_greedily(prefix: Sequence[int], count: int, next_token: NextToken) -> list[int]:
    tokens = list(prefix)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prefix) :]


@pytest.mark.parametrize("kind", DRAFTS)
def test_equals_one_path_at_a_time(kind: str) -> None:
    @settings(max_examples=80)
    @given(drafts=DRAFTS[kind], seed=st.integers(0, 255), root=st.integers(0, VOCAB_SIZE - 1))
    def check(drafts: list[tuple[int, int]], seed: int, root: int) -> None:
        model, prefix = language_model(seed), [1, 2]
        tree = make_tree(root, drafts)
        acceptance = greedy_accept(tree, verify(tree, prefix, model))

        accepted, bonus = accept_one_path_at_a_time(tree, prefix, model)
        assert tree.tokens[acceptance.path[1:]].tolist() == accepted
        assert acceptance.bonus == bonus
        # A path from the root down, which the KV commit relies on.
        assert acceptance.path[0] == 0
        assert tree.parents[acceptance.path[1:]].tolist() == acceptance.path[:-1].tolist()
        assert acceptance.path.dtype == np.int64
        assert type(acceptance.bonus) is int

    check()


@settings(max_examples=60)
@given(data=st.data(), seed=st.integers(0, 255), kind=st.sampled_from(sorted(DRAFTS)))
def test_steps_write_what_plain_greedy_decoding_writes(data: st.DataObject, seed: int, kind: str) -> None:
    model = language_model(seed)
    prompt = [2, 0, 1]
    context, root = prompt, model(prompt)
    output = [root]
    while len(output) < 20:
        tree = make_tree(root, data.draw(DRAFTS[kind]))
        acceptance = greedy_accept(tree, verify(tree, context, model))
        context = [*context, *tree.tokens[acceptance.path].tolist()]
        root = acceptance.bonus
        output += [*tree.tokens[acceptance.path[1:]].tolist(), root]
    assert output == decode_greedily(prompt, len(output), model)


@pytest.mark.parametrize(
    ("drafts", "next_tokens", "path", "bonus"),
    [
        ([], [9], [0], 9),
        (chain_drafts([4, 5, 6]), [4, 5, 6, 7], [0, 1, 2, 3], 7),  # all accepted
        (chain_drafts([4, 5, 6]), [4, 8, 6, 7], [0, 1], 8),  # node 3 fits node 2, which was rejected
        (chain_drafts([4, 5, 6]), [8, 5, 6, 7], [0], 8),  # none
        (star_drafts([4, 5, 6]), [6, 1, 2, 3], [0, 3], 3),
        ([(0, 4), (0, 5), (1, 6), (2, 6), (2, 7)], [5, 6, 7, 9, 9, 3], [0, 2, 5], 3),
        # Node 2 has the token wanted after node 1, but is the root's child.
        ([(0, 4), (0, 5)], [4, 5, 1], [0, 1], 5),
    ],
)
def test_golden(drafts: list[tuple[int, int]], next_tokens: list[int], path: list[int], bonus: int) -> None:
    acceptance = greedy_accept(make_tree(3, drafts), np.array(next_tokens, np.int64))
    assert (acceptance.path.tolist(), acceptance.bonus) == (path, bonus)


def test_a_walk_asks_for_the_nodes_of_its_path_in_order() -> None:
    """Sampling relies on it: every token is drawn once."""
    asked: list[int] = []

    def choose(node: int) -> int:
        asked.append(node)
        return [6, 1, 2, 4][node]

    path, token = make_tree(3, [(0, 5), (0, 6), (2, 2)]).walk(choose)
    assert (asked, path.tolist(), token) == ([0, 2, 3], [0, 2, 3], 4)

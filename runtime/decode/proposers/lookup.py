"""Prompt lookup: what followed the last tokens earlier in a text is drafted again (Saxena, 2023).

It needs no head, and costs no pass. Summaries, edits of code and answers about a document repeat much of
their prompt.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from runtime.core.token_tree import ROOT_PARENT, TokenTree
from runtime.decode.proposers.base import Proposer, swap_entries
from runtime.engines.protocol import Features
from runtime.engines.recorder import Recorder

# By the number of tokens that match, from 1 on: how often the next token is that of the earlier place.
# Counted over 1,500 greedy answers of SmolLM2-135M-Instruct to prompts of its own; the last is for
# longer matches. A token that was right makes the match one longer, so the table also serves later drafts.
MATCH_PROBABILITIES = (0.19, 0.50, 0.58, 0.71, 0.76, 0.80, 0.82, 0.88)
LONGEST_MATCH = len(MATCH_PROBABILITIES)
# The table weighs as much as this many observations in the text itself.
PRIOR_COUNT = 8.0
# A draft that is found but less probable than this is not verified. Where a head fills the tree, only more
# probable drafts displace its own; the limit is for bundles without one.
LEAST_PROBABILITY = 0.25


class MatchCounts:
    """How often matches of every length have been right in one text."""

    def __init__(self) -> None:
        self._right = PRIOR_COUNT * np.array(MATCH_PROBABILITIES)
        self._seen = np.full(LONGEST_MATCH, PRIOR_COUNT)

    def add(self, length: int, *, is_right: bool) -> None:
        """Count the token after a match of ``length`` tokens."""
        at = min(length, LONGEST_MATCH) - 1
        self._seen[at] += 1
        self._right[at] += is_right

    def path_probabilities(self, length: int, count: int) -> NDArray[np.float64]:
        """The probabilities [count] that the first 1, 2, ... tokens after a match of ``length`` are right."""
        at = np.minimum(np.arange(length, length + count), LONGEST_MATCH) - 1
        return np.cumprod(self._right[at] / self._seen[at])


class LookupText:
    """The committed tokens of a sequence, with the last place of every run of 1 to LONGEST_MATCH tokens."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.counts = MatchCounts()
        # By the tokens of a run: the place of the token that follows its last occurrence.
        self._after: dict[tuple[int, ...], int] = {}
        # The drafts of the last step: the length of the match, the continuation, and where it begins.
        self._drafted: tuple[int, list[int], int] | None = None

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.tokens.append(token)
            end = len(self.tokens)
            for length in range(1, min(LONGEST_MATCH, end) + 1):
                self._after[tuple(self.tokens[end - length :])] = end

    def continuation(self, last_token: int, count: int) -> tuple[int, list[int]]:
        """The length of the longest match, and the ``count`` tokens that followed it; 0 and [] for none.

        last_token: the text's last one, which is not among its tokens yet
        A match near the end is followed by its own continuation, so that a text that repeats itself goes on.
        """
        self._learn(last_token)
        suffix = (*self.tokens[max(0, len(self.tokens) - LONGEST_MATCH + 1) :], last_token)
        for start in range(len(suffix)):
            after = self._after.get(suffix[start:])
            if after is None:
                continue
            # The text from there on, which the drafts lengthen.
            source = [*self.tokens[after : after + count], last_token][:count]
            found: list[int] = []
            for _ in range(count):
                token = source[len(found)]
                found.append(token)
                source.append(token)
            self._drafted = (len(suffix) - start, found, len(self.tokens) + 1)
            return len(suffix) - start, found
        return 0, []

    def _learn(self, last_token: int) -> None:
        """Count which of the last drafts were right, up to the first that was not."""
        if self._drafted is None:
            return
        length, drafts, start = self._drafted
        self._drafted = None
        for index, (draft, token) in enumerate(zip(drafts, [*self.tokens[start:], last_token], strict=False)):
            self.counts.add(length + index, is_right=draft == token)
            if draft != token:
                return


class LookupProposer(Proposer):
    """Joins the trees of ``inner`` with what the text itself says; the number of nodes stays the same."""

    def __init__(self, inner: Proposer, max_num_seqs: int):
        self.inner = inner
        self._texts = [LookupText() for _ in range(max_num_seqs)]

    def append_context(
        self, slots: Sequence[int], token_ids: Sequence[NDArray[np.int64]], features: Features
    ) -> None:
        self.inner.append_context(slots, token_ids, features)
        for slot, tokens in zip(slots, token_ids, strict=True):
            self._texts[slot].extend(tokens.tolist())

    def propose(self, last_tokens: Sequence[int], num_nodes: int, recorder: Recorder) -> list[TokenTree]:
        trees = self.inner.propose(last_tokens, num_nodes, recorder)
        joined = []
        for tree, text, token in zip(trees, self._texts[: len(trees)], last_tokens, strict=True):
            length, found = text.continuation(token, num_nodes)
            probabilities = text.counts.path_probabilities(length, len(found))
            count = int((probabilities >= LEAST_PROBABILITY).sum())
            joined.append(join_chain(tree, found[:count], probabilities[:count], num_nodes))
        return joined

    def swap(self, first: int, second: int) -> None:
        self.inner.swap(first, second)
        swap_entries(self._texts, first, second)

    def save_context(self, slot: int, start: int, end: int) -> NDArray[np.float32]:
        return self.inner.save_context(slot, start, end)

    def load_context(
        self, slot: int, tokens: NDArray[np.int64], blocks: Sequence[NDArray[np.float32]]
    ) -> None:
        self.inner.load_context(slot, tokens, blocks)
        self._texts[slot].extend(tokens.tolist())

    def release(self, slot: int) -> None:
        self.inner.release(slot)
        self._texts[slot] = LookupText()


def join_chain(
    tree: TokenTree, chain: Sequence[int], probabilities: NDArray[np.float64], num_nodes: int
) -> TokenTree:
    """The best ``num_nodes`` drafts of a tree and of a chain below its root.

    probabilities: [C], that the first 1, 2, ... tokens of the chain are right; they do not grow

    The text goes on with the first d tokens of the chain with the probability c_d, and otherwise as the tree
    says. So a prefix of the chain has c_d + (1 - c_d) p, where p is its probability in the tree, 0 if it has
    no node there, and a node that leaves the chain behind d tokens has (1 - c_(d+1)) p. A parent's is never
    below its child's, but for rounding, which is taken out. So the best are a tree.
    """
    if not chain:
        return tree
    tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
    depths = tree.depths.tolist()
    probs = np.exp(tree.log_probs).tolist()
    on_chain = [0]  # the chain's nodes in the tree, the root first
    edges = zip(parents, tokens, strict=True)
    children = {edge: node for node, edge in enumerate(edges)}
    for token in chain:
        node = children.get((on_chain[-1], token))
        if node is None:
            break
        on_chain.append(node)
    # Of every node the number of chain tokens that its path begins with.
    shared = [0] * len(tokens)
    position = {node: depth for depth, node in enumerate(on_chain)}
    for node in range(1, len(tokens)):
        depth = position.get(node)
        shared[node] = shared[parents[node]] if depth is None else depth
        if depth is None and shared[node] < len(chain):
            probs[node] *= 1.0 - probabilities[shared[node]]
    for depth, node in enumerate(on_chain[1:], 1):
        probs[node] = probabilities[depth - 1] + (1.0 - probabilities[depth - 1]) * probs[node]
    last = on_chain[-1]
    for depth in range(len(on_chain), len(chain) + 1):
        tokens.append(chain[depth - 1])
        parents.append(last)
        depths.append(depth)
        probs.append(float(probabilities[depth - 1]))
        last = len(tokens) - 1
    probs[0] = 1.0
    for node in range(1, len(tokens)):
        probs[node] = min(probs[node], probs[parents[node]])
    # The root is the only node of depth 0 and none is more probable, so it comes first.
    order = np.lexsort((np.array(depths), -np.array(probs)))[: num_nodes + 1]
    place = np.full(len(tokens), ROOT_PARENT)
    place[order] = np.arange(order.size)
    new_parents = place[np.array(parents)[order]]
    new_parents[0] = ROOT_PARENT
    return TokenTree(
        np.array(tokens, np.int64)[order],
        new_parents,
        np.array(depths, np.int64)[order],
        np.log(np.maximum(np.array(probs)[order], np.finfo(np.float64).tiny)),
    )

"""The same bits for a row of the target model, whatever a pass computes beside it.

A graph with row-invariant attention (``export.graphs.layers.attention_invariant``) gives a token's logits the
same bits in plain decoding, in a tree, in a batch and in a prompt that is read in chunks. Then a text is a
function of the prompt, the weights, the library and the processor, and not of its drafts.

One condition is left. A product over the keys adds them up block by block, so a key must lie in the block in
which it lies in plain decoding. The keys of a tree lie behind the text, in the order of its nodes; those of a
chain lie where plain decoding has them. ``within_block`` cuts a tree so that the condition holds.
``keeps_bits`` tests on this machine that bits are equal, because another processor takes other kernels.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from runtime.core.token_tree import TokenTree
from runtime.decode.target_model import TargetModel
from runtime.engines.recorder import NullRecorder

# Tokens of the path whose logits are compared, and of a long chain, which takes kernels for many rows.
PATH, LONG = 6, 33


def within_block(tree: TokenTree, length: int, block: int) -> TokenTree:
    """The part of a tree behind ``length`` tokens whose accepted keys lie in the right blocks of keys.

    It is the whole tree if that does not reach over the end of a block. Otherwise it is the nodes before the
    end or the best chain, whichever should have more drafts accepted by the tree's probabilities.
    """
    room = block - length % block
    if len(tree) <= room or np.array_equal(tree.depths, np.arange(len(tree))):
        return tree
    before, chain = tree.first(room - 1), tree.subset(_best_path(tree))
    return max(before, chain, key=lambda part: np.exp(part.log_probs[1:]).sum())


def _best_path(tree: TokenTree) -> NDArray[np.int64]:
    """The path from the root that always goes to the most probable child."""
    path = [0]
    while True:
        children = np.flatnonzero(tree.parents == path[-1])
        if not children.size:
            return np.array(path, np.int64)
        path.append(int(children[tree.log_probs[children].argmax()]))


def keeps_bits(
    target_model: TargetModel, *, block: int, vocab_size: int, max_length: int, max_num_seqs: int
) -> bool:
    """Whether the logits of a path have the same bits one by one, in a chain, in a tree and in a batch.

    The path follows a text of random keys and values that ends shortly before the end of a block, and one
    that ends inside the next block. No slot may be in use; all are free afterwards.
    """
    tokens = np.random.default_rng(0).integers(0, vocab_size, LONG)
    num_slots = min(max_num_seqs, 2)
    lengths = [max(1, min(length, max_length - LONG)) for length in (block - PATH // 2, block + PATH)]
    try:
        return all(_same_bits(target_model, tokens, length, block, num_slots) for length in lengths)
    finally:
        for slot in range(num_slots):
            target_model.release(slot)


def _same_bits(
    target_model: TargetModel, tokens: NDArray[np.int64], length: int, block: int, num_slots: int
) -> bool:
    path, cache = tokens[:PATH], target_model.engine.kv
    cache.reserve(length, num_slots)
    cache.randomize(num_slots, length)
    roots = [TokenTree.root(int(token)) for token in path]
    alone = [_logits(target_model, [root], [length + at], 1) for at, root in enumerate(roots)]
    expected = np.concatenate(alone)
    chain, long = TokenTree.chain(path), TokenTree.chain(tokens)
    tree, nodes = _tree(path)
    found = [_logits(target_model, [each], [length], PATH) for each in (chain, long)]
    if num_slots > 1:
        found.append(_logits(target_model, [chain, long], [length, length - 1], PATH))
    if len(tree) <= block - length % block:
        found.append(_logits(target_model, [tree], [length], len(tree))[nodes])
    return all(np.array_equal(each, expected) for each in found)


def _logits(
    target_model: TargetModel, trees: Sequence[TokenTree], lengths: Sequence[int], count: int
) -> NDArray[np.float32]:
    """A copy of the logits [count, V] of the first tree's first nodes."""
    output = target_model.verify(trees, lengths, logits=True, recorder=NullRecorder())
    logits = output.logits_of(0)
    assert logits is not None
    return logits[:count].copy()


def _tree(path: NDArray[np.int64]) -> tuple[TokenTree, NDArray[np.int64]]:
    """A tree in which every node of the path has a sibling in front of it, and the path's nodes."""
    depths = np.concatenate([[0], np.repeat(np.arange(1, path.size), 2)])
    nodes = np.concatenate([[0], np.arange(2, 2 * path.size, 2)])
    parents = np.concatenate([[-1], np.repeat(nodes[:-1], 2)])
    tokens = np.concatenate([path[:1], np.repeat(path[1:], 2)])
    tokens[1::2] = (tokens[1::2] + 1) % max(2, int(path.max()) + 1)
    return TokenTree(tokens, parents, depths, np.zeros(tokens.size)), nodes

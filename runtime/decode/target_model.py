"""The target model on an engine: prefill prompts, verify trees, commit what was accepted.

A graph with row-invariant attention (``export.graphs.layers.attention_invariant``) gives a token's logits the
same bits in plain decoding, in a tree, in a batch and in a prompt that is read in chunks. Then a text is a
function of the prompt, the weights, the libraries and the processor, and not of its drafts.

Standard operators leave one condition. A product over the keys adds them up block by block, so a key must lie
in the block in which it lies in plain decoding. The keys of a tree lie behind the text, in the order of its
nodes; those of a chain lie where plain decoding has them. Compiled operators (``runtime.engines.operators``)
have no such blocks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.core.options import MAX_PREFILL_CHUNK
from runtime.core.token_tree import TokenTree
from runtime.decode.acceptance import Acceptance, Acceptor
from runtime.engines.protocol import UNBROKEN, Engine, Features, ForwardPass
from runtime.engines.recorder import NullRecorder, Recorder

# The cache always has room for a tree of this many nodes, so that it grows with the texts and not with the
# size of one step's trees: memory stops growing after the longest text.
USUAL_NODES = 32


@dataclass(frozen=True)
class VerifyOutput:
    """What the target model says of B sequences; valid until its next pass.

    next_tokens: [B, M] int64, its most probable token after each node, or after a prompt's last token
    logits: [B, M, V] float32; None where they were not asked for
    features: of every input, for the draft head; empty where the engine was loaded without them, as for plain
        decoding
    kept: [B, K] int64, ascending: the nodes that next tokens and logits are for, where the pass has dropped
        others (speculative streams); None for all
    """

    next_tokens: NDArray[np.int64]
    logits: NDArray[np.float32] | None
    features: Features
    kept: NDArray[np.int64] | None = None

    def logits_of(self, index: int) -> NDArray[np.float32] | None:
        """[M, V] of one sequence, or None."""
        return None if self.logits is None else self.logits[index]

    def accept(self, index: int, acceptor: Acceptor, tree: TokenTree) -> Acceptance:
        """What ``acceptor`` accepts of the tree of sequence ``index``. A node that was not kept never is."""
        next_tokens, logits = self.next_tokens[index], self.logits_of(index)
        if self.kept is None:
            return acceptor.accept(tree, next_tokens, logits)
        # Padding, whose numbers are beyond the tree, is kept last.
        kept = self.kept[index]
        kept = kept[: np.searchsorted(kept, len(tree))].copy()
        acceptance = acceptor.accept(tree.subset(kept), next_tokens, logits)
        return replace(acceptance, path=kept[acceptance.path])


class TargetModel:
    """Every sequence has a slot of the key/value cache. A pass verifies trees in the first B slots.

    key_block: positions of a block of keys, over whose end no tree may reach, so that logits have the bits of
        plain decoding; None where they differ by rounding anyway
    """

    key_block: int | None = None
    # Whether ``prefill_and_score`` may be called.
    scores_prompts = True

    def __init__(self, engine: Engine, *, prefill_chunk_size: int = MAX_PREFILL_CHUNK):
        self.engine = engine
        self.prefill_chunk_size = prefill_chunk_size

    def prefill(
        self, token_ids: NDArray[np.int64], start: int, *, slot: int = 0, logits: bool = False
    ) -> VerifyOutput:
        """Read a prompt's tokens [N] int64 from position ``start`` on, N at most ``prefill_chunk_size``."""
        return self._prefill(token_ids, start, slot, 1, logits)

    def prefill_and_score(
        self, token_ids: NDArray[np.int64], start: int, *, slot: int = 0
    ) -> tuple[NDArray[np.float32], VerifyOutput]:
        """Do the same, and return the logits [N, V] after every token, too."""
        count = token_ids.size
        output = self._prefill(token_ids, start, slot, count, True)
        logits = output.logits
        assert logits is not None
        last = slice(count - 1, count)
        return logits[0, :count], replace(
            output, next_tokens=output.next_tokens[:, last], logits=logits[:, last]
        )

    def _prefill(
        self, token_ids: NDArray[np.int64], start: int, slot: int, num_outputs: int, logits: bool
    ) -> VerifyOutput:
        """num_outputs: the last tokens for which there are next tokens and logits"""
        count = token_ids.size
        axes = self.engine.round_up(B=1, N=count, M=num_outputs)
        self.engine.kv.reserve(start + axes["N"], slot + 1)
        forward = self.engine.forward_pass(extra_outputs(logits), slot=slot, reads=start + axes["N"], **axes)
        inputs = forward.inputs
        inputs["input_ids"][0] = token_ids[-1]
        inputs["input_ids"][0, :count] = token_ids
        inputs["position_ids"][0] = start
        inputs["position_ids"][0, :count] = np.arange(start, start + count)
        inputs["write_index"][0] = start
        inputs["logit_indices"][0] = count - 1
        inputs["logit_indices"][0, :num_outputs] = np.arange(count - num_outputs, count)
        forward.mask_causal([start])
        forward.run()
        return _output(forward, [count])

    def read(self, token_ids: NDArray[np.int64], *, logits: bool = False) -> VerifyOutput:
        """Prefill a whole prompt [N] into the first slot; returns the output of its last pass."""
        size = self.prefill_chunk_size
        for start in range(0, token_ids.size, size):
            output = self.prefill(token_ids[start : start + size], start, logits=logits)
        return output

    def verify(
        self, trees: Sequence[TokenTree], lengths: Sequence[int], *, logits: bool, recorder: Recorder
    ) -> VerifyOutput:
        """Verify a tree for each of the first slots, padded to the largest.

        lengths: tokens that every sequence has in the cache
        """
        sizes = [len(tree) for tree in trees]
        axes = self.engine.round_up(B=len(trees), N=max(sizes), M=max(sizes))
        self.engine.kv.fit(max(lengths) + max(axes["N"], USUAL_NODES), len(trees))
        forward = self.engine.forward_pass(extra_outputs(logits), reads=max(lengths) + axes["N"], **axes)
        ids, positions = forward.inputs["input_ids"], forward.inputs["position_ids"]
        forward.inputs["write_index"][:] = lengths
        forward.inputs["logit_indices"][:] = np.arange(axes["M"])
        for index, (tree, length, size) in enumerate(zip(trees, lengths, sizes, strict=True)):
            ids[index, :size] = tree.tokens
            np.add(tree.depths, length, out=positions[index, :size])
            if size < axes["N"]:
                # Nobody reads the padding's outputs, and the next pass overwrites what it writes to the
                # cache.
                ids[index, size:] = tree.tokens[0]
                positions[index, size:] = length
        forward.mask_tree([tree.parents for tree in trees], lengths)
        recorder.mark("search")
        forward.run()
        recorder.mark("verify")
        return _output(forward, sizes)

    def reserve(self, lengths: Sequence[int], num_nodes: int) -> None:
        """Make room for a step with up to ``num_nodes`` drafts after each of the first slots' texts.

        Raises CacheMemoryError.
        """
        kv = self.engine.kv
        # Fewer drafts than asked for may fit where the context ends.
        wanted = max(lengths) + max(1 + num_nodes, USUAL_NODES)
        kv.reserve(min(wanted, kv.max_capacity), len(lengths))

    def commit(self, paths: Sequence[NDArray[np.int64]], lengths: Sequence[int]) -> None:
        """Keep the keys and values of the first slots' accepted paths [A_b], packed behind the text."""
        self.engine.kv.commit(lengths, paths)

    def swap(self, first: int, second: int, lengths: tuple[int, int]) -> None:
        self.engine.kv.swap(first, second, lengths)

    def release(self, slot: int) -> None:
        self.engine.kv.release(slot)


def extra_outputs(logits: bool) -> tuple[str, ...]:
    """The outputs that a pass brings to the host beside those that every pass brings."""
    return ("logits",) if logits else ()


def _output(forward: ForwardPass, sizes: Sequence[int]) -> VerifyOutput:
    outputs: Mapping[str, NDArray[Any]] = forward.outputs
    return VerifyOutput(outputs["next_tokens"], outputs.get("logits"), forward.features(sizes))


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


# Tokens of the path whose logits are compared, and of a long chain, which takes kernels for many rows.
PATH, LONG = 6, 33
# Positions about which the test's texts end where there are no blocks of keys.
TESTED_BLOCK = 256


def keeps_bits(
    target_model: TargetModel, *, block: int, vocab_size: int, max_length: int, max_num_seqs: int
) -> bool:
    """Whether the logits of a path have the same bits one by one, in a chain, in a tree and in a batch.

    That depends on the machine: another processor takes other kernels. The path follows a text of random keys
    and values that ends shortly before the end of a block, and one that ends inside the next block. No slot
    may be in use; all are free afterwards.
    """
    tokens = np.random.default_rng(0).integers(0, vocab_size, LONG)
    num_slots = min(max_num_seqs, 2)
    end = TESTED_BLOCK if block == UNBROKEN else block
    lengths = [max(1, min(length, max_length - LONG)) for length in (end - PATH // 2, end + PATH)]
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

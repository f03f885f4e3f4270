"""One decode step: its interface, and the step whose search, acceptance and bookkeeping run on the host.

A batch knows sequences, their text and their end; a step runner knows engines and caches. ``HostStep`` and
the steps on a device (``runtime.device``) have one interface, ``StepRunner``. A step on the host is

propose    draft head, tree search   last tokens      -> a TokenTree for each sequence
verify     target model, one pass    trees            -> VerifyOutput: next tokens, logits, features
accept     Acceptor                  tree, output     -> Acceptance: path, bonus token
commit     KV cache, draft head      paths            -> accepted positions packed, context appended
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from runtime.core.token_tree import TokenTree
from runtime.decode.acceptance import Acceptance, TokenScore, score_tokens
from runtime.decode.grammar import MAX_DRAFTS, Continuation, join_continuations
from runtime.decode.prefix_cache import HostBlock, PrefixBlock
from runtime.decode.proposers.base import NoProposer, Proposer
from runtime.decode.sequence import SequenceState
from runtime.decode.target_model import TargetModel, within_block
from runtime.engines.recorder import NullRecorder, Recorder


@dataclass(frozen=True)
class StepResult:
    """What one step adds to B sequences.

    tokens: [B, W] int64; the first ``counts[b]`` of row b are the new tokens, of which the last is the target
        model's own and the others are accepted drafts
    counts: [B] int64, at least 1
    scores: those of every sequence's new tokens; empty where its ``SamplingParams`` ask for none
    node_log_probs: [B, N] float64, log of the prefix probability of every verified draft, best first; minus
        infinity where a sequence has fewer than N
    draft_ms: milliseconds of the draft head and the tree search; 0 on a device, where they are not measured
    unverified: the best drafts of a step that drafted and verified none of them; otherwise None
    """

    tokens: NDArray[np.int64]
    counts: NDArray[np.int64]
    scores: tuple[tuple[TokenScore, ...], ...]
    node_log_probs: NDArray[np.float64]
    draft_ms: float = 0.0
    unverified: "FirstDrafts | None" = None


@dataclass(frozen=True)
class FirstDrafts:
    """The best draft of each of B sequences, and whether it was the token that the target model chose."""

    log_probs: NDArray[np.float64]  # [B, 1], as in ``StepResult.node_log_probs``
    are_right: NDArray[np.bool_]  # [B]


# From the log probabilities [B, N] of the drafted nodes of B sequences, as in ``StepResult.node_log_probs``,
# to the number of each sequence's best nodes that are verified.
NumVerified = Callable[[NDArray[np.float64]], int]


class StepRunner(Protocol):
    """Runs prefill and decode steps. The sequence in slot b is the b-th of those that decode.

    tree_sizes: numbers of draft nodes that a step can have, 0 first; empty for any
    scores_prompts: whether the tokens of a prompt can be scored
    """

    tree_sizes: Sequence[int]
    max_num_seqs: int
    prefill_chunk_size: int
    scores_prompts: bool
    recorder: Recorder

    def prefill(self, slot: int, sequence: SequenceState, num_tokens: int) -> StepResult | None:
        """Read the next ``num_tokens`` of a prompt, at most ``prefill_chunk_size``, into a slot.

        Its tokens are scored if the sequence asks for that. Returns the sequence's first token once the whole
        prompt has been read.
        """
        ...

    def step(
        self, sequences: Sequence[SequenceState], num_nodes: int, num_verified: NumVerified | None = None
    ) -> StepResult:
        """Draft up to ``num_nodes`` nodes for each sequence, verify them, accept and commit.

        num_verified: chooses how many of the drafted nodes are verified; by default all are. A step on a
            device has a fixed number and does not ask.
        """
        ...

    def swap(self, first: int, second: int, lengths: tuple[int, int]) -> None:
        """Exchange the slots of two sequences with so many tokens in the cache; 0 for a slot that is free."""
        ...

    def keep_prefixes(self, max_bytes: int) -> int:
        """Provide memory for blocks of prefixes; returns how many bytes of them may be kept, or 0."""
        ...

    def save_block(self, slot: int, start: int, end: int) -> PrefixBlock | None:
        """Copies of a slot's keys and values of the tokens from ``start`` to ``end``, which were read.

        None if the draft head has not read as far.
        """
        ...

    def load_blocks(self, slot: int, tokens: NDArray[np.int64], blocks: Sequence[Any]) -> None:
        """Begin a free slot with copies of keys and values.

        tokens: those of the blocks but the last, which is read again (``runtime.decode.prefix_cache``)
        blocks: of ``save_block``
        """
        ...

    def release(self, slot: int) -> None: ...

    def close(self) -> None:
        """Give back a device's memory; nothing else may be called afterwards. A second call does nothing."""
        ...


class HostStep:
    """The ``StepRunner`` that brings next tokens, features and lattices to the host."""

    tree_sizes: Sequence[int] = ()

    def __init__(self, target_model: TargetModel, proposer: Proposer, *, max_num_seqs: int = 1):
        self.target_model = target_model
        self.proposer = proposer
        self.max_num_seqs = max_num_seqs
        self.prefill_chunk_size = target_model.prefill_chunk_size
        self.scores_prompts = target_model.scores_prompts
        self.recorder: Recorder = NullRecorder()

    def step(
        self, sequences: Sequence[SequenceState], num_nodes: int, num_verified: NumVerified | None = None
    ) -> StepResult:
        recorder = self.recorder
        recorder.begin()
        last_tokens = [sequence.last_token for sequence in sequences]
        lengths = [sequence.length for sequence in sequences]
        acceptors = [sequence.acceptor for sequence in sequences]
        needs_logits = any(acceptor.needs_logits for acceptor in acceptors)

        # Before the draft: a step that fails afterwards cannot be repeated, since the head has moved on.
        self.target_model.reserve(lengths, num_nodes)
        proposer = self.proposer if num_nodes else NoProposer()
        began = time.perf_counter()
        trees = proposer.propose(last_tokens, num_nodes, recorder)
        draft_ms = 1000 * (time.perf_counter() - began) if num_nodes else 0.0
        of_grammars = restrict(trees, sequences)
        drafted = trees
        if num_nodes and num_verified is not None:
            count = num_verified(_node_log_probs(trees))
            trees = [tree.first(count) for tree in trees]
        if of_grammars and not isinstance(self.proposer, NoProposer):
            most = max(max(map(len, trees)) - 1, MAX_DRAFTS // len(trees))
            for index, drafts in of_grammars.items():
                trees[index] = join_continuations(trees[index], drafts, most)
        block = self.target_model.key_block
        if block is not None:
            trees = [within_block(tree, length, block) for tree, length in zip(trees, lengths, strict=True)]

        output = self.target_model.verify(trees, lengths, logits=needs_logits, recorder=recorder)

        accepted = [
            output.accept(index, acceptor, tree)
            for index, (acceptor, tree) in enumerate(zip(acceptors, trees, strict=True))
        ]
        recorder.mark("accept")

        paths = [acceptance.path for acceptance in accepted]
        self.target_model.commit(paths, lengths)
        context = [tree.tokens[path] for tree, path in zip(trees, paths, strict=True)]
        self.proposer.append_context(range(len(sequences)), context, output.features.select(paths))
        recorder.mark("commit")
        result = step_result(trees, accepted, draft_ms)
        recorder.end(len(trees), sum(map(len, trees)), sum(path.size for path in paths) - len(trees))
        if num_nodes and not result.node_log_probs.size:
            result = replace(result, unverified=_first_drafts(drafted, result.tokens[:, 0]))
        return result

    def prefill(self, slot: int, sequence: SequenceState, num_tokens: int) -> StepResult | None:
        end = sequence.length + num_tokens
        tokens = sequence.prompt[sequence.length : end]
        if sequence.prompt_scores is None:
            output = self.target_model.prefill(
                tokens, sequence.length, slot=slot, logits=sequence.acceptor.needs_logits
            )
        else:
            logits, output = self.target_model.prefill_and_score(tokens, sequence.length, slot=slot)
            following = sequence.prompt[sequence.length + 1 : end + 1].tolist()
            scores = score_tokens(logits[: len(following)], following, sequence.num_top)
            sequence.prompt_scores.extend(scores)
        self.proposer.append_context([slot], [tokens], output.features)
        if end < sequence.prompt.size:
            return None
        # A lone root that is in the cache already: there is nothing to verify, only the first token to draw.
        tree = TokenTree.root(int(tokens[-1]))
        return step_result([tree], [output.accept(0, sequence.acceptor, tree)])

    def swap(self, first: int, second: int, lengths: tuple[int, int]) -> None:
        self.target_model.swap(first, second, lengths)
        self.proposer.swap(first, second)

    def keep_prefixes(self, max_bytes: int) -> int:
        return max_bytes

    def save_block(self, slot: int, start: int, end: int) -> HostBlock:
        keys = self.target_model.engine.kv.read(slot, start, end)
        return HostBlock(keys, self.proposer.save_context(slot, max(start - 1, 0), end - 1))

    def load_blocks(self, slot: int, tokens: NDArray[np.int64], blocks: Sequence[HostBlock]) -> None:
        self.target_model.engine.kv.write(slot, [block.target_model for block in blocks])
        self.proposer.load_context(slot, tokens, [block.head for block in blocks])

    def release(self, slot: int) -> None:
        self.target_model.release(slot)
        self.proposer.release(slot)

    def close(self) -> None:
        """Does nothing: the host's memory goes with the objects that hold it."""


def restrict(trees: list[TokenTree], sequences: Sequence[SequenceState]) -> dict[int, list[Continuation]]:
    """Take out of B trees what the sequences' grammars forbid.

    Returns what the grammars draft themselves, by the index of every sequence that has one.
    """
    found = {}
    for index, sequence in enumerate(sequences):
        if sequence.grammar is not None:
            trees[index], found[index] = sequence.grammar.restrict(trees[index])
    return found


def step_result(
    trees: Sequence[TokenTree], accepted: Sequence[Acceptance], draft_ms: float = 0.0
) -> StepResult:
    """The result of a step of B sequences, from the tree of each and what was accepted of it."""
    counts = [acceptance.path.size for acceptance in accepted]
    tokens = np.zeros((len(trees), max(counts)), np.int64)
    for row, count, tree, acceptance in zip(tokens, counts, trees, accepted, strict=True):
        row[: count - 1] = tree.tokens[acceptance.path[1:]]
        row[count - 1] = acceptance.bonus
    scores = tuple([acceptance.scores for acceptance in accepted])
    return StepResult(tokens, np.array(counts, np.int64), scores, _node_log_probs(trees), draft_ms)


def _first_drafts(trees: Sequence[TokenTree], tokens: NDArray[np.int64]) -> FirstDrafts | None:
    """Those of B trees, by the tokens [B] that were chosen after their roots; None without any draft."""
    log_probs = _node_log_probs([tree.first(1) for tree in trees])
    if not log_probs.size:
        return None
    are_right = [len(tree) > 1 and tree.tokens[1] == token for tree, token in zip(trees, tokens, strict=True)]
    return FirstDrafts(log_probs, np.array(are_right))


def _node_log_probs(trees: Sequence[TokenTree]) -> NDArray[np.float64]:
    """Those of the drafts of B trees [B, N]; minus infinity where a tree has fewer than N."""
    if len(trees) == 1:  # without a copy, since it is asked for up to twice a step
        return trees[0].log_probs[None, 1:]
    log_probs = np.full((len(trees), max(map(len, trees)) - 1), -np.inf)
    for row, tree in zip(log_probs, trees, strict=True):
        row[: len(tree) - 1] = tree.log_probs[1:]
    return log_probs

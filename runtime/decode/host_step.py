"""One decode step, with the search, acceptance and bookkeeping on the host.

propose    draft head, tree search   last tokens      -> a TokenTree for each sequence
verify     target model, one pass    trees            -> VerifyOutput: next tokens, logits, features
accept     Acceptor                  tree, output     -> Acceptance: path, bonus token
commit     KV cache, draft head      paths            -> accepted positions packed, context appended
"""

from collections.abc import Sequence

from runtime.core.token_tree import TokenTree
from runtime.decode.proposers.base import Proposer
from runtime.decode.sequence import SequenceState
from runtime.decode.step import StepResult, step_result
from runtime.decode.target_model import TargetModel
from runtime.engines.recorder import NullRecorder, Recorder


class HostStep:
    """The ``StepRunner`` that brings next tokens, features and lattices to the host."""

    tree_sizes: Sequence[int] = ()

    def __init__(self, target_model: TargetModel, proposer: Proposer, *, max_num_seqs: int = 1):
        self.target_model = target_model
        self.proposer = proposer
        self.max_num_seqs = max_num_seqs
        self.prefill_chunk_size = target_model.prefill_chunk_size
        self.recorder: Recorder = NullRecorder()

    def step(self, sequences: Sequence[SequenceState], num_nodes: int) -> StepResult:
        recorder = self.recorder
        recorder.begin()
        last_tokens = [sequence.last_token for sequence in sequences]
        lengths = [sequence.length for sequence in sequences]
        needs_logits = any(sequence.acceptor.needs_logits for sequence in sequences)
        if num_nodes:
            trees = self.proposer.propose(last_tokens, num_nodes, recorder)
        else:
            trees = [TokenTree.root(token) for token in last_tokens]
            recorder.mark("draft")

        output = self.target_model.verify(trees, lengths, logits=needs_logits, recorder=recorder)

        accepted = [
            sequence.acceptor.accept(tree, output.next_tokens[index], output.logits_of(index))
            for index, (sequence, tree) in enumerate(zip(sequences, trees, strict=True))
        ]
        recorder.mark("accept")

        paths = [acceptance.path for acceptance in accepted]
        self.target_model.commit(paths, lengths)
        context = [tree.tokens[path] for tree, path in zip(trees, paths, strict=True)]
        self.proposer.append_context(range(len(sequences)), context, output.features.select(paths))
        recorder.mark("commit")
        result = step_result(trees, accepted)
        recorder.end(len(trees), sum(map(len, trees)), int(result.counts.sum()) - len(trees))
        return result

    def prefill(self, slot: int, sequence: SequenceState, num_tokens: int) -> StepResult | None:
        end = sequence.length + num_tokens
        tokens = sequence.prompt[sequence.length : end]
        output = self.target_model.prefill(
            tokens, sequence.length, slot=slot, logits=sequence.acceptor.needs_logits
        )
        self.proposer.append_context([slot], [tokens], output.features)
        if end < sequence.prompt.size:
            return None
        # A lone root that is in the cache already: there is nothing to verify, only the first token to draw.
        tree = TokenTree.root(int(tokens[-1]))
        return step_result(
            [tree], [sequence.acceptor.accept(tree, output.next_tokens[0], output.logits_of(0))]
        )

    def move(self, source: int, target: int, length: int) -> None:
        self.target_model.move(source, target, length)
        self.proposer.move(source, target)

    def release(self, slot: int) -> None:
        self.target_model.release(slot)
        self.proposer.release(slot)

    def close(self) -> None:
        """Nothing is to be done: the host's memory goes with the objects that hold it."""

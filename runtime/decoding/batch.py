"""Sequences that decode together: draft, transform, verify, accept, commit, for all of them in one step.

Rows of the caches are handed out from 0 on without gaps, since an engine's pass works on neighbours:
first the rows that decode, after them at most one whose prompt is still being read.
"""

from collections.abc import Sequence
from typing import Protocol

from runtime.decoding.recorder import NullRecorder, Recorder
from runtime.decoding.sequence import Chunk, Row
from runtime.decoding.target_model import TargetModel
from runtime.proposers.base import Proposer
from runtime.trees.token_tree import TokenTree


class Plan(Protocol):
    """How many drafts a step verifies."""

    def drafting(self, rows: Sequence[Row]) -> tuple[int, int]:
        """How many of the first rows draft in the next step, and how many drafts each may have at most.

        No rows, or no drafts, leave the draft head out.
        """
        ...

    def cut(self, rows: Sequence[Row], trees: list[TokenTree]) -> list[TokenTree]:
        """The parts of the trees that are worth verifying; a row that does not draft has a lone anchor."""
        ...

    def update(self, rows: Sequence[Row], num_accepted: Sequence[int]) -> None:
        """How many of every row's verified drafts were accepted."""
        ...

    def took(self, ms: float) -> None:
        """How long the step took, with handing its tokens out; where the caller knows."""
        ...


class FixedPlan:
    """Every row verifies its best ``count`` drafts."""

    def __init__(self, count: int):
        self.count = count

    def drafting(self, rows: Sequence[Row]) -> tuple[int, int]:
        return len(rows), self.count

    def cut(self, rows: Sequence[Row], trees: list[TokenTree]) -> list[TokenTree]:
        return trees

    def update(self, rows: Sequence[Row], num_accepted: Sequence[int]) -> None:
        pass

    def took(self, ms: float) -> None:
        pass


class Batch:
    """Rows that share the engines' passes.

    rows: those that decode, in the order of the cache
    entering: the one whose prompt is being read, if there is one
    """

    def __init__(self, backbone: TargetModel, drafter: Proposer, *, num_rows: int = 1):
        self.backbone = backbone
        self.drafter = drafter
        self.num_rows = num_rows
        self.rows: list[Row] = []
        self.entering: Row | None = None
        self.recorder: Recorder = NullRecorder()

    @property
    def has_room(self) -> bool:
        """Whether ``admit`` may be called: a row is free, and no prompt is being read."""
        return self.entering is None and len(self.rows) < self.num_rows

    def clear(self) -> None:
        """Forget all rows."""
        self.rows, self.entering = [], None
        for row in range(self.num_rows):
            self.drafter.reset(row)
        self.backbone.reset()

    def admit(self, row: Row) -> None:
        """Take a new row in; ``read_prompt`` is next."""
        if not self.has_room:
            raise RuntimeError("admit() needs a free row, and no other prompt half read")
        self.entering = row

    def read_prompt(self, max_tokens: int | None = None) -> Chunk | None:
        """Read on in the entering row's prompt: a chunk of it, of ``max_tokens`` at most.

        Returns the row's first token once the prompt has been read; if that does not end it, it decodes
        from the next step on.
        """
        row, index = self.entering, len(self.rows)
        if row is None:
            raise RuntimeError("read_prompt() needs a row: call admit() first")
        size = min(self.backbone.prefill_chunk, max_tokens or self.backbone.prefill_chunk)
        tokens = row.prompt[row.length : row.length + size]
        verdict = self.backbone.prefill(tokens, row.length, row=index, logits=row.acceptor.needs_logits)
        self.drafter.observe(index, tokens, verdict.features)
        row.length += tokens.size
        if row.length < row.prompt.size:
            return None
        acceptance = row.acceptor.accept(TokenTree.root(int(tokens[-1])), verdict)
        row.anchor = acceptance.bonus
        self.entering = None
        self.rows.append(row)
        return self._emit(row, [row.anchor], acceptance.log_probs)

    def step(self, plan: Plan) -> list[tuple[Row, Chunk]]:
        """What every row's verified drafts add to it; a row that has ended is in the batch no more."""
        rows, recorder = list(self.rows), self.recorder
        recorder.begin()
        count, num_nodes = plan.drafting(rows)
        if count and num_nodes:
            anchors = [row.anchor for row in rows[:count]]
            proposals = self.drafter.draft(anchors, num_nodes)
            recorder.mark("draft")
            trees = [
                self.drafter.transform(proposal, anchor=anchor, num_nodes=num_nodes)
                for proposal, anchor in zip(proposals, anchors, strict=True)
            ]
            trees = plan.cut(rows, [*trees, *(TokenTree.root(row.anchor) for row in rows[count:])])
        else:
            trees = [TokenTree.root(row.anchor) for row in rows]
            recorder.mark("draft")
        needs_logits = any(row.acceptor.needs_logits for row in rows)
        self.backbone.load(trees, [row.length for row in rows], logits=needs_logits)
        recorder.mark("transform")
        verdicts = self.backbone.verify()
        recorder.mark("verify")
        accepted = [
            row.acceptor.accept(tree, verdict)
            for row, tree, verdict in zip(rows, trees, verdicts, strict=True)
        ]
        num_accepted = [acceptance.path.size - 1 for acceptance in accepted]
        plan.update(rows, num_accepted)
        recorder.mark("accept")
        for index, (row, tree, verdict, acceptance) in enumerate(
            zip(rows, trees, verdicts, accepted, strict=True)
        ):
            path = acceptance.path
            self.backbone.commit(index, path, row.length)
            self.drafter.observe(index, tree.tokens[path], verdict.features[path])
            row.length += path.size
            row.anchor = acceptance.bonus
        recorder.mark("commit")
        found = []
        for row, tree, acceptance in zip(rows, trees, accepted, strict=True):
            tokens = [*tree.tokens[acceptance.path[1:]].tolist(), acceptance.bonus]
            found.append((row, self._emit(row, tokens, acceptance.log_probs)))
        recorder.end(len(rows), sum(len(tree) for tree in trees), sum(num_accepted))
        return found

    def remove(self, row: Row) -> None:
        """Give a row's place to others, whether it decodes or its prompt is being read."""
        if row is self.entering:
            self.drafter.reset(len(self.rows))
            self.entering = None
        else:
            index, last = self.rows.index(row), len(self.rows) - 1
            self.rows[index] = self.rows[last]
            del self.rows[last]
            if index == last:
                self.drafter.reset(index)
            else:
                self._move(last, index, self.rows[index])
            if self.entering is not None:
                self._move(last + 1, last, self.entering)
        if not self.rows and self.entering is None:
            self.backbone.reset()

    def _move(self, source: int, target: int, row: Row) -> None:
        self.backbone.move(source, target, row.length)
        self.drafter.move(source, target)

    def _emit(self, row: Row, tokens: list[int], log_probs: tuple[float, ...]) -> Chunk:
        chunk = row.emit(tokens, log_probs)
        if chunk.finish_reason:
            self.remove(row)
        return chunk

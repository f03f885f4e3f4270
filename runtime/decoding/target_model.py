"""The backbone on an engine: prefill prompts, verify trees, commit what was accepted."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.engines.base import Engine, Step
from runtime.trees.token_tree import TokenTree, fill_causal_mask, fill_padding_mask, fill_tree_mask

# The cache has room for so many at least, so that it grows with the texts, not when a step happens to verify
# more than others: a server that has met its longest text is as large as it gets.
USUAL_NODES = 32


@dataclass(frozen=True)
class VerifyOutput:
    """What the backbone says of one sequence's rows in a pass; valid until the next one.

    next_tokens: [M] int64, its choice after each node of a tree, or after a prompt's last token
    features: [N, F*H]; empty where the engine was loaded without them, as for plain decoding
    logits: [M, V]; None where they were not asked for
    """

    next_tokens: NDArray[np.int64]
    features: NDArray[np.float32]
    logits: NDArray[np.float32] | None


class TargetModel:
    """Every sequence has a row of the key/value cache; a pass verifies a tree of each of the first B."""

    def __init__(self, engine: Engine, *, prefill_chunk: int = 512):
        self.engine = engine
        self.prefill_chunk = prefill_chunk

    def reset(self) -> None:
        """No row is in use any more."""
        self.engine.kv.shrink()

    def prefill(
        self, token_ids: NDArray[np.int64], start: int, *, row: int = 0, logits: bool = False
    ) -> VerifyOutput:
        """Read one chunk of a row's prompt, token_ids [N] int64, at position ``start``."""
        count = token_ids.size
        self.engine.kv.reserve(start + count, row + 1)
        step = self.engine.step(_also(logits), row=row, B=1, N=count, M=1)
        step.inputs["input_ids"][0] = token_ids
        step.inputs["position_ids"][0] = np.arange(start, start + count)
        step.inputs["write_index"][0] = start
        step.inputs["logit_indices"][0, 0] = count - 1
        fill_causal_mask(step.inputs["attn_mask"][0, 0], start)
        step.run()
        return _verdict(step, 0, count, 1)

    def load(self, trees: Sequence[TokenTree], lengths: Sequence[int], *, logits: bool = False) -> None:
        """Put the first rows' trees, padded to the largest, into the input buffers: tokens, positions, mask.

        lengths: tokens that every row has in the cache
        """
        self._sizes = [len(tree) for tree in trees]
        count = max(self._sizes)
        self.engine.kv.reserve(max(lengths) + max(count, USUAL_NODES), len(trees))
        self._step = step = self.engine.step(_also(logits), B=len(trees), N=count, M=count)
        ids, positions, masks = (step.inputs[name] for name in ("input_ids", "position_ids", "attn_mask"))
        step.inputs["write_index"][:] = lengths
        step.inputs["logit_indices"][:] = np.arange(count)
        for row, (tree, length, size) in enumerate(zip(trees, lengths, self._sizes, strict=True)):
            ids[row, :size] = tree.tokens
            np.add(tree.depths, length, out=positions[row, :size])
            fill_tree_mask(masks[row, 0], tree.parents, length)
            if size < count:
                # Nobody looks at these; they are valid numbers, and written where the next pass writes.
                ids[row, size:] = tree.tokens[0]
                positions[row, size:] = length
                fill_padding_mask(masks[row, 0], size, length)

    def verify(self) -> list[VerifyOutput]:
        """Run the loaded trees; a verdict for each."""
        self._step.run()
        return [_verdict(self._step, row, size, size) for row, size in enumerate(self._sizes)]

    def commit(self, row: int, path: NDArray[np.int64], prefix_length: int) -> None:
        """Keep the key/value rows of a sequence's accepted path, packed after the prefix."""
        self.engine.kv.commit(row, prefix_length, path)

    def move(self, source: int, target: int, length: int) -> None:
        """Give a sequence of ``length`` tokens another row."""
        self.engine.kv.move(source, target, length)


def _also(logits: bool) -> tuple[str, ...]:
    return ("logits",) if logits else ()


def _verdict(step: Step, row: int, num_rows: int, num_answers: int) -> VerifyOutput:
    found: dict[str, Any] = {name: array[row] for name, array in step.outputs.items()}
    return VerifyOutput(
        found["next_tokens"][:num_answers],
        found["features"][:num_rows] if "features" in found else np.empty((num_rows, 0), np.float32),
        found["logits"][:num_answers] if "logits" in found else None,
    )

"""The backbone on an engine: prefill a prompt, verify a tree, commit what was accepted."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runtime.engine import Engine, Step
from runtime.tree import TokenTree, fill_causal_mask, fill_tree_mask


@dataclass(frozen=True)
class Verdict:
    """What the backbone says after the rows of one pass; valid until the next one.

    next_tokens: [M] int64, its choice after each node of a tree, or after a prompt's last token
    features: [N, F*H]; empty where the engine was loaded without them, as for plain decoding
    logits: [M, V]; None where they were not asked for
    """

    next_tokens: NDArray[np.int64]
    features: NDArray[np.float32]
    logits: NDArray[np.float32] | None


class Backbone:
    """Prefill and verification of one row; other rows of a batch would differ only in ``row``."""

    def __init__(self, engine: Engine, *, prefill_chunk: int = 512):
        self.engine = engine
        self.prefill_chunk = prefill_chunk

    def reset(self) -> None:
        """Forget the sequence: a new prompt begins."""
        self.engine.kv.shrink()

    def prefill(self, token_ids: NDArray[np.int64], start: int, *, logits: bool = False) -> Verdict:
        """Read one chunk of a prompt, token_ids [N] int64, at position ``start``."""
        count = token_ids.size
        self.engine.kv.reserve(start + count)
        step = self._step_of(count, 1, logits)
        step.inputs["input_ids"][0] = token_ids
        step.inputs["position_ids"][0] = np.arange(start, start + count)
        step.inputs["write_index"][0] = start
        step.inputs["logit_indices"][0, 0] = count - 1
        fill_causal_mask(step.inputs["attn_mask"][0, 0], start)
        step.run()
        return _verdict(step)

    def load(self, tree: TokenTree, prefix_length: int, *, logits: bool = False) -> None:
        """Put a tree into the input buffers of its size: tokens, positions, mask."""
        count = len(tree)
        self.engine.kv.reserve(prefix_length + count)
        self._step = step = self._step_of(count, count, logits)
        step.inputs["input_ids"][0] = tree.tokens
        np.add(tree.depths, prefix_length, out=step.inputs["position_ids"][0])
        step.inputs["write_index"][0] = prefix_length
        step.inputs["logit_indices"][0] = np.arange(count)
        fill_tree_mask(step.inputs["attn_mask"][0, 0], tree.parents, prefix_length)

    def verify(self) -> Verdict:
        """Run the loaded tree."""
        self._step.run()
        return _verdict(self._step)

    def commit(self, path: NDArray[np.int64], prefix_length: int) -> None:
        """Keep the key/value rows of the accepted path, packed after the prefix."""
        self.engine.kv.commit(0, prefix_length, path)

    def _step_of(self, num_rows: int, num_answers: int, logits: bool) -> Step:
        also = ("logits",) if logits else ()
        return self.engine.step(also, B=1, N=num_rows, M=num_answers)


def _verdict(step: Step) -> Verdict:
    features, logits = step.outputs.get("features"), step.outputs.get("logits")
    if features is None:
        features = np.empty((1, step.inputs["input_ids"].shape[1], 0), np.float32)
    return Verdict(step.outputs["next_tokens"][0], features[0], None if logits is None else logits[0])

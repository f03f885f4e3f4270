"""The backbone on an engine: prefill a prompt, verify a tree, commit what was accepted."""

import numpy as np
from numpy.typing import NDArray

from runtime.acceptance import Acceptance
from runtime.engine import Engine, Step
from runtime.tree import TokenTree, fill_causal_mask, fill_tree_mask


class Backbone:
    """Greedy verification of one row; other rows of a batch would differ only in ``row``."""

    def __init__(self, engine: Engine, *, prefill_chunk: int = 512):
        self.engine = engine
        self.prefill_chunk = prefill_chunk

    def reset(self) -> None:
        """Forget the sequence: a new prompt begins."""
        self.engine.kv.shrink()

    def prefill(self, token_ids: NDArray[np.int64], start: int) -> tuple[int, NDArray[np.float32]]:
        """Read one chunk of a prompt at position ``start``.

        token_ids [N] int64 -> (the next token, features [N, F*H]; valid until the next call).
        """
        count = token_ids.size
        self.engine.kv.reserve(start + count)
        step = self.engine.step(B=1, N=count, M=1)
        step.inputs["input_ids"][0] = token_ids
        step.inputs["position_ids"][0] = np.arange(start, start + count)
        step.inputs["write_index"][0] = start
        step.inputs["logit_indices"][0, 0] = count - 1
        fill_causal_mask(step.inputs["attn_mask"][0, 0], start)
        step.run()
        return int(step.outputs["next_tokens"][0, 0]), self._features(step)

    def load(self, tree: TokenTree, prefix_length: int) -> None:
        """Put a tree into the input buffers of its size: tokens, positions, mask."""
        count = len(tree)
        self.engine.kv.reserve(prefix_length + count)
        self._step = step = self.engine.step(B=1, N=count, M=count)
        step.inputs["input_ids"][0] = tree.tokens
        np.add(tree.depths, prefix_length, out=step.inputs["position_ids"][0])
        step.inputs["write_index"][0] = prefix_length
        step.inputs["logit_indices"][0] = np.arange(count)
        fill_tree_mask(step.inputs["attn_mask"][0, 0], tree.parents, prefix_length)

    def verify(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Run the loaded tree: (next_tokens [N], features [N, F*H]), valid until the next call."""
        self._step.run()
        return self._step.outputs["next_tokens"][0], self._features(self._step)

    @staticmethod
    def _features(step: Step) -> NDArray[np.float32]:
        """Empty where the engine was loaded without them, as for plain decoding."""
        features = step.outputs.get("features")
        return (
            np.empty((step.inputs["input_ids"].shape[1], 0), np.float32) if features is None else features[0]
        )

    def commit(self, acceptance: Acceptance, prefix_length: int) -> None:
        """Keep the key/value rows of the accepted path, packed after the prefix."""
        self.engine.kv.commit(0, prefix_length, acceptance.path)

"""How far apart the target model's logits of two tokens are, by the device's own engine."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from runtime.core.bundle import Bundle
from runtime.core.token_tree import TokenTree
from runtime.decode.acceptance import Acceptance, GreedyAcceptor
from runtime.decoder import SpeculativeDecoder
from runtime.profiler.runs import TIE_TOLERANCE

# Passes of different shapes round differently. Half precision has steps of 1/64 (float16) and 1/8 (bfloat16)
# between 16 and 32, where large logits are; two tokens within four steps are a tie.
TIES = {"float32": TIE_TOLERANCE, "float16": 4 / 64, "bfloat16": 4 / 8}


def activations(bundle: Bundle) -> str:
    """The type in which the target model computes, which is that of its caches."""
    inputs = bundle.manifest.graphs["backbone"].inputs
    return next(tensor.dtype for tensor in inputs if tensor.name.startswith("past_"))


def tie_tolerance(bundle: Bundle) -> float:
    return TIES[activations(bundle)]


class _KeepLogits(GreedyAcceptor):
    """Keeps what the target model said of the last token of a prompt."""

    needs_logits = True

    def __init__(self) -> None:
        self.logits: NDArray[np.float32] | None = None

    def accept(
        self, tree: TokenTree, next_tokens: NDArray[np.int64], logits: NDArray[np.float32] | None
    ) -> Acceptance:
        self.logits = None if logits is None else logits[0].copy()
        return super().accept(tree, next_tokens, logits)


def logit_gap(decoder: SpeculativeDecoder, prefix: Sequence[int], tokens: Sequence[int]) -> float:
    """How far the worst of these tokens is below the best logit after ``prefix``."""
    logits = logits_after(decoder, prefix).astype(np.float64)
    return float(logits.max() - logits[list(tokens)].min())


def logits_after(decoder: SpeculativeDecoder, prefix: Sequence[int]) -> NDArray[np.float32]:
    """The target model's logits [V] after ``prefix``."""
    sequence = decoder.new_sequence(prefix, max_new_tokens=1, stop_token_ids=())
    acceptor = _KeepLogits()
    sequence.acceptor = acceptor
    decoder.batch.clear()
    decoder.batch.enter(sequence)
    assert acceptor.logits is not None
    return acceptor.logits

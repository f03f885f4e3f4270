"""What a user may choose about a build."""

from dataclasses import dataclass

from runtime.bundle import DEFAULT_BEAM_WIDTH, DEFAULT_MIN_LEVEL_PROBABILITY

# Bits a weight, where a head is rounded.
DRAFTER_BITS = {"int8": 8, "int4": 4}
DRAFTER_PRECISIONS = ("fp32", *DRAFTER_BITS)


@dataclass(frozen=True)
class Options:
    """Precision of the weights, form of the attention, and how much of its frames a head returns.

    drafter_precision: of the head's matrices, which the output does not depend on
    top_k: labels a frame (of a head with a transition ``num_candidates`` at most), or children
        a node of a sequential head
    beam_width, min_level_probability: of a sequential head, nodes of a level that it expands at most, and the
        probability of reaching a level below which the level is left out
    """

    precision: str = "fp32"
    attention: str = "op"
    top_k: int = 16
    beam_width: int = DEFAULT_BEAM_WIDTH
    min_level_probability: float = DEFAULT_MIN_LEVEL_PROBABILITY
    drafter_precision: str = "fp32"

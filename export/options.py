"""What a user may choose about a build."""

from dataclasses import dataclass

from runtime.bundle import DEFAULT_BEAM_WIDTH, DEFAULT_MIN_LEVEL_PROBABILITY

# Bits per weight of a rounded draft head.
DRAFTER_BITS = {"int8": 8, "int4": 4}
DRAFTER_PRECISIONS = ("fp32", *DRAFTER_BITS)


@dataclass(frozen=True)
class Options:
    """Options of a build. Each field has a flag of its name in ``export.build_engines``.

    precision: of the target model's weights
    attention: ``op`` (one Attention operator) or ``primitive`` (MatMul, Where and Softmax), which a model
        that caps its attention scores softly always has
    top_k: labels of a frame of a parallel drafter (at most ``num_candidates`` if it has a transition),
        or children of a node of an autoregressive drafter
    beam_width: nodes of a level that an autoregressive drafter expands at most
    min_level_probability: an autoregressive drafter drafts no level that is reached with a lower one
    drafter_precision: of the draft head's matrices; the decoded text does not depend on it
    """

    precision: str = "fp32"
    attention: str = "op"
    top_k: int = 16
    beam_width: int = DEFAULT_BEAM_WIDTH
    min_level_probability: float = DEFAULT_MIN_LEVEL_PROBABILITY
    drafter_precision: str = "fp32"

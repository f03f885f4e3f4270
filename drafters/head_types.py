"""The families and the types of draft heads. A new type of a known family needs an entry and its module.

Every type belongs to a family, whose record says how its heads draft. Training, export and runtime have one
table each by the family's name: of scores, of graphs and checks, of proposers. The module of a head is named
instead of imported, because modules need ``drafters.config``, which checks a head's settings against its
entry.
"""

from collections.abc import Mapping
from dataclasses import dataclass

# Families, as configurations and bundles call them; a bundle may have streams in the pass that verifies.
PARALLEL, AUTOREGRESSIVE, STREAMING = "parallel", "autoregressive", "streaming"
# What one pass of a head gives.
LATTICE, LEVEL = "lattice", "level"
# Nodes of the trees with which training measures heads that give a lattice.
MEASURED_NODES = 16


@dataclass(frozen=True)
class HeadFamily:
    """How the heads of a family draft.

    name: of the family, as a bundle has it
    base: ``package.module:Class`` from which its heads derive
    drafts: what one pass gives. ``LATTICE``: all frames after an anchor, which training scores together and a
        search turns into a tree. ``LEVEL``: the children of the nodes of one level, which training scores
        along the true continuation of an anchor.
    graph: the exported graph that drafts: ``drafter``, or ``streaming``, which verifies in the same pass
    has_device_steps: whether a device can run its steps by itself, with step-logic graphs around that graph
    measured: how training measures the tokens of a verify pass, in words
    """

    name: str
    base: str
    drafts: str
    graph: str = "drafter"
    has_device_steps: bool = True
    measured: str = f"trees of {MEASURED_NODES} nodes"


FAMILIES = {
    family.name: family
    for family in (
        HeadFamily(PARALLEL, "drafters.parallel:ParallelDrafter", LATTICE),
        HeadFamily(
            AUTOREGRESSIVE,
            "drafters.autoregressive:AutoregressiveDrafter",
            LEVEL,
            measured="its one best draft",
        ),
        HeadFamily(
            STREAMING,
            "drafters.streaming:StreamFrames",
            LATTICE,
            graph="streaming",
            has_device_steps=False,
        ),
    )
}


@dataclass(frozen=True)
class Trunk:
    """The part of a head that computes its hidden states.

    module: ``package.module:Class`` of the head
    min_layers, max_layers: how many attention layers it may have (None: any number)
    usual_layers: the default; None for ``min_layers``
    borrows_layers: whether its layers are the upper ones of the target model, for speculative streams
    fused_start: whether its frames may begin as ``fused``
    own_lm_head: whether its frames may have LM heads of their own
    """

    module: str
    min_layers: int = 0
    max_layers: int | None = 0
    usual_layers: int | None = None
    borrows_layers: bool = False
    fused_start: bool = False
    own_lm_head: bool = False


@dataclass(frozen=True)
class HeadType:
    """A value of ``drafter_type``.

    family: the name of its record in ``FAMILIES``
    trunks: the values of ``trunk`` it may have, its default first
    has_blank: whether a frame may say nothing (CTC)
    may_have_transition: whether a frame may depend on the label before it
    """

    family: str
    trunks: Mapping[str, Trunk]
    has_blank: bool = False
    may_have_transition: bool = False


ATTENTION = Trunk("drafters.attention:AttentionFrames", min_layers=1, max_layers=None, fused_start=True)
RESIDUAL = Trunk("drafters.residual:ResidualFrames", own_lm_head=True)
STREAMS = Trunk(
    "drafters.streaming:StreamFrames",
    min_layers=1,
    max_layers=None,
    usual_layers=2,
    borrows_layers=True,
    fused_start=True,
)
FRAMES = {"attention": ATTENTION, "residual": RESIDUAL}

HEAD_TYPES = {
    "ctc": HeadType(PARALLEL, FRAMES | {"streams": STREAMS}, has_blank=True, may_have_transition=True),
    "block": HeadType(PARALLEL, FRAMES, may_have_transition=True),
    "medusa": HeadType(PARALLEL, {"residual": RESIDUAL}),
    "streaming": HeadType(PARALLEL, {"streams": STREAMS}, may_have_transition=True),
    # One layer is the prefix attention of Hydra++.
    "hydra": HeadType(AUTOREGRESSIVE, {"attention": Trunk("drafters.hydra:HydraDrafter", max_layers=1)}),
    "eagle": HeadType(
        AUTOREGRESSIVE, {"attention": Trunk("drafters.eagle:EagleDrafter", min_layers=1, max_layers=1)}
    ),
}
TRUNKS = tuple(dict.fromkeys(name for kind in HEAD_TYPES.values() for name in kind.trunks))

"""The families and the types of draft heads. A new type of a known family needs an entry and its module.

Every type belongs to a family, whose record says how its heads draft. Training (``FAMILY_TRAINING``), export
(``EXPORTS``) and runtime (``PROPOSERS``) have one table each by the family's name: of scores, of graphs and
checks, of proposers. The module of a head is named instead of imported, because modules need
``drafters.config``, which checks a head's settings against its entry.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

# Families, as bundles call them. The runtime has the same names in ``runtime.core.bundle``, because neither
# package may import the other; tests/drafters/test_head_types.py compares them.
PARALLEL, AUTOREGRESSIVE, STREAMING = "parallel", "autoregressive", "streaming"
# Nodes of the trees with which training measures parallel heads.
MEASURED_NODES = 16


@dataclass(frozen=True)
class HeadFamily:
    """How the heads of a family draft.

    name: of the family, as a bundle has it
    graph: the exported graph that drafts: ``drafter``, or ``streaming``, which verifies in the same pass
    measured: how training measures the tokens of a verify pass, in words
    """

    name: str
    graph: str = "drafter"
    measured: str = f"trees of {MEASURED_NODES} nodes"


# The *type* ``streaming`` belongs to the family ``parallel``, and the *family* ``streaming`` has no type: a
# head of streams gets it at its export, if its streams run in the pass that verifies (``--stream-pass``).
HEAD_FAMILIES = {
    family.name: family
    for family in (
        HeadFamily(PARALLEL),
        HeadFamily(AUTOREGRESSIVE, measured="its one best draft"),
        HeadFamily(STREAMING, graph="streaming"),
    )
}


@dataclass(frozen=True)
class Trunk:
    """The part of a head that computes its hidden states.

    module: ``package.module:Class`` of the head
    min_layers, max_layers: how many attention layers it may have (None: any number)
    usual_layers: the default; None for ``min_layers``
    attends: whether frames attend to the whole context and the anchor token, in layers of the head's own
    borrows_layers: whether its layers are the upper ones of the target model, for speculative streams
    fused_start: whether its frames may begin as ``fused``
    has_mask_token: whether its frames begin as a token of the target model, in DSpark's or DFlash's form
    silent_start: whether its first frame, the anchor's, says nothing, in DFlash's form
    may_have_window: whether its frames may look back over a part of the context alone
    own_lm_head: whether its frames may have LM heads of their own
    """

    module: str
    min_layers: int = 0
    max_layers: int | None = 0
    usual_layers: int | None = None
    attends: bool = False
    borrows_layers: bool = False
    fused_start: bool = False
    has_mask_token: bool = False
    silent_start: bool = False
    may_have_window: bool = False
    own_lm_head: bool = False


@dataclass(frozen=True)
class HeadType:
    """A value of ``drafter_type``.

    family: the name of its record in ``HEAD_FAMILIES``, before an export decides in which pass streams run
    trunks: the values of ``trunk`` it may have, its default first
    has_blank: whether a frame may say nothing (CTC)
    may_have_transition: whether a frame may depend on the label before it
    """

    family: str
    trunks: Mapping[str, Trunk]
    has_blank: bool = False
    may_have_transition: bool = False


ATTENTION = Trunk(
    "drafters.attention:AttentionFrames",
    min_layers=1,
    max_layers=None,
    attends=True,
    fused_start=True,
    may_have_window=True,
)
DSPARK = Trunk(
    "drafters.attention:DSparkFrames", min_layers=1, max_layers=None, attends=True, has_mask_token=True
)
DFLASH = replace(DSPARK, silent_start=True)
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
    "block": HeadType(PARALLEL, FRAMES | {"dspark": DSPARK, "dflash": DFLASH}, may_have_transition=True),
    "medusa": HeadType(PARALLEL, {"residual": RESIDUAL}),
    "streaming": HeadType(PARALLEL, {"streams": STREAMS}, may_have_transition=True),
    # One layer is the prefix attention of Hydra++.
    "hydra": HeadType(AUTOREGRESSIVE, {"attention": Trunk("drafters.hydra:HydraDrafter", max_layers=1)}),
    "eagle": HeadType(
        AUTOREGRESSIVE, {"attention": Trunk("drafters.eagle:EagleDrafter", min_layers=1, max_layers=1)}
    ),
}
TRUNKS = tuple(dict.fromkeys(name for kind in HEAD_TYPES.values() for name in kind.trunks))

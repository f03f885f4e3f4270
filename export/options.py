"""The options of a build."""

from dataclasses import dataclass
from pathlib import Path

from drafters.config import DrafterConfig
from drafters.head_types import AUTOREGRESSIVE, HEAD_FAMILIES, STREAMING, HeadFamily
from export.errors import ExportError
from export.quantisation.precision import BLOCK_SIZES
from runtime.core.bundle import MAX_NUM_NODES

# How an autoregressive head's tree is expanded unless a bundle says otherwise. Measured with a trained EAGLE
# head on a CPU: a beam wider than 4 adds at most 1 % to the tokens of a step, up to 32 nodes; leaving out
# levels below a probability of 0.2 saves a fifth of the passes at 8 nodes, at 16 a quarter for 1 % of tokens.
DEFAULT_BEAM_WIDTH = 4
DEFAULT_MIN_LEVEL_PROBABILITY = 0.2
MAX_BEAM_WIDTH = 256

# Forms of attention in a graph.
ATTENTION = INVARIANT, FUSED, GROUPED, PRIMITIVE = ("invariant", "fused", "grouped", "primitive")
# What shares a scale where weights of the target model and activations are in int8.
INT8_SCALES = COLUMNS, BLOCKS = ("columns", "blocks")
# The precision of the LM head beside quantised weights.
INT8_LM_HEAD, FLOAT_LM_HEAD = "int8", "float"
LM_HEADS = ("same", INT8_LM_HEAD, FLOAT_LM_HEAD)
# Drafts of a chain in an engine of others, as in the runtime; fewer where a head has fewer frames.
NUM_DRAFTS = 8
# The engine of others that verifies trees.
TREE_TARGET = "sglang"
# The pass in which speculative streams run.
STREAM_PASSES = VERIFY_PASS, OWN_PASS = ("verify", "own")


@dataclass(frozen=True)
class Options:
    """Options of a build; None takes the target's own choice where nothing else is said.

    Each field but ``parallel`` has a flag in ``export.build_engines`` (``flag_of``), whose help says more.

    precision: of the target model's weights: a name of ``export.quantisation.precision.PRECISIONS``
    drafter_precision: of the draft head, which never changes the text; None takes the target model's
        (``ctc build`` takes int4 unless told otherwise)
    activations: fp16 or bf16, beside quantised weights
    lm_head: of a target model whose other weights are quantised: ``same`` (quantised like them), ``int8``
        beside int4, or ``float``, as precise as the activations
    quantize_embedding: store the token embedding, of which both graphs have a copy, as int8
    quality_text: the text on which quantisation is measured; None takes one that comes with the package
    calibration_text: the text by whose activations weights in int4 are rounded and quantised products are
        smoothed; None takes the package's
    gpus: compute capabilities to compile for, such as sm89
    max_batch, max_nodes: sequences of a pass and draft nodes of a step that engines are compiled for;
        ``max_nodes`` of None is 64 for one sequence and 16 for several
    gpu_memory: GiB that all engines and their caches may need together
    step_nodes: draft nodes of the steps that a device can run by itself
    timing_cache: file of the compiler's measurements, which make later builds faster
    attention: of the target model: ``invariant``, ``fused``, ``grouped`` or ``primitive``, which a model that
        caps its attention scores softly has in place of ``fused`` and ``grouped``
    float_products: compute products with quantised weights in float32 on a CPU too
    int8_scales: what shares a scale in products with int8 weights on a CPU: ``columns`` of weights and rows
        of activations, or ``blocks`` of both
    int4_block_size: rows of the target model's int4 weights that share a scale on a CPU
    top_k: labels of a frame of a parallel drafter (at most ``num_candidates`` if it has a transition),
        or children of a node of an autoregressive drafter
    beam_width: nodes of a level that an autoregressive drafter expands at most
    min_level_probability: an autoregressive drafter drafts no level that is reached with a lower one
    stream_pass: of speculative streams: ``verify`` if the pass that verifies a tree drafts the next one too,
        ``own`` if the streams of the last accepted token get a pass of their own, as a draft head does
    kept_nodes: of streams in the pass that verifies: drafts that go on to the upper layers unless the runtime
        is told otherwise; None for all
    parallel: trace the graphs of steps in a process of its own, which needs more memory and a second core
    """

    precision: str = "fp32"
    drafter_precision: str | None = None
    activations: str | None = None
    lm_head: str | None = None
    quantize_embedding: bool = False
    quality_text: Path | None = None
    calibration_text: Path | None = None
    gpus: tuple[str, ...] = ()
    max_batch: int = 1
    max_nodes: int | None = None
    gpu_memory: float | None = None
    step_nodes: tuple[int, ...] | None = None
    timing_cache: Path | None = None
    attention: str | None = None
    float_products: bool = False
    int8_scales: str = COLUMNS
    int4_block_size: int = BLOCK_SIZES[-1]
    top_k: int = 16
    beam_width: int = DEFAULT_BEAM_WIDTH
    min_level_probability: float = DEFAULT_MIN_LEVEL_PROBABILITY
    stream_pass: str = VERIFY_PASS
    kept_nodes: int | None = None
    parallel: bool = False

    @property
    def head_attention(self) -> str:
        """The attention of a draft head in passes of its own, which need not be invariant."""
        return FUSED if self.attention in (None, INVARIANT) else self.attention

    @property
    def head_precision(self) -> str:
        """The draft head's precision."""
        return self.drafter_precision or self.precision

    def family_of(self, config: DrafterConfig) -> HeadFamily:
        """The family of a head once it is exported, which depends on the pass in which streams run."""
        in_verify_pass = config.trunk_type.borrows_layers and self.stream_pass == VERIFY_PASS
        return HEAD_FAMILIES[STREAMING if in_verify_pass else config.family]

    def check_head(self, config: DrafterConfig) -> None:
        """Raises ExportError for options that do not fit a head."""
        has_streams, family = config.trunk_type.borrows_layers, self.family_of(config).name
        if self.stream_pass not in STREAM_PASSES:
            raise ExportError(
                f"--stream-pass: must be one of {', '.join(STREAM_PASSES)}, got {self.stream_pass!r}"
            )
        for flag, is_set, is_free, owner in (
            ("--stream-pass", self.stream_pass != VERIFY_PASS, has_streams, "streams"),
            ("--kept-nodes", self.kept_nodes is not None, family == STREAMING, "streams in the verify pass"),
        ):
            if is_set and not is_free:
                given = f"a {config.drafter_type} head"
                if has_streams:
                    given = f"a head of streams with --stream-pass {self.stream_pass}"
                raise ExportError(f"{flag}: is for {owner} only, got {given}")
        if has_streams and self.head_precision != self.precision:
            raise ExportError(
                f"--drafter-precision: streams run through the target model's layers, which have the "
                f"precision {self.precision}, got {self.head_precision}"
            )
        top_k = self.top_k if family == AUTOREGRESSIVE else config.frame_top_k(self.top_k)
        widths = [("--top-k", top_k, config.label_count)]
        if family == AUTOREGRESSIVE:
            widths.append(("--beam-width", self.beam_width, MAX_BEAM_WIDTH))
        for flag, width, most in widths:
            if not 1 <= width <= most:
                raise ExportError(f"{flag}: must be between 1 and {most} for this head, got {width}")
        if self.kept_nodes is not None and not 1 <= self.kept_nodes <= MAX_NUM_NODES:
            raise ExportError(f"--kept-nodes: must be between 1 and {MAX_NUM_NODES}, got {self.kept_nodes}")
        if family == AUTOREGRESSIVE and not 0 <= self.min_level_probability < 1:
            raise ExportError(
                f"--min-level-probability: must be at least 0 and below 1, got {self.min_level_probability}"
            )


def flag_of(name: str) -> str:
    """The flag of a field of ``Options``."""
    return "--gpu" if name == "gpus" else f"--{name.replace('_', '-')}"


@dataclass(frozen=True)
class DraftOrder:
    """What a draft directory for an engine of others is made of.

    max_context: the value of ``--max-context``
    num_nodes: drafts of a tree, for an engine that verifies trees; None for a chain
    any_base: take a head that was trained for another model of the same sizes
    """

    model_dir: Path
    out: Path
    drafter_dir: Path | None
    options: Options
    max_context: int | None = None
    num_nodes: int | None = None
    any_base: bool = False

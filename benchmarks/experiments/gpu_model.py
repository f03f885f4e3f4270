"""Predicts the time of a decode step on a GPU. Nothing here is measured on one.

    python -m benchmarks.experiments.gpu_model
    python -m benchmarks.experiments.gpu_model --prompts gsm8k --context 4096
    python -m benchmarks.experiments.gpu_model --kernels --stages
    python -m benchmarks.experiments.gpu_model --kernels --over-plain --engine torch --context 8192 --text 900

The target model is a Llama 2 of 7B in fp16 and in int4, and the draft head is our ``ctc`` head at its width.
A graph takes the longer of two times, moving its bytes at the GPU's published bandwidth or computing its
products at the published rate, and ``LAUNCH_MS`` for every kernel. A step takes the times of its graphs and
``HOST_MS``. With ``--kernels`` the stages without weights are the project's own kernels, of which the cycles
of a block are added up. Tokens a step are those that the demo's head reached (docs/methods.md), since no head
of a 7B model was trained. ``--stages`` prints the stages of one step instead, ``--over-plain`` what a step
takes in plain steps. With ``--text`` attention reads the caches up to the length in use, and otherwise all
positions. All assumptions are in docs/appendix-gpu.md.
"""

import argparse
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from benchmarks.arguments import Parser
from benchmarks.report import markdown_table
from runtime.core.cli import at_least
from runtime.core.prefix_search import kept_prefixes
from runtime.device.plan import SHORTEST_READ


@dataclass(frozen=True)
class Gpu:
    """Published figures: bytes a second, and dense products in fp16, accumulated in float32, a second."""

    name: str
    bandwidth: float
    flops: float


@dataclass(frozen=True)
class Weights:
    """How weights are stored.

    bytes_per_weight: scales included; int4 has one float16 scale for 32 weights
    """

    name: str
    bytes_per_weight: float


# From NVIDIA's data sheets of H100 (SXM) and L40S, which state twice these rates with sparsity, and from the
# white paper of the Ada architecture.
GPUS = (
    Gpu("H100 SXM", 3.35e12, 989.4e12),
    Gpu("L40S", 864e9, 362.05e12),
    Gpu("RTX 4090", 1008e9, 165.2e12),
)
FORMATS = (Weights("fp16", 2.0), Weights("int4", 0.5 + 2 / 32))
BATCHES = (1, 16)
TENSORRT, TORCH = "tensorrt", "torch"
NODES = (8, 16, 32, 64)
# Tokens a step of ``ctc`` by draft nodes, the mean of three seeds in docs/methods.md. That of 64 nodes was
# measured with 60.
TOKENS_A_STEP: dict[str, dict[int, float]] = {
    "mt_bench": {0: 1, 8: 4.37, 16: 5.07, 32: 5.57, 64: 5.89},
    "gsm8k": {0: 1, 8: 5.09, 16: 6.14, 32: 6.83, 64: 7.35},
    "humaneval": {0: 1, 8: 5.46, 16: 6.74, 32: 7.31, 64: 7.79},
}

# Llama 2 of 7B; the head has its sizes, one layer, 12 frames, features of three layers.
VOCABULARY, HIDDEN, INTERMEDIATE, LAYERS = 32000, 4096, 11008, 32
FRAMES, FEATURE_LAYERS, PATH, TRANSITION_SIZE = 12, 3, 13, 128
LAYER_WEIGHTS = 4 * HIDDEN**2 + 3 * HIDDEN * INTERMEDIATE
LM_HEAD = VOCABULARY * HIDDEN
TARGET_WEIGHTS = LAYERS * LAYER_WEIGHTS + LM_HEAD
# Features to the width, a layer, the LM head, and the transition's rows of the frames.
HEAD_WEIGHTS = FEATURE_LAYERS * HIDDEN**2 + LAYER_WEIGHTS + LM_HEAD + TRANSITION_SIZE * HIDDEN
# Weights of the fused start: from anchor and last context token to the width, and from there to all frames.
START_WEIGHTS = 2 * HIDDEN**2 + FRAMES * HIDDEN**2
HALF, FULL = 2, 4

# A kernel of a captured graph that has next to nothing to do, and the gap before it. An assumption.
LAUNCH_MS = 0.002
# The host's work for a step. An assumption.
HOST_MS = 0.1


# Of our own kernels, all of them assumptions. Cycles a second; cycles from one barrier to the next of a block
# of 512 threads that do next to nothing; cycles of a read of memory that waits for the one before;
# instructions of all threads of a block that are done in a cycle, as many as a multiprocessor has lanes.
CLOCK, PHASE, READ, LANES = 1.7e9, 100, 500, 128
# Instructions of a comparison of a sort, of an element of a product, and of an element of a label's vector,
# which takes an exponential function; and the cycles of a label in a sum that one thread makes.
COMPARISON, ELEMENT, ACTIVATION, LABEL_CYCLES = 14, 4, 40, 120
THREADS, TILE, LABELS = 512, 30, 16


@dataclass(frozen=True)
class Kernels:
    """How many kernels there are, counted as layers of the network that TensorRT's parser makes.

    Layers that compute no tensor (constants, shapes) are none. The least: elementwise layers join others. The
    most: every other layer is a kernel. Which of the two is nearer is not known before an engine has run.
    """

    least: int
    most: int

    def __add__(self, other: "Kernels") -> "Kernels":
        return Kernels(self.least + other.least, self.most + other.most)

    def times(self, count: int) -> "Kernels":
        return Kernels(count * self.least, count * self.most)


@dataclass(frozen=True)
class Work:
    """The work of a graph in one step.

    cycles: that the blocks of an own kernel take, which run at the same time; the least and the most
    """

    moved: float
    flops: float
    kernels: Kernels
    cycles: tuple[float, float] = (0, 0)

    def milliseconds(self, gpu: Gpu) -> tuple[float, float]:
        """With the least and with the most kernels and cycles."""
        busy = 1e3 * max(self.moved / gpu.bandwidth, self.flops / gpu.flops)
        least, most = (1e3 * cycles / CLOCK for cycles in self.cycles)
        return busy + least + LAUNCH_MS * self.kernels.least, busy + most + LAUNCH_MS * self.kernels.most


# The step-logic graphs as ``benchmarks.experiments.step_table`` counts them for a ctc head of 12 frames.
# The networks of that head, and of Llamas with two and three layers, were counted in the same way in fp16.
# The counts do not depend on the sizes.
DECODER_LAYER, REST_OF_TARGET, HEAD = Kernels(14, 41), Kernels(8, 39), Kernels(48, 250)
PREPARE, SEARCH, PLAIN_SEARCH = Kernels(1, 22), Kernels(398, 1864), Kernels(1, 32)
ACCEPT, CACHE_COMMIT, REST_OF_COMMIT = Kernels(8, 41), Kernels(2, 4), Kernels(1, 24)


# What takes the place of these with ``--kernels``.
ONE_KERNEL = Kernels(1, 1)


def sort_cycles(count: int) -> float:
    """Of a bitonic sort of so many keys, of which every phase compares each key once."""
    levels = math.ceil(math.log2(max(count, 2)))
    phase = max(PHASE, 2**levels / 2 * COMPARISON / LANES)
    return levels * (levels + 1) / 2 * phase


def search_cycles(nodes: int) -> tuple[float, float]:
    """Of a block of the kernel that searches, with the least and the most keys to sort.

    A frame multiplies, normalises and emits for the prefixes kept so far. Then it sorts them, together with
    all new ones or with as many new ones.
    """
    least, most = 0.0, 0.0
    active, kept = 1, kept_prefixes(nodes)
    for _ in range(FRAMES):
        candidates = active * (LABELS + 1)
        tiles = math.ceil(active / TILE)
        products = candidates * TRANSITION_SIZE * ELEMENT + active * TRANSITION_SIZE * ACTIVATION
        frame = READ + products / LANES + (2 * tiles + 8) * PHASE + 2 * (LABELS + 1) * LABEL_CYCLES
        sorted_keys = candidates if active < kept else 2 * kept
        least, most = least + frame + sort_cycles(sorted_keys), most + frame + sort_cycles(candidates)
        active = min(candidates, kept)
    return least + 10 * PHASE, most + 10 * PHASE


def own_stages(nodes: int, batch: int, read: int, head_read: int) -> dict[str, Work]:
    """The stages without weights as kernels, of which each writes its masks; ``prepare`` by its own name.

    read, head_read: positions of the caches of target model and head that the masks are for
    Accepting walks up a path, with three reads at each node that wait for one another. Committing reads a
    path and moves its rows of keys and values.
    """
    found = {
        "search": Work(
            batch * (nodes + 1) * read, 0, ONE_KERNEL, search_cycles(nodes) if nodes else (READ, READ)
        ),
        "accept": Work(0, 0, ONE_KERNEL, (3 * READ, 3 * READ * PATH)),
    }
    if nodes:
        packed = 2 * 2 * batch * PATH * HIDDEN * HALF * LAYERS
        found["prepare"] = Work(batch * FRAMES * head_read, 0, ONE_KERNEL, (READ, READ))
        found["commit"] = Work(packed, 0, ONE_KERNEL, (2 * READ, 2 * READ))
    return found


def positions_read(text: int, nodes: int, capacity: int) -> int:
    """Positions of a cache that a step reads for a text of so many tokens (``StepPlan.lengths``)."""
    read = SHORTEST_READ
    while read < text + nodes + 1:
        read *= 2
    return min(read, capacity)


def attention(rows: int, read: int, batch: int, *, copies: bool) -> tuple[float, float]:
    """Bytes and operations of one layer's attention of ``rows`` tokens of each sequence.

    read: positions of the caches, which are all computed, since the mask hides those that are not in use
    copies: whether keys and values are copied first, and the copy is read
    """
    cache = 2 * batch * read * HIDDEN * HALF
    mask = batch * rows * read
    return (3 if copies else 1) * cache + mask, 4 * batch * rows * read * HIDDEN


def activations(rows: int, layers: int) -> float:
    """Bytes: what goes into and comes out of the seven products of every layer."""
    return rows * layers * (8 * HIDDEN + 3 * (HIDDEN + INTERMEDIATE)) * HALF


def logits(rows: int) -> float:
    """Bytes: float32, written and read once."""
    return 2 * rows * VOCABULARY * FULL


def verify(weights: Weights, nodes: int, batch: int, read: int, *, copies: bool) -> Work:
    """The target model's pass over the root and its nodes. read, copies: as of ``attention``"""
    rows = batch * (nodes + 1)
    moved, flops = attention(nodes + 1, read, batch, copies=copies)
    return Work(
        weights.bytes_per_weight * TARGET_WEIGHTS + LAYERS * moved + activations(rows, LAYERS) + logits(rows),
        2 * rows * TARGET_WEIGHTS + LAYERS * flops,
        DECODER_LAYER.times(LAYERS) + REST_OF_TARGET,
    )


def draft(weights: Weights, batch: int, read: int, prepare: Work, *, copies: bool) -> Work:
    """The head's pass over P new tokens of context and T frames, with what prepares it."""
    rows = batch * FRAMES
    moved, flops = attention(FRAMES, read, batch, copies=copies)
    context = 2 * batch * PATH * (FEATURE_LAYERS * HIDDEN**2 + 2 * HIDDEN**2)
    return Work(
        weights.bytes_per_weight * (HEAD_WEIGHTS + START_WEIGHTS)
        + moved
        + activations(rows, 1)
        + logits(rows)
        + prepare.moved,
        2 * rows * (LAYER_WEIGHTS + LM_HEAD) + 2 * batch * START_WEIGHTS + context + flops,
        HEAD + prepare.kernels,
        prepare.cycles,
    )


@dataclass(frozen=True)
class Settings:
    """What a step is predicted for.

    context: positions that the engines are compiled for
    own_kernels: whether the stages without weights are kernels, and not graphs
    text: tokens of the longest text; None where passes read all positions
    engine: TensorRT copies keys and values for passes of several rows and of parts of the caches
        (docs/tensorrt.md); PyTorch is assumed to read them where they are
    head: how the head's weights are stored; None for those of the target model
    """

    context: int = 1024
    own_kernels: bool = False
    text: int | None = None
    engine: str = TENSORRT
    head: Weights | None = None


def stages(weights: Weights, nodes: int, batch: int, settings: Settings) -> dict[str, Work]:
    """The work of a step by stage; without nodes, that of plain decoding."""
    read, head_read = settings.context + nodes + 1, settings.context + PATH + FRAMES
    if settings.text is not None:
        read = positions_read(settings.text, nodes, read)
        head_read = min(read, head_read)
    nothing = Work(0, 0, Kernels(0, 0))
    own = own_stages(nodes, batch, read, head_read) if settings.own_kernels else {}
    copies = settings.engine == TENSORRT
    found = {
        "draft": draft(
            settings.head or weights,
            batch,
            head_read,
            own.get("prepare", Work(0, 0, PREPARE)),
            copies=copies,
        )
        if nodes
        else nothing,
        "search": Work(0, 0, SEARCH if nodes else PLAIN_SEARCH),
        "verify": verify(
            weights, nodes, batch, read, copies=copies and (nodes > 0 or settings.text is not None)
        ),
        "accept": Work(0, 0, ACCEPT),
    }
    # The path's rows of keys and values are read and written.
    packed = 2 * 2 * batch * PATH * HIDDEN * HALF * LAYERS
    commit = CACHE_COMMIT.times(2 * LAYERS) + REST_OF_COMMIT
    found["commit"] = Work(packed, 0, commit) if nodes else nothing
    return found | {name: work for name, work in own.items() if name in found}


def step_milliseconds(gpu: Gpu, works: Mapping[str, Work]) -> tuple[float, float]:
    """A step with the least and with the most kernels."""
    least, most = zip(*(work.milliseconds(gpu) for work in works.values()), strict=True)
    return HOST_MS + sum(least), HOST_MS + sum(most)


def main(argv: list[str] | None = None) -> int:
    """Command line; 0, or 2 for input that cannot be used."""
    parser = Parser("benchmarks.experiments.gpu_model", __doc__)
    parser.add_argument(
        "--prompts",
        choices=tuple(TOKENS_A_STEP),
        default="mt_bench",
        help="whose tokens a step to take (default %(default)s)",
    )
    parser.add(
        "--context", type=at_least(1), default=1024, help="positions that the engines are compiled for"
    )
    parser.add("--stages", action="store_true", help="the stages of a step of --nodes nodes of --sequences")
    parser.add("--nodes", type=at_least(1), default=16, help="of the step of --stages")
    parser.add("--sequences", type=at_least(1), default=1, help="of the step of --stages")
    parser.add(
        "--over-plain", action="store_true", help="steps in plain steps that read keys and values once"
    )
    parser.add(
        "--text", type=at_least(1), help="tokens in use, up to which the caches are read (default: all)"
    )
    parser.add("--engine", choices=(TENSORRT, TORCH), default=TENSORRT, help="that runs the passes")
    parser.add("--head-weights", choices=[each.name for each in FORMATS], help="default: the target model's")
    parser.add(
        "--kernels", action="store_true", help="the stages without weights are the project's own kernels"
    )
    return parser.run(show, argv)


def show(args: argparse.Namespace) -> int:
    """Print the table."""
    head = next((each for each in FORMATS if each.name == args.head_weights), None)
    settings = Settings(args.context, args.kernels, args.text, args.engine, head)
    if args.stages:
        print(stage_table(settings, args.nodes, args.sequences))
    elif args.over_plain:
        print(ratio_table(settings))
    else:
        print(token_table(settings, TOKENS_A_STEP[args.prompts]))
    return 0


def token_table(settings: Settings, tokens: Mapping[int, float]) -> str:
    """Milliseconds a token of one sequence, with the least and the most kernels, and the speedups."""
    rows = []
    for gpu in GPUS:
        for weights in FORMATS:
            for batch in BATCHES:
                plain = step_milliseconds(gpu, stages(weights, 0, batch, settings))
                cells = [f"{plain[0]:.2f} to {plain[1]:.2f}"]
                for nodes in NODES:
                    step = step_milliseconds(gpu, stages(weights, nodes, batch, settings))
                    each = [milliseconds / tokens[nodes] for milliseconds in step]
                    gain = [before / after for before, after in zip(plain, each, strict=True)]
                    cells.append(f"{each[0]:.2f} to {each[1]:.2f} ({max(gain):.1f} to {min(gain):.1f})")
                rows.append([gpu.name, weights.name, str(batch), *cells])
    header = ["GPU", "weights", "sequences", "plain", *(f"{nodes} nodes" for nodes in NODES)]
    return markdown_table(header, rows)


def ratio_table(settings: Settings) -> str:
    """Steps over plain steps of the same positions that copy nothing, with the least and most kernels."""
    rows = []
    for gpu in GPUS:
        for weights in FORMATS:
            for batch in BATCHES:
                plain = step_milliseconds(gpu, stages(weights, 0, batch, replace(settings, engine=TORCH)))
                cells = []
                for nodes in NODES:
                    step = step_milliseconds(gpu, stages(weights, nodes, batch, settings))
                    each = [after / before for before, after in zip(plain, step, strict=True)]
                    cells.append(f"{min(each):.2f} to {max(each):.2f}")
                rows.append([gpu.name, weights.name, str(batch), *cells])
    return markdown_table(["GPU", "weights", "sequences", *(f"{nodes} nodes" for nodes in NODES)], rows)


def stage_table(settings: Settings, nodes: int = 16, batch: int = 1) -> str:
    """Milliseconds of every stage of a step of ``nodes`` nodes."""
    rows = []
    for gpu in GPUS:
        for weights in FORMATS:
            works = stages(weights, nodes, batch, settings)
            each = [work.milliseconds(gpu) for work in works.values()]
            times = [*each, step_milliseconds(gpu, works)]
            rows.append([gpu.name, weights.name, *(f"{least:.2f} to {most:.2f}" for least, most in times)])
    return markdown_table(["GPU", "weights", *works, "step"], rows)


if __name__ == "__main__":
    raise SystemExit(main())

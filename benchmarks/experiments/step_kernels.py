"""The kernels of a step, run on the host, against the exported graphs and the exact search.

    python -m benchmarks.experiments.step_kernels --bundle build/graphs --prompts a.jsonl --out DIR

The bundle is one for ONNX Runtime with the graphs of device steps (``--step-nodes``) and a parallel head. All
of its graphs that kernels replace run on random inputs, in batches of 1 to 16 sequences. Searches also run on
random lattices, for which graphs are exported first, and on those of the bundle's head while it decodes the
prompts; the trees have the sizes of the bundle. Each pass has its threads and blocks in another random order.

``equal`` counts sequences with the same outputs; trees may have exchanged nodes of nearly the same
probability. The shares are those of ``search_graph``: the expected tokens of the kernels' trees as a share of
those of the exact search on the host.
"""

import argparse
import functools
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import numpy as np
import onnx_ir as ir
import torch
from tqdm import tqdm

from benchmarks.arguments import Parser
from benchmarks.experiments.search_graph import ROOT, random_lattices, real_lattices, share, tensors_of
from benchmarks.report import markdown_table, write_report
from export.step.contracts import search_contract
from export.step.joined_graphs import SearchGraphs
from export.verify.comparison import Tensors, tree_problem
from export.verify.host_kernels import HostKernels, run_on_host
from export.verify.runner import CAPACITY, Execute
from export.verify.step import random_inputs
from runtime.core.bundle import PARALLEL, Bundle, DrafterSpec, GraphSpec, TensorSpec
from runtime.core.cli import at_least
from runtime.core.errors import UserError
from runtime.core.lattice import Lattice
from runtime.core.prefix_search import prefix_search
from runtime.core.token_tree import TokenTree
from runtime.device.kernels.graphs import GraphKernels, KernelEngine, graph_kernels
from runtime.engines.ort_wheel import ort

MAX_BATCH = 16
# Largest difference of the probabilities of nodes and tokens, which the two sides add up in another order.
TOLERANCE = 1e-5
# Threads of a block: more of them take longer on the host, and find no more.
THREADS = 32
# Makes what computes the search graph of a contract, for so many nodes and with or without merged repeats.
Reference = Callable[[GraphSpec, int, bool], Execute]


@dataclass
class Counts:
    """sequences: that were compared; equal: those whose outputs are the same

    problems: of outputs that rounding does not explain
    shares: of the exact search's expected tokens in a tree's drafts
    """

    sequences: int = 0
    equal: int = 0
    problems: list[str] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)

    def add(self, inputs: Tensors, found: Tensors, expected: Tensors) -> None:
        """Count the sequences of a batch."""
        num_seqs = len(next(iter(expected.values())))
        for row in range(num_seqs):
            self.equal += all(_same(name, found[name][row], expected[name][row]) for name in expected)
        self.sequences += num_seqs
        if "node_log_probs" in expected and expected["parents"].shape[1] > 1:
            problem = tree_problem(inputs["lengths"], found, expected)
            self.problems += [problem] if problem else []


def _same(name: str, found: np.ndarray, expected: np.ndarray) -> bool:
    if name.endswith("log_probs"):
        return bool(np.abs(np.exp(found) - np.exp(expected)).max() <= TOLERANCE)
    return np.array_equal(found, expected)


def main(argv: list[str] | None = None) -> int:
    """Command line; 1 if outputs differ, 2 for input that cannot be used, 130 for Ctrl-C."""
    parser = Parser("benchmarks.experiments.step_kernels", __doc__)
    parser.add("--bundle", "--prompts", "--out")
    parser.add("--random", type=at_least(0), default=10_000, help="number of random lattices")
    parser.add("--real", type=at_least(0), default=2_000, help="number of lattices of the bundle's head")
    parser.add("--passes", type=at_least(1), default=64, help="passes of every graph of the bundle")
    return parser.run(compare, argv)


def compare(args: argparse.Namespace) -> int:
    """Print and write the counts."""
    bundle = Bundle.load(args.bundle)
    spec = bundle.manifest.drafter
    if spec is None or spec.family != PARALLEL or len(bundle.manifest.step_nodes) < 2:
        raise UserError("--bundle: must have a parallel head and graphs of steps (--step-nodes)")
    torch.set_num_threads(1)
    kernels = HostKernels()
    found = {f"graph {name}": each for name, each in compare_graphs(bundle, kernels, args.passes).items()}
    sizes = bundle.manifest.step_nodes[1:]

    def of_bundle(contract: GraphSpec, num_nodes: int, merges_repeats: bool) -> Execute:
        return onnx_execute(bundle.path / f"search_{num_nodes}.onnx")

    for kind, lattices, reference in (
        ("real", real_lattices(args, args.real), of_bundle),
        ("random", random_lattices(args.random), exported),
    ):
        shown = tqdm(lattices, desc=kind, unit="lattice")
        for size, counts in compare_searches(shown, kernels, reference, sizes, with_shares=True).items():
            found[f"{kind} lattices, {size} nodes"] = counts
    rows = [
        {
            "of": name,
            "sequences": counts.sequences,
            "equal": counts.equal,
            "problems": len(counts.problems),
            **({"mean share": fmean(counts.shares), "least": min(counts.shares)} if counts.shares else {}),
        }
        for name, counts in found.items()
        if counts.sequences
    ]
    write_report(args, "step_kernels.json", {"rows": rows}, bundle=bundle)
    header = ["of", "sequences", "equal", "problems", "mean share", "least"]
    cells = [[_cell(row.get(name, "")) for name in header] for row in rows]
    print(markdown_table(header, cells))
    problems = [problem for counts in found.values() for problem in counts.problems]
    for problem in problems[:10]:
        print(problem)
    return int(bool(problems))


def _cell(value: object) -> str:
    return f"{value:.5f}" if isinstance(value, float) else str(value)


def compare_graphs(bundle: Bundle, kernels: HostKernels, passes: int) -> dict[str, Counts]:
    """The counts of every graph of a bundle that kernels replace.

    bundle: of the target onnxruntime, whose graphs take caches of any capacity
    passes: of each graph; the n-th has 1 + n % 16 sequences
    """
    result = {}
    for name, contract in bundle.manifest.graphs.items():
        of_graph = graph_kernels(name, contract, bundle.manifest.drafter, threads=THREADS)
        if of_graph is None:
            continue
        reference = onnx_execute(bundle.path / f"{name}.onnx")
        counts = result[name] = Counts()
        for number in range(passes):
            inputs = batch_of(contract, 1 + number % MAX_BATCH, seed=100 * number)
            expected = reference(inputs)
            kernels.order = number
            counts.add(inputs, _kernel_outputs(kernels, of_graph, contract, inputs), expected)
        # Of a search Counts finds out itself whether a difference is one of rounding.
        if not name.startswith("search_") and name != "accept_sampled" and counts.equal < counts.sequences:
            counts.problems.append(f"{name}: {counts.sequences - counts.equal} sequences differ")
    return result


def batch_of(contract: GraphSpec, num_seqs: int, seed: int) -> Tensors:
    """Random inputs of so many sequences, such as the other graphs of a step make them."""
    examples: list[Tensors] = []
    while len(examples) < num_seqs:
        examples += random_inputs(contract, CAPACITY, seed + len(examples))
    return {
        tensor.name: np.concatenate([each[tensor.name] for each in examples[:num_seqs]])
        if tensor.shape[0] == "B"
        else examples[0][tensor.name]
        for tensor in contract.inputs
    }


def _kernel_outputs(
    kernels: HostKernels, of_graph: GraphKernels, contract: GraphSpec, inputs: Tensors
) -> Tensors:
    return run_on_host(lambda device: KernelEngine(device, kernels, of_graph), contract, inputs)


def onnx_execute(path: Path) -> Execute:
    """What runs a file in ONNX Runtime."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    outputs = [output.name for output in session.get_outputs()]
    inputs = {each.name for each in session.get_inputs()}

    def execute(given: Tensors) -> Tensors:
        taken = {name: values for name, values in given.items() if name in inputs}
        return dict(zip(outputs, session.run(None, taken), strict=True))

    return execute


def exported(contract: GraphSpec, num_nodes: int, merges_repeats: bool) -> Execute:
    """A search as it is exported, in ONNX Runtime."""
    graphs = _search_graphs(contract.inputs, merges_repeats)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "search.onnx"
        ir.save(graphs.graph(contract, num_nodes), path)
        return onnx_execute(path)


@functools.cache
def _search_graphs(inputs: tuple[TensorSpec, ...], merges_repeats: bool) -> SearchGraphs:
    """The graphs of one kind of lattice: tracing takes seconds, and serves trees of every size."""
    return SearchGraphs(search_contract(inputs[:-3], 1), merges_repeats=merges_repeats)


def compare_searches(
    lattices: Iterable[Lattice],
    kernels: HostKernels,
    reference: Reference,
    sizes: tuple[int, ...],
    *,
    with_shares: bool = False,
) -> dict[int, Counts]:
    """The counts by size of tree, with lattices of one kind in batches of 1 to 16.

    sizes: the batches' in turn
    with_shares: compare with the exact search, too
    """
    counts = {size: Counts() for size in sizes}
    passes: dict[tuple[GraphSpec, int, bool], tuple[GraphKernels, Execute]] = {}
    for number, batch in enumerate(batches_of(lattices)):
        size = sizes[number % len(sizes)]
        merges = batch[0].merges_repeats
        key = search_contract(_drafts(batch[0]), size), size, merges
        if key not in passes:
            of_graph = graph_kernels(f"search_{size}", key[0], _spec(merges), threads=THREADS)
            assert of_graph
            passes[key] = of_graph, reference(*key)
        of_graph, execute = passes[key]
        arrays = [_arrays(lattice) for lattice in batch]
        inputs = {name: np.concatenate([each[name] for each in arrays]) for name in arrays[0]}
        lengths = np.arange(len(batch)) + 5
        inputs |= {
            "anchor_ids": np.full((len(batch), 1), ROOT),
            "lengths": lengths,
            "positions": np.arange(lengths[-1] + size + 1),
        }
        # The first two are no random orders.
        kernels.order = number
        outputs = _kernel_outputs(kernels, of_graph, key[0], inputs)
        counts[size].add(inputs, outputs, execute(inputs))
        if with_shares:
            counts[size].shares += [_share(lattice, outputs, row, size) for row, lattice in enumerate(batch)]
    return counts


def batches_of(lattices: Iterable[Lattice]) -> Iterator[list[Lattice]]:
    """Lattices with the same tensors that merge repeats alike; the batches of a kind have 1 to 16 in turn."""
    waiting: dict[object, list[Lattice]] = {}
    finished: dict[object, int] = {}
    for lattice in lattices:
        kind = _drafts(lattice), lattice.merges_repeats
        batch = waiting.setdefault(kind, [])
        batch.append(lattice)
        if len(batch) == 1 + finished.get(kind, 0) % MAX_BATCH:
            yield waiting.pop(kind)
            finished[kind] = finished.get(kind, 0) + 1
    yield from waiting.values()


def _arrays(lattice: Lattice) -> Tensors:
    return {name: tensor.numpy() for name, tensor in tensors_of(lattice).present().items()}


def _drafts(lattice: Lattice) -> tuple[TensorSpec, ...]:
    arrays = _arrays(lattice)
    return tuple(
        TensorSpec(name, ("B", *values.shape[1:]), str(values.dtype)) for name, values in arrays.items()
    )


def _spec(merges_repeats: bool) -> DrafterSpec:
    """Of a head whose kind of merging is all that a search asks for."""
    return DrafterSpec("ctc", PARALLEL, 1, 1, 1, 1, 1, merges_repeats, None)


def _share(lattice: Lattice, outputs: Tensors, row: int, size: int) -> float:
    # Nodes that are not among so many of the best count as if they had no probability.
    exact = prefix_search(lattice, root_token=ROOT, num_nodes=8 * size)
    names = ("input_ids", "parents", "depths", "node_log_probs")
    return share(exact, TokenTree(*(outputs[name][row] for name in names)), size)[0]


if __name__ == "__main__":
    raise SystemExit(main())

"""The search in fixed shapes, which a device runs, against the exact one on the host.

    python -m benchmarks.experiments.search_graph --bundle build/demo/bundle --prompts a.jsonl --out DIR

The drafts' expected tokens are the sum of the nodes' true prefix probabilities, by the exact search. Those of
a step include the target model's own token. The lattices are random ones, with and without a transition and
with and without merged repeats, and those of the bundle's head while it decodes the prompts.
"""

import argparse
import copy
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from benchmarks.arguments import Parser, all_prompts
from benchmarks.report import markdown_table, write_report
from drafters.lattice import LatticeTensors
from drafters.tree_search import search
from runtime.core.bundle import Bundle
from runtime.core.cli import at_least
from runtime.core.lattice import NO_TRANSITION, Lattice, Transition
from runtime.core.options import DEFAULT_NUM_NODES
from runtime.core.prefix_search import prefix_search
from runtime.core.token_tree import TokenTree
from runtime.decoder import SpeculativeDecoder

ROOT = 7
# Sizes of random lattices.
FRAMES, LABELS, WIDTH, VOCABULARY = 12, 16, 32, 48
# Nodes of the exact tree in which true probabilities are looked up.
EXACT_NODES = 1024
HEADER = ("lattices", "number", "nodes", "mean share of the drafts'", "least", "least of a step's")


def main(argv: list[str] | None = None) -> int:
    parser = Parser("benchmarks.experiments.search_graph", __doc__)
    parser.add("--bundle", "--prompts", "--out")
    parser.add("--random", type=at_least(0), default=10_000, help="number of random lattices")
    parser.add("--real", type=at_least(0), default=2_000, help="number of lattices of the bundle's head")
    return parser.run(compare, argv)


def compare(args: argparse.Namespace) -> int:
    """Print and write the shares of the exact search's expected tokens."""
    bundle = Bundle.load(args.bundle, verify=False)  # the decoder verifies the files
    kinds = {
        "random": random_lattices(args.random),
        "real": real_lattices(args, args.real),
    }
    torch.set_num_threads(1)
    rows, cells = [], []
    for kind, lattices in kinds.items():
        shares: dict[int, list[tuple[float, float]]] = {8: [], 16: [], 32: []}
        for lattice in tqdm(lattices, desc=kind, unit="lattice"):
            exact = prefix_search(lattice, root_token=ROOT, num_nodes=EXACT_NODES)
            for nodes, found in shares.items():
                found.append(share(exact, fixed_shape_tree(lattice, nodes), nodes))
        for nodes, found in shares.items():
            if not found:
                continue
            (mean, _), (least, step) = np.mean(found, axis=0).tolist(), np.min(found, axis=0).tolist()
            row = {"lattices": kind, "number": len(found), "nodes": nodes, "mean": mean, "least": least}
            rows.append({**row, "least_of_a_step": step})
            cells.append([kind, str(len(found)), str(nodes), f"{mean:.5f}", f"{least:.4f}", f"{step:.4f}"])
    table = markdown_table(HEADER, cells)
    texts = {"search_graph.md": table + "\n"}
    write_report(args, "search_graph.json", {"rows": rows}, bundle=bundle, texts=texts)
    print(table)
    return 0


def fixed_shape_tree(lattice: Lattice, num_nodes: int) -> TokenTree:
    """The tree of the search in fixed shapes. A place without a node has the parent -1."""
    found = search(
        tensors_of(lattice),
        torch.tensor([[ROOT]]),
        merges_repeats=lattice.merges_repeats,
        num_nodes=num_nodes,
    )
    return TokenTree(
        *(each[0].numpy() for each in (found.tokens, found.parents, found.depths, found.log_probs))
    )


def share(exact: TokenTree, found: TokenTree, num_nodes: int) -> tuple[float, float]:
    """Expected tokens of a tree as shares of the exact search's: its drafts', and a step's.

    exact: the tree of the best prefixes; its first ``num_nodes`` nodes are the best tree of that size
    """
    known = {pair: node for node, pair in enumerate(_pairs(exact.parents, exact.tokens))}
    place = {0: 0}
    total = 0.0
    for node, (parent, token) in enumerate(_pairs(found.parents, found.tokens)):
        same = known.get((place[parent], token)) if parent in place else None
        if same is not None and node:
            place[node] = same
            total += float(np.exp(exact.log_probs[same]))
    best = float(np.exp(exact.log_probs[1 : num_nodes + 1]).sum())
    return total / best, (1 + total) / (1 + best)


def _pairs(parents: NDArray[np.int64], tokens: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    return zip(parents.tolist(), tokens.tolist(), strict=True)


def tensors_of(lattice: Lattice) -> LatticeTensors:
    """A lattice as the graph reads it, with a batch axis."""

    def tensor(values: NDArray[np.generic]) -> torch.Tensor | None:
        return torch.from_numpy(values)[None] if values.size else None

    tokens, log_probs = tensor(lattice.frame_tokens), tensor(lattice.frame_logprobs)
    assert tokens is not None
    assert log_probs is not None
    transition = lattice.transition
    has_blank = np.isfinite(lattice.blank_logprobs).any()
    # The last vector of ``following`` is the blank's, however improbable the blank is.
    has_blank |= transition.following.shape[1:2] > lattice.frame_tokens.shape[1:]
    return LatticeTensors(
        tokens,
        log_probs,
        tensor(lattice.blank_logprobs) if has_blank else None,
        tensor(transition.frames),
        tensor(transition.root),
        tensor(transition.previous),
        tensor(transition.following),
    )


def random_lattices(count: int) -> Iterator[Lattice]:
    """The same lattices in every run."""
    random = np.random.default_rng(0)
    return (random_lattice(random) for _ in range(count))


def random_lattice(random: np.random.Generator) -> Lattice:
    """A lattice with frames of random sharpness, and labels that recur, so that paths share prefixes."""
    tokens = np.stack([random.permutation(VOCABULARY)[:LABELS] for _ in range(FRAMES)])
    sharpness = random.uniform(0.5, 4)
    logits = random.gumbel(size=(FRAMES, LABELS + 2)) * sharpness
    # A blank, and the mass that the lattice leaves out.
    logits[:, -2] += random.uniform(-2, 4)
    logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
    labels = -np.sort(-logits[:, :LABELS])
    blank = logits[:, -2] if random.random() < 0.8 else np.full(FRAMES, -np.inf)
    transition = NO_TRANSITION
    if random.random() < 0.5:
        scale = random.uniform(0.05, 0.4)

        def rows(*shape: int) -> NDArray[np.float32]:
            return (random.normal(size=(*shape, WIDTH)) * scale).astype(np.float32)

        frames = rows(FRAMES) if random.random() < 0.5 else np.zeros((FRAMES, 0), np.float32)
        transition = Transition(frames, rows(), rows(VOCABULARY)[tokens], rows(VOCABULARY)[tokens])
    merges = bool(random.random() < 0.5)
    return Lattice(tokens, labels.astype(np.float32), blank.astype(np.float32), transition, merges)


def real_lattices(args: argparse.Namespace, count: int) -> Iterator[Lattice]:
    """Lattices of the bundle's head while it decodes the prompts."""
    seen: list[Lattice] = []

    def record(lattice: Lattice, *, root_token: int, num_nodes: int) -> TokenTree:
        # The next pass uses the same memory.
        seen.append(copy.deepcopy(lattice))
        return prefix_search(lattice, root_token=root_token, num_nodes=num_nodes)

    if not count:
        return
    # A fixed number: ``auto`` may leave a head out that does not pay.
    decoder = SpeculativeDecoder.from_bundle(
        args.bundle, step="host", search=record, num_nodes=DEFAULT_NUM_NODES
    )
    seen.clear()
    for prompt in all_prompts(args.prompts, None):
        ids = decoder.prompt_tokenizer.encode_prompt(prompt)
        for _ in decoder.stream(ids, max_new_tokens=128):
            pass
        yield from seen[:count]
        count -= min(count, len(seen))
        seen.clear()
        if not count:
            return


if __name__ == "__main__":
    raise SystemExit(main())

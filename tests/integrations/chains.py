"""What our runtime drafts after a text. Draft models in other engines are compared with it."""

import numpy as np
import torch
from torch import Tensor

from drafters.lattice import LatticeTensors, lattice_tensors
from drafters.parallel import ParallelDrafter
from runtime.core.lattice import Lattice
from runtime.core.prefix_search import NEGLIGIBLE, chain_search


@torch.no_grad()
def lattice_after(
    head: ParallelDrafter, features: Tensor, anchor: int, *, frames: int, top_k: int
) -> LatticeTensors:
    """The lattice after a whole context, which the head reads in one pass.

    features: [A, F*H]; anchor: the token after the context; frames: how many the head fills
    """
    length = features.shape[0]
    hidden = head(
        features[None],
        torch.arange(length)[None],
        torch.tensor([[anchor]]),
        torch.arange(length, length + frames)[None],
        torch.ones(1, 1, frames, length + frames, dtype=torch.bool),
    )
    return lattice_tensors(head, hidden, torch.tensor([anchor]), width=top_k)


def host_lattice(tensors: LatticeTensors, *, merges_repeats: bool) -> Lattice:
    """The same lattice for the searches on the host."""
    outputs = {name: array[0] for name, array in tensors.arrays().items()}
    return Lattice.of_outputs(outputs, merges_repeats=merges_repeats)


def runtime_chain(
    head: ParallelDrafter, features: Tensor, anchor: int, *, frames: int, num_drafts: int, top_k: int
) -> list[int]:
    """The chain after a context, with the arguments of ``lattice_after``.

    It ends before a draft that is too improbable for the runtime's search to be exact.
    """
    tensors = lattice_after(head, features, anchor, frames=frames, top_k=top_k)
    lattice = host_lattice(tensors, merges_repeats=head.config.merges_repeats)
    tree = chain_search(lattice, root_token=anchor, num_nodes=num_drafts)
    shares = np.exp(np.diff(tree.log_probs))
    count = int(np.append(shares < frames * NEGLIGIBLE, True).argmax())
    tokens: list[int] = tree.tokens[1 : count + 1].tolist()
    return tokens


def is_drafted(drafts: list[int], chain: list[int]) -> bool:
    """Whether an engine's N drafts begin with a chain, behind which our runtime has none."""
    return bool(chain) and drafts[: len(chain)] == chain

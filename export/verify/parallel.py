"""A built parallel drafter against PyTorch, which runs the head without a cache."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from drafters.lattice import lattice_tensors
from drafters.parallel import ParallelDrafter
from export.verify.comparison import Tensors, check_labels, of_labels
from export.verify.runner import GraphRunner


@dataclass(frozen=True)
class ParallelReference:
    """A context in two portions, and what the head drafts after each.

    features [P, F*H]: the context, of which the first ``split`` positions are read first
    anchors [2] int64: the token after each portion
    lattices: after each portion, the expected outputs by name; the second has the first frames only if the
        head can leave some out
    """

    features: NDArray[np.float32]
    split: int
    anchors: NDArray[np.int64]
    lattices: tuple[Tensors, ...]


@torch.no_grad()
def parallel_reference(
    drafter: ParallelDrafter, features: NDArray[np.float32], *, width: int, seed: int = 0
) -> ParallelReference:
    """Run the head on a context [P, F*H], cut short and whole."""
    config = drafter.config
    split = features.shape[0] - 3
    anchors = np.random.default_rng(seed).integers(0, config.vocab_size, 2)
    counts = (config.num_frames, -(-config.num_frames // 2) if config.num_layers else config.num_frames)
    lattices = []
    for anchor, length, count in zip(anchors, (split, features.shape[0]), counts, strict=True):
        frames = torch.arange(length, length + count)[None]
        mask = torch.ones(1, 1, count, length + count, dtype=torch.bool)
        context, anchor_ids = torch.from_numpy(features[:length])[None], torch.tensor([[anchor]])
        hidden = drafter(context, torch.arange(length)[None], anchor_ids, frames, mask)
        lattice = lattice_tensors(drafter, hidden, anchor_ids[0], width=width)
        lattices.append({name: tensor[0].numpy() for name, tensor in lattice.present().items()})
    return ParallelReference(features, split, anchors, tuple(lattices))


def check_parallel(
    graph: GraphRunner, reference: ParallelReference, *, slack: float = 1.0
) -> dict[str, float]:
    """Largest absolute difference of the lattice: ``prefill`` and ``step``.

    slack: as of ``GraphRunner.difference``
    ``equal_argmax`` is the share of frames in which graph and reference prefer the same label.
    """
    found, equal = {}, []
    portions = ((0, reference.split), (reference.split, reference.features.shape[0]))
    for name, (start, end), anchor, lattice in zip(
        ("prefill", "step"), portions, reference.anchors, reference.lattices, strict=True
    ):
        num_frames = lattice["frame_tokens"].shape[0]
        outputs = graph.run(
            features=reference.features[start:end],
            context_position_ids=np.arange(start, end),
            anchor_ids=np.array([anchor]),
            frame_position_ids=np.arange(end, end + num_frames),
            attn_mask=np.tile(np.arange(graph.capacity) < end + num_frames, (1, num_frames, 1)),
            write_index=np.array(start),
        )
        # The sorted probabilities are compared as they are, other tensors only for the labels that both have.
        same = check_labels(
            f"drafter {name} frame_tokens",
            outputs["frame_tokens"],
            lattice["frame_tokens"],
            graph.activations,
        )
        equal += same[:, 0].tolist()
        found[name] = max(
            graph.difference(
                f"drafter {name} {key}",
                of_labels(outputs[key], same),
                of_labels(expected, same),
                slack=slack,
            )
            for key, expected in lattice.items()
            if key != "frame_tokens"
        )
    return {**found, "equal_argmax": float(np.mean(equal))}

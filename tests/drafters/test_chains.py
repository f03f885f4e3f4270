"""The chain in tensors of fixed shape is the one that the runtime's search finds."""

import dataclasses

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from drafters.lattice import LatticeTensors, chain_search
from runtime.core.lattice import Lattice
from runtime.core.prefix_search import NEGLIGIBLE
from runtime.core.prefix_search import chain_search as exact_chain_search

ROOT = 7
FRAMES, LABELS, RANK, VOCABULARY, NUM_DRAFTS = 10, 8, 6, 24, 7
# Lattices of a kind: ten kinds make 10,000.
PER_KIND = 1000
KINDS = {
    "ctc": (True, True, "none"),
    "ctc-unmerged": (True, False, "none"),
    "ctc-markov": (True, False, "markov"),
    "ctc-mlp": (True, False, "mlp"),
    "ctc-merged-markov": (True, True, "markov"),
    "ctc-merged-mlp": (True, True, "mlp"),
    "block": (False, False, "none"),
    "block-merged": (False, True, "none"),
    "block-markov": (False, False, "markov"),
    "block-mlp": (False, False, "mlp"),
}


def lattices(seed: int, *, has_blank: bool, transition: str) -> LatticeTensors:
    """``PER_KIND`` lattices, some of sure frames and some of unsure ones; labels recur."""
    random = np.random.default_rng(seed)
    shape = (PER_KIND, FRAMES)
    tokens = random.random((*shape, VOCABULARY)).argsort(-1)[..., :LABELS]
    logits = random.gumbel(size=(*shape, LABELS + 2)) * random.uniform(0.5, 4, (PER_KIND, 1, 1))
    # A blank, and the mass that the lattice leaves out.
    logits[..., -2] += random.uniform(-2, 4, (PER_KIND, 1))
    if not has_blank:
        logits[..., -2] = -np.inf
    logits -= np.log(np.exp(logits).sum(-1, keepdims=True))

    def tensor(values: NDArray[np.float64]) -> Tensor:
        return torch.from_numpy(values.astype(np.float32))

    found = LatticeTensors(
        torch.from_numpy(tokens),
        tensor(-np.sort(-logits[..., :LABELS])),
        tensor(logits[..., -2]) if has_blank else None,
    )
    if transition == "none":
        return found
    previous = random.normal(size=(PER_KIND, VOCABULARY + 1, RANK))
    rows = np.take_along_axis(previous, tokens.reshape(PER_KIND, -1, 1), 1).reshape(*tokens.shape, RANK)
    return dataclasses.replace(
        found,
        transition_frames=tensor(random.normal(size=(*shape, RANK))) if transition == "mlp" else None,
        transition_anchor=tensor(previous[:, -1]),
        transition_previous=tensor(rows),
        transition_following=tensor(random.normal(size=(*shape, LABELS + has_blank, RANK))),
    )


def differs(lattice: Lattice, found: list[int]) -> bool:
    """Whether a chain is another than the exact one before a label that is negligible to the exact search."""
    exact = exact_chain_search(lattice, root_token=ROOT, num_nodes=NUM_DRAFTS)
    share = np.exp(np.diff(exact.log_probs))
    count = int(np.append(share < FRAMES * NEGLIGIBLE, True).argmax())
    return found[:count] != exact.tokens[1 : count + 1].tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_ten_thousand_random_lattices(kind: str) -> None:
    has_blank, merges, transition = KINDS[kind]
    tensors = lattices(list(KINDS).index(kind), has_blank=has_blank, transition=transition)
    tokens, lengths = chain_search(tensors, merges_repeats=merges, num_drafts=NUM_DRAFTS)
    assert tokens.shape == (PER_KIND, NUM_DRAFTS)
    arrays = tensors.arrays()
    wrong = []
    for index in range(PER_KIND):
        lattice = Lattice.of_outputs({name: a[index] for name, a in arrays.items()}, merges_repeats=merges)
        if differs(lattice, tokens[index, : lengths[index]].tolist()):
            wrong.append(index)
    assert not wrong


class ChainModule(nn.Module):
    def forward(self, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return chain_search(LatticeTensors(**tensors), merges_repeats=True, num_drafts=2)


def test_torch_export_traces_it() -> None:
    """No shape depends on data: the trace of one batch computes another."""
    first, second = (lattices(seed, has_blank=True, transition="mlp").present() for seed in (100, 101))
    first, second = ({name: t[:4] for name, t in tensors.items()} for tensors in (first, second))
    blank = {"blank_logprobs": first["blank_logprobs"]}
    program = torch.export.export(ChainModule(), ({**first, **blank},)).module()
    for found, expected in zip(program(second), ChainModule()(second), strict=True):
        assert torch.equal(found, expected)


def test_behind_its_drafts_a_chain_repeats_the_last() -> None:
    """A frame that is surely 5, then surely blanks: one draft."""
    tensors = LatticeTensors(
        torch.tensor([[[5, 6], [5, 6]]]),
        torch.tensor([[[0.0, -torch.inf], [-torch.inf, -torch.inf]]]),
        torch.tensor([[-torch.inf, 0.0]]),
    )
    tokens, lengths = chain_search(tensors, merges_repeats=True, num_drafts=2)
    assert tokens.tolist() == [[5, 5]]
    assert lengths.tolist() == [1]

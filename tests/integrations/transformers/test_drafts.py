"""Drafts made step by step are those that the head makes of the whole context at once."""

from typing import Any

import numpy as np
import pytest
import torch

from drafters.autoregressive import AutoregressiveDrafter
from drafters.lattice import lattice_tensors
from drafters.parallel import ParallelDrafter
from integrations.transformers.drafts import Context, DraftOptions, LevelDrafts, ParallelDrafts, shallow
from runtime.core.lattice import Lattice
from runtime.core.prefix_search import prefix_search
from runtime.core.token_tree import ROOT_PARENT, TokenTree
from tests.integrations.transformers.models import VOCAB_SIZE, make_head, make_model

NUM_NODES = 9
# New context of two sequences, call after call; the second has ended after the third call.
STEPS = [(5, 2), (1, 3), (2, 1), (4, 0), (1, 0)]
PARALLEL: dict[str, dict[str, Any]] = {
    "ctc": {},
    "ctc-fused": {"frame_start": "fused", "transition": "mlp"},
    "ctc-some-tokens": {"transition": "mlp", "draft_vocab_size": 40},
    "ctc-residual": {"trunk": "residual", "transition": "markov"},
    "block": {"drafter_type": "block", "num_layers": 2},
    "dspark": {"drafter_type": "block", "trunk": "dspark", "transition": "markov"},
    "medusa": {"drafter_type": "medusa"},
}
AUTOREGRESSIVE: dict[str, dict[str, Any]] = {
    "hydra": {"drafter_type": "hydra"},
    "hydra-attention": {"drafter_type": "hydra", "num_layers": 1},
    "eagle": {"drafter_type": "eagle"},
    "eagle-some-tokens": {"drafter_type": "eagle", "draft_vocab_size": 40},
}


@pytest.fixture(scope="module")
def llama() -> Any:
    return make_model("llama")


def texts(head: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Random tokens [2, S] and features [2, S, F*H]."""
    length = sum(count for count, _ in STEPS) + 1
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(VOCAB_SIZE, (2, length), generator=generator)
    return tokens, torch.randn(2, length, head.config.feature_size, generator=generator)


def trees(drafts: Any, tokens: torch.Tensor, features: torch.Tensor) -> list[tuple[int, int, TokenTree]]:
    """Of every call and sequence: the sequence, the length of its context, its tree."""
    found, lengths = [], [0, 0]
    for counts in STEPS:
        contexts, roots = [], []
        for index, count in enumerate(counts):
            new = slice(lengths[index], lengths[index] + count)
            lengths[index] += count
            contexts.append(Context(tokens[index, new], features[index, new]))
            roots.append(int(tokens[index, lengths[index]]) if count else None)
        proposed = drafts.propose(contexts, roots, NUM_NODES)
        found += [(i, lengths[i], tree) for i, tree in enumerate(proposed) if roots[i] is not None]
    return found


@torch.no_grad()
@pytest.mark.parametrize("name", PARALLEL)
def test_parallel_heads(llama: Any, name: str) -> None:
    head = make_head(llama, **PARALLEL[name])
    assert isinstance(head, ParallelDrafter)
    tokens, features = texts(head)
    frames = head.config.num_frames
    options = DraftOptions(num_nodes=NUM_NODES, top_k=5)
    checked = trees(ParallelDrafts(head, 2, options), tokens, features)
    assert len(checked) == 8
    for index, length, tree in checked:
        anchors = tokens[index, length].reshape(1, 1)
        hidden = head(
            features[index : index + 1, :length],
            torch.arange(length).unsqueeze(0),
            anchors,
            torch.arange(length, length + frames).unsqueeze(0),
            torch.ones(1, 1, frames, length + frames, dtype=torch.bool),
        )
        tensors = lattice_tensors(head, hidden, anchors[0], width=5).present()
        lattice = Lattice.of_outputs(
            {kind: tensor[0].numpy() for kind, tensor in tensors.items()},
            merges_repeats=head.config.merges_repeats,
        )
        expected = prefix_search(lattice, root_token=int(anchors), num_nodes=NUM_NODES)
        np.testing.assert_array_equal(tree.tokens, expected.tokens)
        np.testing.assert_array_equal(tree.parents, expected.parents)
        np.testing.assert_allclose(tree.log_probs, expected.log_probs, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("shape", ["tree", "chain"])
@pytest.mark.parametrize("name", AUTOREGRESSIVE)
def test_autoregressive_heads(llama: Any, name: str, shape: str) -> None:
    """Every node's probability is that of its path along which the head is unrolled."""
    head = make_head(llama, **AUTOREGRESSIVE[name])
    assert isinstance(head, AutoregressiveDrafter)
    # Sharper, so that trees grow deeper than one level.
    head.attach_base(head.embed_tokens, 12 * head.lm_head)
    tokens, features = texts(head)
    options = DraftOptions(num_nodes=NUM_NODES, shape=shape, min_level_probability=0.0)
    checked = trees(LevelDrafts(head, 2, options), tokens, features)
    assert len(checked) == 8
    assert max(tree.depths.max() for _, _, tree in checked) > 2
    for index, length, tree in checked:
        depth = head.config.num_frames
        assert len(tree) == 1 + (NUM_NODES if shape == "tree" else depth)
        for node in range(1, len(tree)):
            path = tree.path(node)
            own = slice(index, index + 1)
            hidden = head.unrolled_hidden(
                features[own, : length + 1],
                tokens[own, : length + 1],
                torch.tensor([[length]]),
                torch.tensor([[path]]),
            )
            log_probs = head.logits(hidden[0]).log_softmax(-1)
            labels = head.label_ids(torch.tensor(path)).tolist()
            expected = sum(float(log_probs[at, label]) for at, label in enumerate(labels))
            assert tree.log_probs[node] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("depth", [0, 1, 2, 9])
def test_shallow(depth: int) -> None:
    tree = TokenTree(
        np.array([7, 8, 9, 10, 11]), np.array([-1, 0, 1, 0, 3]), np.array([0, 1, 2, 1, 2]), np.zeros(5)
    )
    found = shallow(tree, depth)
    paths = [tree.path(node) for node in range(5) if tree.depths[node] <= depth]
    assert [found.path(node) for node in range(len(found))] == paths
    assert found.parents[0] == ROOT_PARENT
    assert found.depths.max() == min(depth, 2)

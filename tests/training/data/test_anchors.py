"""Many anchors in one pass against every anchor alone; drawing anchors; their targets."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM

from drafters.parallel import ParallelDrafter
from training.data.batches import (
    AnchorBatch,
    Batch,
    BatchSampler,
    LiveFeatures,
    SampledBatch,
    all_anchors,
    draw_anchors,
    split_holdout,
)
from training.data.sequences import Sequences
from training.head_set import anchor_hidden

NUM_FRAMES, NUM_LABELS = 4, 3
# float32 sums of different widths.
FORWARD_TOL = 2e-4


def make_batch(input_ids: Tensor, ends: Tensor, positions: Tensor) -> SampledBatch:
    mask = (torch.arange(input_ids.shape[1]) < ends.unsqueeze(1)).long()
    return SampledBatch(Batch(tuple(range(len(ends))), input_ids, mask), positions, ends)


def anchors_of(sampled: SampledBatch) -> AnchorBatch:
    return sampled.anchors(NUM_FRAMES, NUM_LABELS)


@pytest.mark.parametrize("settings", [{}, {"drafter_type": "block", "num_layers": 2}, {"trunk": "residual"}])
@torch.no_grad()
def test_anchors_together_equal_each_alone(
    tiny_model_dir: Path, make_tiny_head: Callable[..., ParallelDrafter], settings: dict[str, Any]
) -> None:
    """Alone, target model and head are given the tokens before the anchor and nothing else."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()
    drafter = make_tiny_head(**settings)
    source = LiveFeatures(model, drafter.config.target_layer_ids)
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(2, 200, (2, 15), generator=generator)
    ends = torch.tensor([15, 9])
    positions = torch.tensor([[13, 3, 4, 1], [7, -1, 2, -1]])
    sampled = make_batch(input_ids, ends, positions)
    hidden = anchor_hidden(drafter, source(sampled.batch), anchors_of(sampled))
    together = hidden.unflatten(0, positions.shape)
    assert together.isfinite().all()
    for row, column in torch.nonzero(positions >= 0).tolist():
        at = int(positions[row, column])
        context = input_ids[row : row + 1, :at]
        alone = drafter(
            source(Batch((row,), context, torch.ones_like(context))),
            torch.arange(at)[None],
            input_ids[row : row + 1, at : at + 1],
            torch.arange(at, at + NUM_FRAMES)[None],
            torch.ones(1, 1, NUM_FRAMES, at + NUM_FRAMES, dtype=torch.bool),
        )
        torch.testing.assert_close(together[row, column], alone[0], rtol=FORWARD_TOL, atol=FORWARD_TOL)


def test_targets_and_lengths_at_the_ends_of_sequences() -> None:
    input_ids = torch.tensor([[10, 11, 12, 13, 14, 15], [20, 21, 22, 23, 0, 0]])
    positions = torch.tensor([[1, 3, 4, 5], [0, 2, 3, -1]])
    anchors = anchors_of(make_batch(input_ids, torch.tensor([6, 4]), positions))
    assert anchors.lengths.tolist() == [[3, 2, 1, 0], [3, 1, 0, 0]]
    assert anchors.anchor_ids.tolist() == [[11, 13, 14, 15], [20, 22, 23, 20]]
    expected = {(0, 0): [12, 13, 14], (0, 1): [14, 15], (0, 2): [15], (1, 0): [21, 22, 23], (1, 1): [23]}
    for (row, column), targets in expected.items():
        assert anchors.targets[row, column, : len(targets)].tolist() == targets
    assert anchors.frame_position_ids[0].tolist() == [1, 2, 3, 4, 3, 4, 5, 6, 4, 5, 6, 7, 5, 6, 7, 8]


def test_mask_of_two_anchors() -> None:
    """Rows are frames; columns are the context, then the frames of either anchor."""
    input_ids = torch.tensor([[5, 6, 7, 8]])
    batch = Batch((0,), input_ids, torch.ones_like(input_ids))
    anchors = SampledBatch(batch, torch.tensor([[2, 1]]), torch.tensor([4])).anchors(2, 1)
    assert anchors.attn_mask.int().tolist() == [
        [
            [
                [1, 1, 0, 0, 1, 1, 0, 0],
                [1, 1, 0, 0, 1, 1, 0, 0],
                [1, 0, 0, 0, 0, 0, 1, 1],
                [1, 0, 0, 0, 0, 0, 1, 1],
            ]
        ]
    ]


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=3),
    st.integers(1, 8),
    st.integers(0, 2**31),
)
def test_drawn_anchors_are_distinct_and_in_range(spans: list[tuple[int, int]], count: int, seed: int) -> None:
    starts = torch.tensor([start for start, _ in spans])
    ends = starts + torch.tensor([length for _, length in spans])
    ends[0] = ends[0].clamp(min=1)
    found = draw_anchors(starts, ends, count, torch.Generator().manual_seed(seed))
    again = draw_anchors(starts, ends, count, torch.Generator().manual_seed(seed))
    assert torch.equal(found, again)
    assert found.shape == (len(spans), count)
    for row, start, end in zip(found.tolist(), starts.tolist(), ends.tolist(), strict=True):
        real = [position for position in row if position != -1]
        assert len(real) == len(set(real)) == min(count, end - start)
        assert all(start <= position < end for position in real)
        assert row == real + [-1] * (count - len(real))


def test_every_position_is_drawn_equally_often() -> None:
    generator = torch.Generator().manual_seed(0)
    starts, ends = torch.full((4000,), 2), torch.full((4000,), 7)
    counts = torch.bincount(draw_anchors(starts, ends, 2, generator).flatten(), minlength=7)
    assert counts[:2].tolist() == [0, 0]
    # 1600 expected, standard deviation 31.
    assert ((counts[2:] - 1600).abs() < 160).all()


@pytest.fixture
def sequences() -> Sequences:
    """Eleven sequences of 4 to 14 tokens; sequence i consists of tokens 100*i, 100*i + 1, ..."""
    return Sequences(
        [(list(range(100 * i, 100 * i + 2)), list(range(100 * i + 2, 100 * i + 4 + i))) for i in range(11)]
    )


def sampler(sequences: Sequences, seed: int = 0, max_length: int = 10) -> BatchSampler:
    return BatchSampler(
        sequences,
        np.arange(len(sequences)),
        batch_size=4,
        num_anchors=5,
        max_length=max_length,
        seed=seed,
    )


def test_batches_depend_on_seed_and_number_alone(sequences: Sequences) -> None:
    first = sampler(sequences)
    later = [first.batch(number) for number in (0, 3, 5)]
    for number, expected in ((5, later[2]), (0, later[0]), (3, later[1])):
        found = sampler(sequences).batch(number)
        assert found.batch.indices == expected.batch.indices
        assert torch.equal(found.batch.input_ids, expected.batch.input_ids)
        assert torch.equal(found.positions, expected.positions)
    assert sampler(sequences, seed=1).batch(0).batch.indices != later[0].batch.indices


def test_anchors_differ_from_batch_to_batch_and_seed_to_seed() -> None:
    alike = Sequences([([1, 2], list(range(30))) for _ in range(11)])
    drawn = [
        sampler(alike, seed, max_length=40).batch(number).positions.tolist()
        for seed, number in ((0, 0), (0, 1), (1, 0))
    ]
    assert drawn[0] != drawn[1]
    assert drawn[0] != drawn[2]


def test_every_epoch_sees_every_sequence_once(sequences: Sequences) -> None:
    batches = sampler(sequences)
    seen = [row for number in range(11) for row in batches.batch(number).batch.indices]
    assert len(seen) == 44
    for epoch in range(4):
        assert sorted(seen[11 * epoch : 11 * (epoch + 1)]) == list(range(11))
    assert seen[:11] != seen[11:22]


def test_an_epochs_order_is_of_its_seed_and_drawn_once(
    sequences: Sequences, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch may begin in one epoch and end in the next."""
    indices = np.array([7, 2, 9, 4, 5])
    options = {"batch_size": 3, "num_anchors": 5, "max_length": 10, "seed": 8}
    expected = [
        int(indices[np.random.default_rng((8, epoch)).permutation(5)[offset]])
        for epoch in range(6)
        for offset in range(5)
    ]
    real, drawn = np.random.default_rng, []

    def counted(seed: Any) -> np.random.Generator:
        drawn.append(seed)
        return real(seed)

    monkeypatch.setattr(np.random, "default_rng", counted)
    batches = BatchSampler(sequences, indices, **options)
    assert [row for number in range(10) for row in batches.batch(number).batch.indices] == expected
    assert drawn == [(8, epoch) for epoch in range(6)]


def test_anchors_lie_in_continuations_and_have_a_target(sequences: Sequences) -> None:
    batches = sampler(sequences)
    for number in range(6):
        found = batches.batch(number)
        anchors = anchors_of(found)
        for row, sequence in enumerate(found.batch.indices):
            length = min(10, 4 + sequence)
            assert found.batch.attention_mask[row].tolist() == [1] * length + [0] * (
                found.batch.input_ids.shape[1] - length
            )
            assert found.batch.input_ids[row, :length].tolist() == sequences[sequence][:10].tolist()
            real = anchors.lengths[row] > 0
            assert real.sum() == min(5, length - 3)  # neither in the prompt of two nor at the end
            offsets = anchors.anchor_ids[row][real] % 100
            assert offsets.min() >= 2
            assert torch.equal(anchors.lengths[row][real], (length - 1 - offsets).clamp(max=NUM_LABELS))
            assert torch.equal(anchors.targets[row, real, 0], anchors.anchor_ids[row][real] + 1)


def test_heads_of_different_depths_get_the_same_anchors(sequences: Sequences) -> None:
    """What several heads of one run are trained on differs in the frames and labels alone."""
    sampled = sampler(sequences).batch(1)
    short, long = sampled.anchors(2, 1), sampled.anchors(5, 3)
    assert torch.equal(short.anchor_ids, long.anchor_ids)
    assert torch.equal(short.targets, long.targets[..., :1])
    assert torch.equal(short.lengths, long.lengths.clamp(max=1))
    first = long.frame_position_ids.unflatten(1, (-1, 5))
    assert torch.equal(short.frame_position_ids.unflatten(1, (-1, 2)), first[..., :2])


def test_all_anchors_are_every_position_of_the_continuations(sequences: Sequences) -> None:
    """Prompts of two tokens; the last token of a sequence has nothing after it."""
    sampled = all_anchors(sequences, [0, 10, 3], max_length=10)
    assert sampled.ends.tolist() == [4, 10, 7]
    assert sampled.positions.tolist() == [
        [2, -1, -1, -1, -1, -1, -1],
        [2, 3, 4, 5, 6, 7, 8],
        [2, 3, 4, 5, -1, -1, -1],
    ]
    lengths = sampled.anchors(NUM_FRAMES, 3).lengths
    assert lengths.tolist() == [[1, 0, 0, 0, 0, 0, 0], [3, 3, 3, 3, 3, 2, 1], [3, 3, 2, 1, 0, 0, 0]]


def test_all_anchors_of_sequences_without_a_continuation() -> None:
    sampled = all_anchors(Sequences([([1, 2, 3], []), ([4, 5], [6])]), [0, 1], max_length=10)
    assert sampled.positions.tolist() == [[-1], [-1]]


def test_split_holdout_leaves_out_what_has_no_continuation() -> None:
    rows = [([1, i], [3] * (i % 4)) for i in range(40)]
    train, held_out = split_holdout(Sequences(rows), 0.1, seed=0)
    usable = {i for i in range(40) if i % 4 >= 2}
    assert set(train) | set(held_out) == usable
    assert not set(train) & set(held_out)
    assert len(held_out) == 2
    assert [len(part) for part in split_holdout(Sequences(rows), 0.99, seed=0)] == [1, 19]
    again = split_holdout(Sequences(rows), 0.1, seed=0)
    assert again[0].tolist() == train.tolist()


def test_what_is_held_out_is_not_trained_on_under_another_number() -> None:
    """Data sets repeat rows; tokens per step on text that was trained on would promise too much."""
    rows = [([1, i // 2], [3, i // 2, 4]) for i in range(40)]
    train, held_out = split_holdout(Sequences(rows), 0.25, seed=0)
    assert len(held_out) == 10
    assert not {i // 2 for i in train} & {i // 2 for i in held_out}
    assert len(train) + len(held_out) < 40
    # Where all are the same, something has to be trained on.
    train, held_out = split_holdout(Sequences([([1], [3, 4])] * 8), 0.25, seed=0)
    assert (len(train), len(held_out)) == (6, 2)

"""The row before each anchor, of context that comes as vLLM hands it over."""

import pytest
import torch

from tests.integrations.vllm import fake_vllm

BLOCK_SIZE, HIDDEN = 4, 3


def slot_of(table: torch.Tensor, sequence: int, position: int) -> int:
    return int(table[sequence, position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE


@pytest.mark.parametrize("parts", [1, 2])
def test_the_last_accepted_row_of_every_sequence(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over steps in which sequences grow by different numbers; rejected rows are behind accepted ones."""
    model = fake_vllm.load(monkeypatch)
    random = torch.Generator().manual_seed(0)
    table = torch.tensor([[7, 2, 5, 11], [3, 1, 9, 4], [0, 6, 8, 10]])
    context = model.LastContext(40, HIDDEN)
    lengths = [0, 0, 0]
    for counts, rejected in (((9, 3, 4), (0, 0, 0)), ((3, 4, 1), (2, 0, 0)), ((5, 2, 4), (1, 1, 3))):
        rows = torch.randn(sum(counts), HIDDEN, generator=random)
        slots, expected, at = [], [], 0
        for sequence, (count, lost) in enumerate(zip(counts, rejected, strict=True)):
            start = lengths[sequence]
            slots += [slot_of(table, sequence, position) for position in range(start, start + count)]
            at += count
            expected.append(rows[at - 1 - lost])
            lengths[sequence] += count - lost
        where = torch.tensor(slots)
        cut = 5 if parts == 2 else 0
        context.store(rows[cut:], where[cut:])
        if cut:
            context.store(rows[:cut], where[:cut])
        wanted = model.slots_before(torch.tensor(lengths), table, BLOCK_SIZE)
        assert torch.equal(context.find(wanted), torch.stack(expected))


def test_padding_behind_the_sequences_reads_something(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions of padding, and a table with fewer rows than there are anchors."""
    model = fake_vllm.load(monkeypatch)
    table = torch.tensor([[5, 6]])
    found = model.slots_before(torch.tensor([5, 0, 99]), table, BLOCK_SIZE)
    assert found[0] == slot_of(table, 0, 4)
    assert found.shape == (3,)

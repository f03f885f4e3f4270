"""The scores of parallel heads, and their gradients, against a dense and slow computation."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from drafters.attention import AttentionFrames
from drafters.build import build_drafter
from drafters.config import DrafterConfig
from drafters.lattice import lattice_tensors
from drafters.parallel import ParallelDrafter
from runtime.core.lattice import Lattice
from runtime.core.prefix_search import prefix_search
from training.losses import LOG_ZERO, Scores
from training.scores import SoftTargets, Targets, parallel_scores, vocabulary_statistics

VOCAB, HIDDEN, FRAMES, LABELS, ROWS, CANDIDATES = 23, 8, 4, 3, 5, 6
TOLERANCE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}


def make_head(drafter_type: str, transition: str, **settings: Any) -> ParallelDrafter:
    torch.manual_seed(3)
    residual = drafter_type == "medusa"
    head = build_drafter(
        DrafterConfig(
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            intermediate_size=12,
            num_heads=2,
            num_kv_heads=1,
            head_dim=4,
            target_layer_ids=(0, 1),
            base_num_layers=2,
            num_frames=FRAMES,
            num_layers=0 if residual else 1,
            drafter_type=drafter_type,
            trunk="residual" if residual else "attention",
            transition=transition,
            transition_size=5,
            num_candidates=CANDIDATES,
            **settings,
        )
    ).attach_base(torch.randn(VOCAB, HIDDEN), torch.randn(VOCAB, HIDDEN))
    assert isinstance(head, ParallelDrafter)
    if head.draft_token_ids is not None:
        head.set_draft_vocabulary(torch.randperm(VOCAB)[: head.config.label_count].sort().values)
    head.start_from(torch.ones(HIDDEN))
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.4)
    return head


def make_targets(head: ParallelDrafter) -> Targets:
    """Random targets, of which the first is a candidate of the first frame and others may be none."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(head.config.label_count, (ROWS, LABELS), generator=generator)
    anchors = torch.randint(VOCAB, (ROWS, 1), generator=generator)
    with torch.no_grad():
        labels[:, 0] = head.label_logits(make_hidden())[:, 0].argmax(-1)
    return Targets(torch.cat((anchors, head.token_ids(labels)), dim=1), labels, torch.full((ROWS,), LABELS))


def make_hidden() -> Tensor:
    return torch.randn(ROWS, FRAMES, HIDDEN, generator=torch.Generator().manual_seed(2), requires_grad=True)


def soft_targets(head: ParallelDrafter, share: float) -> SoftTargets | None:
    if not share:
        return None
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(ROWS * LABELS - 2, head.config.label_count, generator=generator)
    rows = torch.randint(len(logits), (ROWS, LABELS), generator=generator)
    return SoftTargets((2 * logits).softmax(-1), rows, share)


def dense_log_probs(head: ParallelDrafter, hidden: Tensor, previous: int) -> Tensor:
    """One row's distributions [T, V (+ 1)] after a token, by adding D to whole logits."""
    logits = head.logits(hidden.unsqueeze(0))[0]
    if head.transition is None:
        return over_vocabulary(head, logits.log_softmax(-1))
    label = torch.tensor([[previous]])
    state = head.transition.state(hidden.unsqueeze(0), label, head.embed_tokens)[0, :, 0]  # [T, r]
    delta = state @ head.transition.right(head.draft_lm_head).T  # [T, L]
    best = logits[:, : head.config.label_count].topk(CANDIDATES, dim=-1).indices
    moved = torch.zeros_like(delta).scatter(1, best, delta.gather(1, best))
    blank = head.transition.blank_vector()
    if blank is not None:
        moved = torch.cat((moved, (state @ blank).unsqueeze(-1)), dim=-1)
    return over_vocabulary(head, (logits + moved).log_softmax(-1))


def over_vocabulary(head: ParallelDrafter, log_probs: Tensor) -> Tensor:
    """[T, L (+ 1)] -> [T, V (+ 1)], with no probability for tokens that drafts cannot have."""
    labels = head.config.label_count
    whole = torch.full((FRAMES, VOCAB), -torch.inf)
    whole[:, head.token_ids(torch.arange(labels))] = log_probs[:, :labels]
    return torch.cat((whole, log_probs[:, labels:]), dim=1)


def dense_scores(head: ParallelDrafter, hidden: Tensor, targets: Targets, soft: SoftTargets | None) -> Scores:
    label_logp = torch.zeros(ROWS, FRAMES, LABELS)
    blank_logp = torch.full((ROWS, FRAMES, LABELS + 1), LOG_ZERO)
    share = soft.share if soft else 0.0
    drafted = head.token_ids(torch.arange(head.config.label_count))
    for row, emitted in itertools.product(range(ROWS), range(LABELS + 1)):
        before = targets.previous_ids[row].tolist()
        log_probs = dense_log_probs(head, hidden[row], before[emitted])
        if head.blank is not None:
            blank_logp[row, :, emitted] = log_probs[:, -1]
        if emitted < LABELS:
            found = (1 - share) * log_probs[:, before[emitted + 1]]
            if soft:
                found = found + share * (log_probs[:, drafted] @ soft.probs[soft.rows[row, emitted]])
            label_logp[row, :, emitted] = found
    return Scores(label_logp, blank_logp, head.config.merges_repeats)


HEADS: dict[str, Callable[[], ParallelDrafter]] = {
    "ctc": lambda: make_head("ctc", "none"),
    "ctc markov": lambda: make_head("ctc", "markov"),
    "ctc mlp": lambda: make_head("ctc", "mlp"),
    "block": lambda: make_head("block", "none"),
    "block mlp": lambda: make_head("block", "mlp"),
    "medusa": lambda: make_head("medusa", "none"),
    "medusa own": lambda: make_head("medusa", "none", own_lm_head=True),
    "ctc mlp of some tokens": lambda: make_head("ctc", "mlp", draft_vocab_size=15),
    "medusa own of some tokens": lambda: make_head("medusa", "none", own_lm_head=True, draft_vocab_size=15),
}


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("name", HEADS)
def test_scores_and_gradients_equal_the_dense_computation(name: str, share: float) -> None:
    head = HEADS[name]()
    targets, soft = make_targets(head), soft_targets(head, share)
    generator = torch.Generator().manual_seed(5)
    weights = torch.rand(ROWS, FRAMES, LABELS, generator=generator)
    blank_weights = torch.rand(ROWS, FRAMES, LABELS + 1, generator=generator)
    results = []
    for compute in (parallel_scores, dense_scores):
        head.zero_grad()
        hidden = make_hidden()
        scores = compute(head, hidden, targets, soft)
        total = (scores.label_logp * weights).sum()
        if head.blank is not None:
            total = total + (scores.blank_logp * blank_weights).sum()
        total.backward()
        gradients = {n: p.grad.clone() for n, p in head.named_parameters() if p.grad is not None}
        results.append((scores, hidden.grad, gradients))
    (fast, fast_hidden, fast_grads), (slow, slow_hidden, slow_grads) = results
    torch.testing.assert_close(fast.label_logp, slow.label_logp, **TOLERANCE)
    torch.testing.assert_close(fast.blank_logp, slow.blank_logp, **TOLERANCE)
    torch.testing.assert_close(fast_hidden, slow_hidden, **TOLERANCE)
    assert fast_grads.keys() == slow_grads.keys()
    for parameter, gradient in fast_grads.items():
        torch.testing.assert_close(gradient, slow_grads[parameter], **TOLERANCE)


# A head that merges repeats has nothing but its frames' own probabilities (test_prefix_search.py).
@pytest.mark.parametrize("name", [name for name in HEADS if name != "ctc"])
def test_the_search_sees_the_scores_distributions(name: str) -> None:
    """What the search makes of the graph's lattice is what the loss saw: the first two tokens of drafts."""
    head, hidden = HEADS[name](), make_hidden().detach()
    anchors = make_targets(head).previous_ids[:, 0]
    with torch.no_grad():
        found = lattice_tensors(head, hidden, anchors, width=CANDIDATES)
    for row in range(ROWS):
        own = {key: tensor[row].numpy() for key, tensor in found.present().items()}
        lattice = Lattice.of_outputs(own, merges_repeats=False)
        with torch.no_grad():
            after = functools.cache(lambda label, row=row: dense_log_probs(head, hidden[row], label).exp())
            tree = prefix_search(lattice, root_token=int(anchors[row]), num_nodes=40)
            for node in range(1, len(tree)):
                path = tree.path(node)
                if len(path) > 2:
                    continue
                expected = spell(after, lattice, int(anchors[row]), path)
                assert float(np.exp(tree.log_probs[node])) == pytest.approx(expected, rel=1e-4)


def spell(after: Callable[[int], Tensor], lattice: Lattice, anchor: int, path: list[int]) -> float:
    """The probability that the frames start with the path, by recursion over blanks and labels."""
    has_blank = bool(np.isfinite(lattice.blank_logprobs).all())

    def from_frame(frame: int, emitted: int) -> float:
        if emitted == len(path):
            return 1.0
        if frame == FRAMES:
            return 0.0
        probs, label = after([anchor, *path][emitted])[frame], path[emitted]
        found = 0.0
        if label in lattice.frame_tokens[frame]:
            found += float(probs[label]) * from_frame(frame + 1, emitted + 1)
        if has_blank:
            found += float(probs[-1]) * from_frame(frame + 1, emitted)
        return found

    return from_frame(0, 0)


def test_vocabulary_statistics_goes_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    from training import scores

    hidden, weight = torch.randn(7, HIDDEN), torch.randn(VOCAB, HIDDEN)
    whole = vocabulary_statistics(hidden, weight, 4)
    monkeypatch.setattr(scores, "BLOCK_ROWS", 2)
    for one, other in zip(whole, vocabulary_statistics(hidden, weight, 4), strict=True):
        torch.testing.assert_close(one, other)


def test_a_block_on_a_gpu_has_as_many_rows_as_fit() -> None:
    from training.scores import BLOCK_ROWS, GPU_BLOCK_BYTES, _block_logits

    for vocab_size, expected in ((2**14, GPU_BLOCK_BYTES // 2**16), (2**24, BLOCK_ROWS)):
        hidden, weight = (torch.empty(rows, 1, device="meta") for rows in (3 * expected, vocab_size))
        assert [part.start for part, _ in _block_logits(hidden, weight)] == [0, expected, 2 * expected]
    assert len(list(_block_logits(torch.empty(3 * BLOCK_ROWS, 1), torch.empty(5, 1)))) == 3


def test_a_fresh_transition_changes_nothing() -> None:
    torch.manual_seed(0)
    for kind in ("markov", "mlp"):
        config = make_head("ctc", kind).config
        head = AttentionFrames(config).attach_base(torch.randn(VOCAB, HIDDEN), torch.randn(VOCAB, HIDDEN))
        assert head.transition is not None
        hidden, labels = torch.randn(2, FRAMES, HIDDEN), torch.randint(VOCAB, (2, 3))
        state = head.transition.state(hidden, labels, head.embed_tokens)
        assert not (state @ head.transition.right(head.lm_head).T).any()

"""Residual frames (Medusa's heads): what each frame reads, how it starts, and its definition."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from drafters.build import build_drafter, load_drafter
from drafters.config import WEIGHTS_NAME, DrafterConfig
from drafters.residual import ResidualFrames

VOCAB_SIZE, HIDDEN, FRAMES, CONTEXT = 40, 16, 4, 9
EPS = 1e-5
# float32, with sums in another order.
TOLERANCE: dict[str, Any] = {"atol": 1e-5, "rtol": 1e-5}
KINDS: dict[str, dict[str, Any]] = {
    "medusa": {"drafter_type": "medusa"},
    "medusa, 2 layers": {"drafter_type": "medusa", "head_depth": 2},
    "medusa, own LM heads": {"drafter_type": "medusa", "own_lm_head": True},
    "ctc": {"drafter_type": "ctc"},
}


def fresh_head(**settings: Any) -> ResidualFrames:
    """As training begins."""
    torch.manual_seed(2)
    head = build_drafter(
        DrafterConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=HIDDEN,
            intermediate_size=24,
            num_heads=4,
            num_kv_heads=2,
            head_dim=8,
            target_layer_ids=(0, 2),
            base_num_layers=3,
            num_frames=FRAMES,
            num_layers=0,
            trunk="residual",
            rms_norm_eps=EPS,
            **settings,
        )
    )
    assert isinstance(head, ResidualFrames)
    head.attach_base(torch.randn(VOCAB_SIZE, HIDDEN), torch.randn(VOCAB_SIZE, HIDDEN))
    head.start_from(torch.rand(HIDDEN) + 0.5)
    return head.eval()


def trained_head(**settings: Any) -> ResidualFrames:
    """With weights that are not zero."""
    head = fresh_head(**settings)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return head


@pytest.fixture(params=list(KINDS.values()), ids=list(KINDS))
def head(request: pytest.FixtureRequest) -> ResidualFrames:
    return trained_head(**request.param)


def make_features(batch_size: int = 1) -> Tensor:
    return torch.randn(batch_size, CONTEXT, 2 * HIDDEN, generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def run(head: ResidualFrames, features: Tensor, anchors: list[int], *, start: int = 0) -> Tensor:
    """Logits [B, M, T, V (+ 1)] of anchors at these positions; the features begin at ``start``."""
    batch_size, length = features.shape[:2]
    frames = (torch.tensor(anchors)[:, None] + torch.arange(FRAMES)).flatten()
    context = torch.arange(start, start + length)
    hidden = head(
        features, context.expand(batch_size, -1), None, frames.expand(batch_size, -1), attn_mask=None
    )
    assert hidden.shape == (batch_size, len(anchors) * FRAMES, HIDDEN)
    return head.logits(hidden.unflatten(1, (-1, FRAMES)))


def test_every_frame_by_its_definition(head: ResidualFrames) -> None:
    """lm_head_t(x + silu(W_t x + b_t)), layer after layer, x the normed feature before the anchor."""
    features = make_features(2)
    found = run(head, features, [4])
    assert found.shape == (2, 1, FRAMES, VOCAB_SIZE + int(head.config.has_blank))
    for row in range(2):
        for frame in range(FRAMES):
            x = F.rms_norm(features[row, 3, HIDDEN:], (HIDDEN,), head.norm.weight, EPS)
            for layer in range(head.config.head_depth):
                x = x + F.silu(head.blocks[layer, frame] @ x + head.biases[layer, frame])
            expected = (head.lm_head if head.heads is None else head.heads[frame]) @ x
            if head.blank is not None:
                expected = torch.cat((expected, head.blank(x)))
            torch.testing.assert_close(found[row, 0, frame], expected, **TOLERANCE)


def test_only_the_last_layers_feature_before_the_anchor_is_read(head: ResidualFrames) -> None:
    features, anchors = make_features(), [3, 7]
    base = run(head, features, anchors)
    noise = torch.randn_like(features)
    for anchor, at in enumerate(position - 1 for position in anchors):
        # All but one vector of 16 numbers changes: these frames do not.
        changed = features + noise
        changed[:, at, HIDDEN:] = features[:, at, HIDDEN:]
        torch.testing.assert_close(run(head, changed, anchors)[:, anchor], base[:, anchor], atol=0, rtol=0)
        # That vector alone: all of these frames do, and no others.
        changed = features.clone()
        changed[:, at, HIDDEN:] += noise[:, at, HIDDEN:]
        moved = (run(head, changed, anchors) - base).abs().amax(dim=(0, 3))
        assert moved[anchor].min() > 1e-3
        assert moved[1 - anchor].max() == 0


@pytest.mark.parametrize("chunks", [[9], [4, 3, 2], [1] * 9])
def test_incremental_equals_full(head: ResidualFrames, chunks: list[int]) -> None:
    """A decoder hands over new features only; their positions go on counting."""
    features, start = make_features(), 0
    for count in chunks:
        end = start + count
        found = run(head, features[:, start:end], [end], start=start)
        torch.testing.assert_close(found, run(head, features, [end]), **TOLERANCE)
        start = end


@pytest.mark.parametrize("kind", KINDS)
def test_a_fresh_head_is_the_target_models_own(kind: str) -> None:
    """With W = 0 every frame is the target model's prediction: its LM head after its last norm."""
    head, features = fresh_head(**KINDS[kind]), make_features()
    normed = F.rms_norm(features[:, 4, HIDDEN:], (HIDDEN,), head.norm.weight, EPS)
    own = normed @ head.lm_head.T
    found = run(head, features, [5])[:, 0, :, :VOCAB_SIZE]
    torch.testing.assert_close(found, own.expand(FRAMES, -1)[None], **TOLERANCE)


def test_own_lm_heads_are_independent() -> None:
    head, features = trained_head(own_lm_head=True, drafter_type="medusa"), make_features()
    base = run(head, features, [5])
    assert head.heads is not None
    with torch.no_grad():
        head.heads[2].mul_(2)
    moved = (run(head, features, [5]) - base).abs().amax(dim=(0, 1, 3))
    assert (moved > 0).tolist() == [False, False, True, False]
    # The target model's LM head is not read any more.
    head.lm_head.zero_()
    assert not torch.equal(run(head, features, [5]), torch.zeros_like(base))


def test_padding_anchors_are_harmless(head: ResidualFrames) -> None:
    """A padding anchor stands at position 0, before which there is no feature."""
    features = make_features()
    found = run(head, features, [6, 0, 2])
    assert found.isfinite().all()
    alone = run(head, features, [6, 2])
    torch.testing.assert_close(found[:, [0, 2]], alone, atol=0, rtol=0)


def test_all_parameters_are_trained_and_the_base_is_not(head: ResidualFrames) -> None:
    base = torch.randn(VOCAB_SIZE, HIDDEN, requires_grad=True)
    head.attach_base(base, base)
    frames = torch.arange(CONTEXT, CONTEXT + FRAMES)[None]
    hidden = head(make_features(), torch.arange(CONTEXT)[None], None, frames, None)
    head.logits(hidden).square().sum().backward()
    assert base.grad is None
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in head.parameters())


def test_save_and_load(head: ResidualFrames, tmp_path: Path) -> None:
    head.save_pretrained(tmp_path)
    loaded = load_drafter(tmp_path).attach_base(head.embed_tokens, head.lm_head).eval()
    assert isinstance(loaded, ResidualFrames)
    assert loaded.config == head.config
    features = make_features()
    torch.testing.assert_close(run(loaded, features, [5]), run(head, features, [5]), atol=0, rtol=0)
    # Only LM heads of its own are as wide as the vocabulary.
    saved = load_file(tmp_path / WEIGHTS_NAME)
    wide = [name for name, tensor in saved.items() if VOCAB_SIZE in tensor.shape]
    assert wide == (["heads"] if head.config.own_lm_head else [])

"""Attention frames: checkpoints, independent anchors, and the incremental pass."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafters.attention import AttentionFrames, AttentionTrunk
from drafters.build import build_drafter, load_drafter
from drafters.config import CONFIG_NAME, WEIGHTS_NAME, DrafterConfig, DrafterConfigError
from drafters.lattice import chain_search, lattice_tensors
from drafters.layers import scaled_dot_product
from training.losses import DECAY, cross_entropy_loss
from training.scores import Targets, parallel_scores

VOCAB_SIZE, HIDDEN, FRAMES, CONTEXT = 40, 16, 4, 12
# What is computed in two ways is computed in float64: in float32, sums in another order differ by amounts
# that depend on the processor.
TOLERANCE = 1e-10


HEADS: dict[str, dict[str, Any]] = {
    "ctc": {},
    "ctc, 2 layers": {"num_layers": 2},
    "ctc, fused": {"frame_start": "fused", "start_size": 9},
    "ctc, window": {"attention_window": 7},
    "block": {"drafter_type": "block"},
    "dspark": {"drafter_type": "block", "trunk": "dspark", "num_layers": 2, "mask_token_id": 3},
    "dflash": {"drafter_type": "block", "trunk": "dflash", "mask_token_id": 3},
}


@pytest.fixture(params=HEADS)
def drafter(request: pytest.FixtureRequest) -> AttentionTrunk:
    return make_drafter(**HEADS[request.param])


def make_drafter(**settings: Any) -> AttentionTrunk:
    torch.manual_seed(1)
    config = DrafterConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN,
        intermediate_size=24,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        target_layer_ids=(0, 2),
        base_num_layers=3,
        num_frames=FRAMES,
        **settings,
    )
    drafter = build_drafter(config).eval()
    assert isinstance(drafter, AttentionTrunk)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)  # attention that is not nearly uniform
    return drafter.attach_base(torch.randn(VOCAB_SIZE, HIDDEN), torch.randn(VOCAB_SIZE, HIDDEN))


@pytest.fixture
def double_drafter(drafter: AttentionTrunk) -> AttentionTrunk:
    return drafter.double()


def make_features(batch_size: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    random = torch.Generator().manual_seed(3)
    return torch.randn(batch_size, CONTEXT, 2 * HIDDEN, generator=random, dtype=dtype)


def run_anchors(
    drafter: AttentionTrunk, features: Tensor, positions: list[int], anchors: list[int]
) -> Tensor:
    """Logits of anchors at several positions, each seeing what is before it and its own frames."""
    batch_size, context = features.shape[:2]
    count = len(anchors)
    context_mask = torch.arange(context) < torch.tensor(positions).repeat_interleave(FRAMES)[:, None]
    own_frames = torch.block_diag(*[torch.ones(FRAMES, FRAMES)] * count).bool()
    mask = torch.cat((context_mask, own_frames), dim=1).expand(batch_size, 1, -1, -1)
    frame_positions = (torch.tensor(positions)[:, None] + torch.arange(FRAMES)).flatten()
    with torch.no_grad():
        hidden: Tensor = drafter(
            features,
            torch.arange(context).expand(batch_size, -1),
            torch.tensor(anchors).expand(batch_size, -1),
            frame_positions.expand(batch_size, -1),
            mask,
        )
        return drafter.logits(hidden.unflatten(1, (count, FRAMES)))


@torch.no_grad()
def test_the_first_frame_of_dflash_says_nothing() -> None:
    """Its chain is the best label of each frame behind the first, and its loss is that of those frames."""
    drafter = make_drafter(**HEADS["dflash"])
    hidden = torch.randn(3, FRAMES, HIDDEN)
    labels = drafter.label_logits(hidden)[:, 1:]
    lattice = lattice_tensors(drafter, hidden, torch.tensor([1, 2, 3]), width=5)
    assert not drafter.config.merges_repeats
    chains, lengths = chain_search(lattice, merges_repeats=False, num_drafts=FRAMES)
    assert lengths.tolist() == [FRAMES - 1] * 3
    assert torch.equal(chains[:, : FRAMES - 1], labels.argmax(-1))

    targets = torch.randint(VOCAB_SIZE, (3, FRAMES))
    lengths = torch.full((3,), FRAMES)
    scores = parallel_scores(drafter, hidden, Targets(targets, targets, lengths))
    own = labels.log_softmax(-1).gather(2, targets[:, : FRAMES - 1, None]).squeeze(2)
    expected = -(own * DECAY ** torch.arange(FRAMES - 1)).sum(1)
    torch.testing.assert_close(cross_entropy_loss(scores, targets, lengths), expected)


class ScatterCache:
    """Buffers of a fixed capacity: rows go in at ``start``, the whole buffers come out."""

    def __init__(self, num_layers: int, capacity: int):
        self.start = 0
        self.buffers = torch.zeros(num_layers, 2, 1, 2, capacity, 8, dtype=torch.float64)

    def update(self, key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        end = self.start + key.shape[2]
        self.buffers[layer, 0, :, :, self.start : end] = key
        self.buffers[layer, 1, :, :, self.start : end] = value
        return self.buffers[layer, 0], self.buffers[layer, 1]


def test_returns_logits_of_labels_and_of_a_blank(drafter: AttentionTrunk) -> None:
    out = run_anchors(drafter, make_features(2), [3, 7], [5, 6])
    assert out.shape == (2, 2, FRAMES, VOCAB_SIZE + int(drafter.config.has_blank))
    assert out.dtype == torch.float32
    assert out.isfinite().all()


def test_every_anchor_equals_the_anchor_alone(double_drafter: AttentionTrunk) -> None:
    features = make_features(2, torch.float64)
    positions, anchors = [1, 5, 5, 12], [9, 3, 4, 9]
    together = run_anchors(double_drafter, features, positions, anchors)
    for index, (position, anchor) in enumerate(zip(positions, anchors, strict=True)):
        alone = run_anchors(double_drafter, features[:, :position], [position], [anchor])
        torch.testing.assert_close(together[:, index], alone[:, 0], atol=TOLERANCE, rtol=TOLERANCE)
    # The anchor token reaches every frame: not just the one whose embedding it is.
    assert (together[:, 1] - together[:, 2]).abs().amax(dim=(0, 2)).min() > 1e-3


def test_frames_see_the_context_in_order(drafter: AttentionTrunk) -> None:
    """Guards the comparisons above: with other features or another order, frames change."""
    features = make_features()
    base = run_anchors(drafter, features, [CONTEXT], [4])
    for changed in (features.flip(1), features * torch.linspace(1, 2, 2 * HIDDEN)):
        assert (run_anchors(drafter, changed, [CONTEXT], [4]) - base).abs().max() > 1e-3


def test_a_window_hides_what_is_further_back() -> None:
    """A frame at position p sees the positions after p - W, so later frames see less of the context."""
    drafter, features = make_drafter(attention_window=4), make_features()
    base = run_anchors(drafter, features, [CONTEXT], [4])[0, 0]
    for frame in range(FRAMES):
        for position in range(CONTEXT):
            changed = features.clone()
            changed[:, position] += 1
            moved = (run_anchors(drafter, changed, [CONTEXT], [4])[0, 0, frame] - base[frame]).abs().max()
            assert (moved > 0) == (position > CONTEXT + frame - 4)
    wide = run_anchors(make_drafter(attention_window=CONTEXT + FRAMES), features, [CONTEXT], [4])
    assert torch.equal(wide, run_anchors(make_drafter(), features, [CONTEXT], [4]))


@torch.no_grad()
def test_fused_frames_begin_as_their_formula_says() -> None:
    start: Any = make_drafter(frame_start="fused").double().start
    assert start is not None
    anchors, last = torch.randn(2, 2, 3, HIDDEN, dtype=torch.float64)
    found = start(anchors, last, FRAMES)
    assert found.shape == (2, 3, FRAMES, HIDDEN)
    e, c = anchors[1, 2], last[1, 2]
    both = torch.cat((start.anchor_norm(e), c))
    for frame, weight in enumerate(start.spread.weight.chunk(FRAMES)):
        expected = e + c + weight @ torch.nn.functional.silu(start.fuse.weight @ both)
        torch.testing.assert_close(found[1, 2, frame], expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("name", HEADS)
def test_the_first_frames_are_those_of_a_head_that_has_no_more(name: str) -> None:
    whole, short = (make_drafter(**HEADS[name]).double() for _ in range(2))
    count = 2
    short.config = dataclasses.replace(short.config, num_frames=count)
    if isinstance(short, AttentionFrames) and isinstance(whole, AttentionFrames):
        short.frame_queries.data = whole.frame_queries[:count]
    if isinstance(short, AttentionFrames) and short.start is not None:
        short.start.num_frames = count
        short.start.spread.weight.data = short.start.spread.weight[: count * HIDDEN]
    context, frames = torch.arange(CONTEXT)[None], torch.arange(CONTEXT, CONTEXT + count)[None]
    mask = torch.ones(1, 1, count, CONTEXT + count, dtype=torch.bool)
    with torch.no_grad():
        found, expected = (
            head(make_features(dtype=torch.float64), context, torch.tensor([[4]]), frames, mask)
            for head in (whole, short)
        )
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("shift", [1, 100])
def test_only_distances_between_positions_matter(double_drafter: AttentionTrunk, shift: int) -> None:
    """Queries and keys are rotated alike; moving the frames alone does change them."""
    features = make_features(dtype=torch.float64)
    mask = torch.ones(1, 1, FRAMES, CONTEXT + FRAMES, dtype=torch.bool)
    context, frames = torch.arange(CONTEXT)[None], torch.arange(CONTEXT, CONTEXT + FRAMES)[None]
    with torch.no_grad():
        base = double_drafter(features, context, torch.tensor([[4]]), frames, mask)
        moved = double_drafter(features, context + shift, torch.tensor([[4]]), frames + shift, mask)
        torch.testing.assert_close(moved, base, atol=TOLERANCE, rtol=TOLERANCE)
        if isinstance(double_drafter, AttentionFrames) and double_drafter.start is not None:
            return  # whose frames have to follow a token of the context
        apart = double_drafter(features, context, torch.tensor([[4]]), frames + shift, mask)
    assert (apart - base).abs().max() > 0.01


@pytest.mark.parametrize("chunks", [[12], [5, 4, 3], [1] * 12])
def test_incremental_equals_full(double_drafter: AttentionTrunk, chunks: list[int]) -> None:
    """New context goes in chunk by chunk; frames' rows are overwritten by the next chunk."""
    features = make_features(dtype=torch.float64)
    capacity = CONTEXT + FRAMES + 4
    cache = ScatterCache(double_drafter.config.num_layers, capacity)
    length = 0
    for count in chunks:
        end = length + count
        anchor = 10 + end
        mask = (torch.arange(capacity) < end + FRAMES).expand(1, 1, FRAMES, -1)
        cache.start = length
        with torch.no_grad():
            hidden = double_drafter(
                features[:, length:end],
                torch.arange(length, end)[None],
                torch.tensor([[anchor]]),
                torch.arange(end, end + FRAMES)[None],
                mask,
                cache=cache,
            )
        full = run_anchors(double_drafter, features[:, :end], [end], [anchor])
        torch.testing.assert_close(double_drafter.logits(hidden), full[:, 0], atol=TOLERANCE, rtol=TOLERANCE)
        length = end
    assert length == CONTEXT


def test_the_base_is_frozen(drafter: AttentionTrunk) -> None:
    base = torch.randn(VOCAB_SIZE, HIDDEN, requires_grad=True)
    drafter.attach_base(base, base)
    hidden = drafter(
        make_features()[:, :2],
        torch.arange(2)[None],
        torch.tensor([[1]]),
        torch.arange(2, 2 + FRAMES)[None],
        torch.ones(1, 1, FRAMES, 2 + FRAMES, dtype=torch.bool),
    )
    drafter.logits(hidden).square().sum().backward()
    assert base.grad is None
    assert all(parameter.grad is not None for parameter in drafter.parameters())


def test_save_and_load(drafter: AttentionTrunk, tmp_path: Path) -> None:
    directory = tmp_path / "heads" / "ctc"
    drafter.save_pretrained(directory)
    loaded = load_drafter(directory).attach_base(drafter.embed_tokens, drafter.lm_head).eval()
    assert isinstance(loaded, AttentionTrunk)
    assert loaded.config == drafter.config
    features = make_features()
    torch.testing.assert_close(
        run_anchors(loaded, features, [6], [2]), run_anchors(drafter, features, [6], [2]), atol=0, rtol=0
    )


def test_base_weights_are_not_in_the_checkpoint(drafter: AttentionTrunk, tmp_path: Path) -> None:
    drafter.save_pretrained(tmp_path)
    saved = load_file(tmp_path / WEIGHTS_NAME)
    assert set(saved) == {name for name, _ in drafter.named_parameters()}
    assert not any(VOCAB_SIZE in tensor.shape for tensor in saved.values())


def test_a_half_precision_checkpoint_loads_in_float32(drafter: AttentionTrunk, tmp_path: Path) -> None:
    expected = {name: parameter.half().float() for name, parameter in drafter.state_dict().items()}
    drafter.save_pretrained(tmp_path, dtype=torch.float16)
    assert {tensor.dtype for tensor in load_file(tmp_path / WEIGHTS_NAME).values()} == {torch.float16}
    loaded = load_drafter(str(tmp_path)).state_dict()
    for name, tensor in loaded.items():
        assert tensor.dtype == torch.float32
        torch.testing.assert_close(tensor, expected[name], atol=0, rtol=0)


@pytest.mark.parametrize("name", [CONFIG_NAME, WEIGHTS_NAME])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    make_drafter().save_pretrained(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(DrafterConfigError, match=rf"is no drafter checkpoint: {name} is missing"):
        load_drafter(tmp_path)


def test_an_unknown_field_is_named(tmp_path: Path) -> None:
    make_drafter().save_pretrained(tmp_path)
    values = json.loads((tmp_path / CONFIG_NAME).read_text(encoding="utf-8"))
    (tmp_path / CONFIG_NAME).write_text(json.dumps({**values, "frames": 8}), encoding="utf-8")
    with pytest.raises(DrafterConfigError, match=rf"{CONFIG_NAME}: unknown field 'frames'"):
        load_drafter(tmp_path)


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    make_drafter().save_pretrained(tmp_path)
    values = json.loads((tmp_path / CONFIG_NAME).read_text(encoding="utf-8"))
    (tmp_path / CONFIG_NAME).write_text(json.dumps({**values, "num_frames": FRAMES + 1}), encoding="utf-8")
    with pytest.raises(DrafterConfigError, match=rf"(?s){WEIGHTS_NAME} does not fit.*frame_queries"):
        load_drafter(tmp_path)


def test_a_missing_weight_is_named(tmp_path: Path) -> None:
    make_drafter().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / WEIGHTS_NAME)
    del tensors["blank.bias"]
    save_file(tensors, tmp_path / WEIGHTS_NAME)
    with pytest.raises(DrafterConfigError, match=rf"(?s){WEIGHTS_NAME} does not fit.*blank\.bias"):
        load_drafter(tmp_path)


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
    make_drafter().save_pretrained(tmp_path)
    path = tmp_path / WEIGHTS_NAME
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(DrafterConfigError, match=WEIGHTS_NAME):
        load_drafter(tmp_path)


@pytest.mark.parametrize("name", ["embed_tokens", "lm_head"])
def test_another_models_base_is_refused(name: str) -> None:
    base = {"embed_tokens": torch.zeros(VOCAB_SIZE, HIDDEN), "lm_head": torch.zeros(VOCAB_SIZE, HIDDEN)}
    base[name] = torch.zeros(VOCAB_SIZE + 1, HIDDEN)
    with pytest.raises(DrafterConfigError, match=rf"{name} of the target model must have shape \(40, 16\)"):
        make_drafter().attach_base(**base)


def test_grouped_queries_on_a_gpu_are_those_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor that says it is elsewhere goes the way of a GPU."""

    class Elsewhere(torch.Tensor):
        @property
        def device(self) -> torch.device:  # type: ignore[override]
            return torch.device("meta")

    query, key, value = (torch.randn(2, heads, 5, 8) for heads in (6, 2, 2))
    mask = torch.rand(2, 1, 5, 5) > 0.3
    mask |= torch.eye(5, dtype=torch.bool)
    expected = scaled_dot_product(query, key, value, mask)
    seen: list[dict[str, Any]] = []
    real = torch.nn.functional.scaled_dot_product_attention

    def watched(*given: Any, **options: Any) -> Tensor:
        seen.append(options)
        return real(*given, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    found = scaled_dot_product(query.as_subclass(Elsewhere), key, value, mask)
    torch.testing.assert_close(found.as_subclass(torch.Tensor), expected)
    assert "enable_gqa" not in seen[0]

"""Autoregressive heads: the unrolled pass of training equals the incremental one of decoding."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from drafters.autoregressive import AutoregressiveDrafter
from drafters.build import build_drafter, load_drafter
from drafters.config import WEIGHTS_NAME, DrafterConfig, DrafterConfigError
from drafters.eagle import EagleDrafter
from drafters.hydra import HydraDrafter, HydraHead
from drafters.layers import DraftLayer, scaled_dot_product

VOCAB_SIZE, HIDDEN, DEPTH, LENGTH = 40, 16, 4, 14
CONFIG = DrafterConfig(
    vocab_size=VOCAB_SIZE,
    hidden_size=HIDDEN,
    intermediate_size=24,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    target_layer_ids=(0, 2),
    base_num_layers=3,
    num_frames=DEPTH,
)
KINDS: dict[str, dict[str, Any]] = {
    "eagle": {"drafter_type": "eagle"},
    "hydra": {"drafter_type": "hydra", "num_layers": 0},
    "hydra++": {"drafter_type": "hydra", "num_layers": 1, "head_depth": 3},
}
# float32, with sums in another order.
TOLERANCE = 1e-5


def make_drafter(**settings: Any) -> AutoregressiveDrafter:
    torch.manual_seed(5)
    drafter = build_drafter(dataclasses.replace(CONFIG, **settings)).eval()
    assert isinstance(drafter, AutoregressiveDrafter)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)  # attention that is not nearly uniform
    return drafter.attach_base(torch.randn(VOCAB_SIZE, HIDDEN), torch.randn(VOCAB_SIZE, HIDDEN))


@pytest.fixture(params=list(KINDS.values()), ids=list(KINDS))
def drafter(request: pytest.FixtureRequest) -> AutoregressiveDrafter:
    return make_drafter(**request.param)


def make_batch(batch_size: int = 2, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    """Features [B, S, F*H] and tokens [B, S]."""
    generator = torch.Generator().manual_seed(3)
    return (
        torch.randn(batch_size, length, 2 * HIDDEN, generator=generator),
        torch.randint(0, VOCAB_SIZE, (batch_size, length), generator=generator),
    )


def targets_of(input_ids: Tensor, positions: Tensor, count: int = DEPTH) -> Tensor:
    """[B, M, count]: the tokens after each anchor, the last one repeated at the end."""
    at = positions.clamp(min=0).unsqueeze(-1) + torch.arange(1, count + 1)
    return input_ids.gather(1, at.clamp(max=input_ids.shape[1] - 1).flatten(1)).view_as(at)


def unrolled(
    drafter: AutoregressiveDrafter, features: Tensor, input_ids: Tensor, positions: Tensor, count: int = DEPTH
) -> Tensor:
    """[B, M, min(D, U), H]"""
    targets = targets_of(input_ids, positions, count)
    hidden = drafter.unrolled_hidden(features, input_ids, positions, targets)
    return hidden.unflatten(0, positions.shape)


class ScatterCache:
    """Buffers of a fixed capacity: rows go in at ``start``, the whole buffers come out."""

    def __init__(self, capacity: int):
        self.start = 0
        # What no query may attend to is anything but zero.
        self.buffers = torch.full((2, 1, 2, capacity, 8), 50.0)

    def update(self, key: Tensor, value: Tensor, layer: int, /) -> tuple[Tensor, Tensor]:
        end = self.start + key.shape[2]
        self.buffers[0, :, :, self.start : end] = key
        self.buffers[1, :, :, self.start : end] = value
        return self.buffers[0], self.buffers[1]


class Incremental:
    """One sequence as a decoder reads it: context in portions, then row after row of a draft."""

    def __init__(self, drafter: AutoregressiveDrafter, capacity: int = 32):
        self.drafter, self.capacity = drafter, capacity
        self.cache = ScatterCache(capacity)
        self.length = 0

    def root(self, features: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Read context rows [1, A, F*H] with the tokens [1, A] after theirs: hidden, state of the last."""
        count = features.shape[1]
        self.cache.start = self.length
        self.length += count
        return self._run(
            features=features,
            context_token_ids=token_ids,
            context_position_ids=torch.arange(self.length - count, self.length)[None],
            query_indices=torch.tensor([[count - 1]]),
            attn_mask=self._mask(self.length),
            path_ids_0=token_ids[:, -1:, None],
        )

    def row(self, state: Tensor, path: list[int]) -> tuple[Tensor, Tensor]:
        """The row after the anchor and the drafts ``path[1:]``, its parent's state given."""
        depth = len(path) - 1
        eagle = isinstance(self.drafter, EagleDrafter)
        self.cache.start = self.length + depth - 1
        return self._run(
            states=state,
            token_ids=torch.tensor([path[-1:]]),
            position_ids=torch.tensor([[self.length + depth - 1]]),
            attn_mask=self._mask(self.length + depth) if eagle else self._mask(0)[:, :, :0],
            **{f"path_ids_{depth}": torch.tensor([[path]])},
        )

    def _run(self, **given: Tensor) -> tuple[Tensor, Tensor]:
        """A pass; what is not given is empty."""
        inputs = {}
        for name, (shape, dtype) in self.drafter.tensors.items():
            empty = [1 if size == "B" else 0 if isinstance(size, str) else size for size in shape]
            inputs[name] = given.get(name, torch.zeros(empty, dtype=dtype))
        hidden, states = self.drafter(inputs, cache=self.cache)
        return hidden, states

    def _mask(self, length: int) -> Tensor:
        return (torch.arange(self.capacity) < length).expand(1, 1, 1, -1)


@torch.no_grad()
@pytest.mark.parametrize("portions", [[9], [4, 3, 2], [1] * 9])
def test_incremental_equals_unrolled_hidden(drafter: AutoregressiveDrafter, portions: list[int]) -> None:
    """Along the true continuation, after every portion; the draft's cache rows are overwritten."""
    features, input_ids = make_batch(1)
    decoder = Incremental(drafter)
    for count in portions:
        start, end = decoder.length, decoder.length + count
        hidden, state = decoder.root(features[:, start:end], input_ids[:, start + 1 : end + 1])
        found = [hidden]
        anchor_and_drafts = input_ids[0, end : end + DEPTH].tolist()
        for depth in range(1, DEPTH):
            hidden, state = decoder.row(state, anchor_and_drafts[: depth + 1])
            found.append(hidden)
        expected = unrolled(drafter, features, input_ids, torch.tensor([[end]]))[0, 0]
        torch.testing.assert_close(torch.cat(found, dim=1)[0], expected, atol=TOLERANCE, rtol=TOLERANCE)
    assert decoder.length == 9


def slow_eagle(drafter: EagleDrafter, features: Tensor, tokens: list[int], num_drafts: int) -> Tensor:
    """The docstring's formulas, row by row and head by head: hidden [1 + num_drafts, H].

    features [P, F*H]; tokens: those after each context row (the last one the anchor), then the drafts
    """
    layer, config = drafter.layer, drafter.config
    group = config.num_heads // config.num_kv_heads
    g = list(drafter.context(features[None])[0])
    keys: list[Tensor] = []
    values: list[Tensor] = []
    found = []

    def turned(x: Tensor, position: int) -> Tensor:
        """[heads, D]: every pair (i, i + D/2) as a complex number, turned by its angle."""
        half = config.head_dim // 2
        angle = position * config.rope_theta ** -(torch.arange(half) / half)
        pairs = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones(half), angle)
        return torch.cat((pairs.real, pairs.imag), dim=-1)

    for position in range(len(features) + num_drafts):
        residual = g[position]
        embedding = drafter.embed_tokens[tokens[position]]
        row = torch.cat((drafter.embed_norm(embedding), layer.input_norm(residual)))
        keys.append(turned(layer.k_proj(row).view(config.num_kv_heads, -1), position))
        values.append(layer.v_proj(row).view(config.num_kv_heads, -1))
        if position < len(features) - 1:
            continue
        query = turned(layer.q_proj(row).view(config.num_heads, -1), position)
        heads = []
        for head in range(config.num_heads):
            scores = torch.stack([key[head // group] @ query[head] for key in keys]) / config.head_dim**0.5
            weights = scores.softmax(0)
            heads.append(sum(w * value[head // group] for w, value in zip(weights, values, strict=True)))
        state = residual + layer.o_proj(torch.cat(heads))
        normed = layer.post_norm(state)
        gate = layer.gate_proj(normed)
        state = state + layer.down_proj(gate * gate.sigmoid() * layer.up_proj(normed))
        g.append(state)
        found.append(drafter.norm(state))
    return torch.stack(found)


@torch.no_grad()
def test_eagle_is_what_its_formulas_say() -> None:
    drafter = make_drafter(**KINDS["eagle"])
    assert isinstance(drafter, EagleDrafter)
    features, input_ids = make_batch(1)
    found = unrolled(drafter, features, input_ids, torch.tensor([[7]]))[0, 0]
    expected = slow_eagle(drafter, features[0, :7], input_ids[0, 1:].tolist(), DEPTH - 1)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["hydra", "hydra++"])
def test_hydra_is_what_its_formulas_say(kind: str) -> None:
    drafter = make_drafter(**KINDS[kind])
    assert isinstance(drafter, HydraDrafter)
    features, input_ids = make_batch(1)
    last = features[:, :7, -HIDDEN:]
    for layer in drafter.layers:
        assert isinstance(layer, DraftLayer)
        # A decoder layer over all rows, of which only the last matters.
        rotary = drafter.rotary(torch.arange(7)[None])
        mask = torch.ones(7, 7).tril().bool()[None, None]
        last = layer(last, last[:, :0], rotary, rotary, mask, None, scaled_dot_product)
    h = drafter.norm(last)[0, -1]
    found = unrolled(drafter, features, input_ids, torch.tensor([[7]]))[0, 0]
    for depth, head in enumerate(drafter.heads):
        assert isinstance(head, HydraHead)
        x = torch.cat((h, *drafter.embed_tokens[input_ids[0, 7 : 8 + depth]]))
        for number, block in enumerate(head.blocks):
            assert isinstance(block, torch.nn.Linear)
            z = x @ block.weight.T + block.bias
            x = (x if number else x @ head.residual.weight.T) + z * z.sigmoid()
        assert number == drafter.config.head_depth - 1
        torch.testing.assert_close(found[depth], x, atol=TOLERANCE, rtol=TOLERANCE)


@torch.no_grad()
def test_every_anchor_equals_the_anchor_alone(drafter: AutoregressiveDrafter) -> None:
    features, input_ids = make_batch()
    positions = torch.tensor([[1, 5, 6, 9], [8, -1, 2, -1]])
    together = unrolled(drafter, features, input_ids, positions)
    assert together.isfinite().all()
    for row, column in (positions > 0).nonzero().tolist():
        position = int(positions[row, column])
        # What comes after the anchor's drafts is gone, with the other sequence and anchors.
        end = position + DEPTH + 1
        alone = unrolled(
            drafter,
            features[row : row + 1, :end],
            input_ids[row : row + 1, :end],
            torch.tensor([[position]]),
        )
        torch.testing.assert_close(together[row, column], alone[0, 0], atol=TOLERANCE, rtol=TOLERANCE)


@torch.no_grad()
def test_a_row_reads_the_context_and_the_tokens_up_to_its_own(drafter: AutoregressiveDrafter) -> None:
    """Guards the comparisons above, and that no row sees what it is to predict."""
    features, input_ids = make_batch(1)
    positions, position = torch.tensor([[6]]), 6
    base = unrolled(drafter, features, input_ids, positions)[0, 0]

    def changed_rows(features: Tensor, input_ids: Tensor) -> list[bool]:
        moved = unrolled(drafter, features, input_ids, positions)[0, 0]
        return ((moved - base).abs().amax(dim=-1) > 1e-4).tolist()

    for offset in range(-1, DEPTH + 1):
        other = input_ids.clone()
        other[0, position + offset] = (other[0, position + offset] + 1) % VOCAB_SIZE
        # EAGLE's context rows carry their tokens; the anchor is at offset 0.
        reads_context = isinstance(drafter, EagleDrafter) and offset < 0
        assert changed_rows(features, other) == [reads_context or 0 <= offset <= row for row in range(DEPTH)]
    for offset, reads in ((-2, bool(drafter.config.num_layers)), (-1, True), (0, False)):
        other = features.clone()
        other[0, position + offset] += 1
        assert changed_rows(other, input_ids) == [reads] * DEPTH


@torch.no_grad()
@pytest.mark.parametrize("count", [1, 2, DEPTH, DEPTH + 2])
def test_as_many_rows_as_targets_and_depth_allow(drafter: AutoregressiveDrafter, count: int) -> None:
    features, input_ids = make_batch()
    positions = torch.tensor([[3, 5, 7], [2, 8, 9]])
    found = unrolled(drafter, features, input_ids, positions, count)
    assert found.shape == (2, 3, min(count, DEPTH), HIDDEN)
    expected = unrolled(drafter, features, input_ids, positions)
    torch.testing.assert_close(found, expected[:, :, :count], atol=TOLERANCE, rtol=TOLERANCE)


def test_everything_is_trained_but_the_base(drafter: AutoregressiveDrafter) -> None:
    base = torch.randn(VOCAB_SIZE, HIDDEN, requires_grad=True)
    drafter.attach_base(base, base)
    features, input_ids = make_batch()
    hidden = unrolled(drafter, features, input_ids, torch.tensor([[3, 5], [-1, 4]]))
    drafter.logits(hidden).logsumexp(-1).sum().backward()
    assert base.grad is None
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


def test_autocast_runs(drafter: AutoregressiveDrafter) -> None:
    features, input_ids = make_batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = unrolled(drafter, features.bfloat16(), input_ids, torch.tensor([[3, 5], [-1, 4]]))
        drafter.logits(hidden).float().logsumexp(-1).sum().backward()
    full = unrolled(drafter, features, input_ids, torch.tensor([[3, 5], [-1, 4]]))
    assert (hidden - full).abs().mean() < 0.1 * full.abs().mean()


def test_hydra_begins_as_the_target_models_own_head() -> None:
    torch.manual_seed(0)
    drafter = build_drafter(dataclasses.replace(CONFIG, drafter_type="hydra", num_layers=0, head_depth=2))
    assert isinstance(drafter, HydraDrafter)
    drafter.attach_base(torch.randn(VOCAB_SIZE, HIDDEN), torch.randn(VOCAB_SIZE, HIDDEN))
    weight = torch.rand(HIDDEN)
    drafter.start_from(weight)
    features, input_ids = make_batch(1)
    found = unrolled(drafter, features, input_ids, torch.tensor([[5]]))[0, 0]
    last = features[0, 4, -HIDDEN:]
    expected = last * weight / (last.square().mean() + CONFIG.rms_norm_eps).sqrt()
    torch.testing.assert_close(found, expected.expand(DEPTH, -1), atol=TOLERANCE, rtol=TOLERANCE)


@torch.no_grad()
def test_best_children_are_the_softmax_best(drafter: AutoregressiveDrafter) -> None:
    hidden = torch.randn(2, 3, HIDDEN)
    tokens, logp = drafter.best_children(hidden, 5)
    expected = drafter.logits(hidden).log_softmax(-1)
    torch.testing.assert_close(logp, expected.sort(-1, descending=True).values[..., :5])
    torch.testing.assert_close(logp, expected.gather(-1, tokens))


def test_save_and_load(drafter: AutoregressiveDrafter, tmp_path: Path) -> None:
    drafter.save_pretrained(tmp_path)
    loaded = load_drafter(tmp_path).attach_base(drafter.embed_tokens, drafter.lm_head).eval()
    assert isinstance(loaded, type(drafter))
    assert loaded.config == drafter.config
    saved = load_file(tmp_path / WEIGHTS_NAME)
    assert set(saved) == {name for name, _ in drafter.named_parameters()}
    assert not any(VOCAB_SIZE in tensor.shape for tensor in saved.values())
    features, input_ids = make_batch()
    positions = torch.tensor([[3, 5], [-1, 4]])
    found, expected = (unrolled(head, features, input_ids, positions) for head in (loaded, drafter))
    torch.testing.assert_close(found, expected, atol=0, rtol=0)


def test_the_weights_of_another_kind_are_refused(tmp_path: Path) -> None:
    make_drafter(**KINDS["hydra"]).save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"num_layers": 0', '"num_layers": 1'))
    with pytest.raises(DrafterConfigError, match=rf"(?s){WEIGHTS_NAME} does not fit.*layers\.0"):
        load_drafter(tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"drafter_type": "eagle", "num_layers": 0},
            "num_layers must be at least 1 for eagle with trunk 'attention', got 0",
        ),
        ({"drafter_type": "eagle", "num_layers": 2}, "num_layers must be at most 1 for eagle with trunk"),
        ({"drafter_type": "hydra", "num_layers": 2}, "num_layers must be at most 1 for hydra with trunk"),
        ({"drafter_type": "hydra", "head_depth": 0}, "head_depth must be at least 1, got 0"),
        (
            {"drafter_type": "hydra", "trunk": "residual", "num_layers": 0},
            "trunk must be 'attention' for hydra, got 'residual'",
        ),
        (
            {"drafter_type": "eagle", "own_lm_head": True},
            "own_lm_head must be False for eagle with trunk 'attention', got True",
        ),
        ({"drafter_type": "eagle", "transition": "markov"}, "transition must be 'none' for eagle"),
    ],
)
def test_contradicting_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(DrafterConfigError, match=message):
        dataclasses.replace(CONFIG, **settings)


def test_the_registry_knows_the_kinds() -> None:
    assert type(make_drafter(**KINDS["eagle"])) is EagleDrafter
    assert type(make_drafter(**KINDS["hydra"])) is HydraDrafter

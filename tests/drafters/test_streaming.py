"""Speculative streams: the main stream stays exact, and streams together equal streams one at a time."""

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from drafters.build import build_drafter, load_drafter
from drafters.config import WEIGHTS_NAME, DrafterConfig, DrafterConfigError
from drafters.features import FeatureTap
from drafters.streaming import StreamFrames
from drafters.target_models import layer_types, sliding_window, weights_digest
from drafters.upper_layers import text_masks
from tests.export.conftest import CASES, SIZES
from training.data.batches import AnchorBatch, Batch, SampledBatch

VOCAB_SIZE, HIDDEN, LAYERS, UPPER, FRAMES, LENGTH = 60, 64, 3, 2, 3, 16
ANCHORS = [2, 9, 14]
TOLERANCE: dict[str, Any] = {"atol": 1e-5, "rtol": 1e-5}
# One of each form of model: plain, a window in every layer, projections in one matrix, windows and soft caps
# in some layers, a rotary base for each type of layer, layers without rotation, logits that are scaled.
FORMS = ("llama", "mistral", "phi3", "gemma2-tied", "gemma3", "smollm3", "granite")
KINDS: dict[str, dict[str, Any]] = {
    "lossless": {},
    "shared": {"stream_mode": "shared"},
    "rotation": {"stream_identity": "rotation"},
    "mlp start": {"stream_start": "mlp", "start_size": 8},
    "ctc": {"drafter_type": "ctc", "trunk": "streams", "transition": "mlp", "num_candidates": 8},
    "fused": {"drafter_type": "ctc", "trunk": "streams", "frame_start": "fused", "start_size": 8},
}


def make_model(name: str = "llama", **settings: Any) -> Any:
    case = CASES[name]
    torch.manual_seed(0)
    sizes = {**SIZES, "num_hidden_layers": LAYERS, "vocab_size": VOCAB_SIZE}
    own = {key: value for key, value in case.settings.items() if key != "num_hidden_layers"}
    if "layer_types" in own:
        own["layer_types"] = ["full_attention", *own["layer_types"]]
    if "no_rope_layers" in own:
        own["no_rope_layers"] = [1, *own["no_rope_layers"]]
    model: Any = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(case.model_type, **{**sizes, **own, **settings})
    )
    weight = model.get_decoder().norm.weight
    weight.data.copy_(torch.linspace(0.3, 2, weight.numel()))
    return model.eval().requires_grad_(False)


def make_config(model: Any, **settings: Any) -> DrafterConfig:
    own = {"drafter_type": "streaming", "num_layers": UPPER, "num_frames": FRAMES, "lora_rank": 4, **settings}
    return DrafterConfig(
        **own,
        vocab_size=VOCAB_SIZE,
        hidden_size=model.config.hidden_size,
        intermediate_size=model.config.intermediate_size,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rms_norm_eps=model.config.rms_norm_eps,
        target_layer_ids=(LAYERS - own["num_layers"] - 1,),
        base_num_layers=LAYERS,
    )


def make_head(model: Any, *, trained: bool = True, **settings: Any) -> StreamFrames:
    torch.manual_seed(1)
    head = build_drafter(make_config(model, **settings)).attach_model(model)
    assert isinstance(head, StreamFrames)
    if trained:
        change_parameters(head)
    return head.eval()


@torch.no_grad()
def change_parameters(head: StreamFrames) -> None:
    """Many parameters start at zero, where they would have no effect."""
    for parameter in head.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.1)


INPUT_IDS = torch.randint(2, VOCAB_SIZE, (2, LENGTH), generator=torch.Generator().manual_seed(2))


@torch.no_grad()
def features_of(model: Any, layer: int = LAYERS - UPPER - 1) -> Tensor:
    """What the streams start from, [2, LENGTH, H]."""
    tap = FeatureTap(model, (layer,))
    model(INPUT_IDS)
    tap.remove()
    return tap.take()


def anchors_at(positions: list[int], frames: int = FRAMES) -> AnchorBatch:
    ends = torch.full((2,), LENGTH)
    at = torch.tensor([positions, positions])
    batch = Batch((0, 1), INPUT_IDS, torch.ones_like(INPUT_IDS))
    return SampledBatch(batch, at, ends).anchors(frames, 1)


@torch.no_grad()
def run(head: StreamFrames, features: Tensor, positions: list[int]) -> tuple[Tensor, Tensor]:
    """The main stream [2, LENGTH, H] and the frames' hidden states [2, M, T, H]."""
    anchors = anchors_at(positions, head.config.num_frames)
    context = torch.arange(LENGTH).expand(2, -1)
    main, frames = head.main_and_frames(
        features, context, anchors.frame_position_ids, anchors.anchor_ids, anchors.attn_mask
    )
    return main, frames.unflatten(1, (len(positions), -1))


@torch.no_grad()
def adapted_copy(model: Any, head: StreamFrames) -> Any:
    """The target model with the adapters multiplied out, W + B A."""
    adapted = copy.deepcopy(model)
    state = head.state_dict()
    for number, layer in enumerate(adapted.get_decoder().layers[-UPPER:]):
        for name, module in layer.named_modules():
            key = f"lora.{number}.{name.split('.')[-1]}"
            if f"{key}.A.weight" in state:
                module.weight += state[f"{key}.B.weight"] @ state[f"{key}.A.weight"]
    return adapted


class ReferenceStreams:
    """One anchor, one stream after another, through a plain sequence with a cache: the definition."""

    def __init__(self, model: Any, head: StreamFrames, main: Tensor, anchor: Tensor):
        """main [1, P, H]: the hidden states at layer N - N_s of the tokens before the anchor []."""
        self.model, self.head, self.main, self.anchor = model, head, main, anchor
        self.adapted = adapted_copy(model, head)
        self.number = 0
        if head.config.stream_identity == "rotation":
            for layer in self.adapted.get_decoder().layers[-UPPER:]:
                attention = layer.self_attn
                projection = getattr(attention, "v_proj", None) or attention.qkv_proj
                projection.register_forward_hook(self.rotate)

    def rotate(self, module: Any, arguments: Any, output: Tensor) -> Tensor:
        """Values as complex numbers, times e^(i eps j)."""
        width = self.model.config.num_key_value_heads * self.model.get_decoder().layers[0].self_attn.head_dim
        values = output[..., -width:].unflatten(-1, (self.model.config.num_key_value_heads, 2, -1))
        turn = torch.tensor(math.pi / (2 * FRAMES) * self.number)
        turned = torch.complex(values[..., 0, :], values[..., 1, :]) * torch.polar(torch.tensor(1.0), turn)
        rotated = torch.stack((turned.real, turned.imag), dim=-2).flatten(-3)
        return torch.cat((output[..., :-width], rotated), dim=-1)

    def through(self, model: Any, hidden: Tensor, start: int, cache: DynamicCache) -> Tensor:
        """Rows [1, N, H] at positions from ``start`` on, after all that the cache holds."""
        config, decoder = model.config, model.get_decoder()
        count = hidden.shape[1]
        positions = torch.arange(start, start + count)[None]
        for number in range(LAYERS - UPPER, LAYERS):
            kind = layer_types(config)[number]
            visible = torch.arange(start + count)[None] <= positions[0][:, None]
            window = sliding_window(config)
            if kind == "sliding_attention" and window is not None:
                visible &= torch.arange(start + count)[None] > positions[0][:, None] - window
            mask = torch.zeros(1, 1, count, start + count).masked_fill(~visible, -1e30)
            by_type = (kind,) if config.model_type == "gemma3_text" else ()
            hidden = decoder.layers[number](
                hidden,
                attention_mask=mask,
                position_embeddings=decoder.rotary_emb(hidden, positions, *by_type),
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
            )
        return hidden

    def fused(self, frame: Tensor) -> Tensor:
        """s + W_2 silu(W_1 [s, norm(e)])"""
        if self.head.config.frame_start != "fused":
            return frame
        state = self.head.state_dict()
        embedded = self.model.get_input_embeddings().weight[self.anchor]
        normed = embedded / (embedded.square().mean() + self.model.config.rms_norm_eps).sqrt()
        weight = torch.cat((state["fusion.of_stream.weight"], state["fusion.of_anchor.weight"]), dim=1)
        inner = F.silu(weight @ torch.cat((frame, normed)))
        return frame + state["fusion.down.weight"] @ inner

    def frame_logits(self) -> Tensor:
        """Logits [T, V] of the streams, without a soft cap."""
        cache = DynamicCache()
        is_shared = self.head.config.stream_mode == "shared"
        length = self.main.shape[1]
        self.through(self.adapted if is_shared else self.model, self.main, 0, cache)
        state = self.head.state_dict()
        logits = []
        for j in range(1, FRAMES + 1):
            self.number = j
            hidden = self.main[:, -1:]
            if self.head.config.stream_start == "mlp":
                normed = F.rms_norm(hidden, (HIDDEN,), eps=self.model.config.rms_norm_eps)
                inner = F.silu(normed @ state["start.up.weight"].T)
                hidden = hidden + inner @ state["start.down.weight"].T
            if self.head.config.stream_identity == "embedding":
                hidden = hidden + state["stream_embeddings"][j - 1]
            # Stream j of the last position, length - 1, stands at length - 1 + j.
            hidden = self.through(self.adapted, hidden, length - 1 + j, cache)
            scale = getattr(self.model.config, "logits_scaling", 1.0)
            frame = self.fused(self.model.get_decoder().norm(hidden)[0, 0])
            logits.append(self.model.lm_head(frame) / scale)
        return torch.stack(logits)


@pytest.mark.parametrize(
    ("form", "kind"),
    [
        *((form, "lossless") for form in FORMS),
        *(("llama", kind) for kind in KINDS if kind != "lossless"),
        ("phi3", "rotation"),
        ("gemma3", "shared"),
    ],
)
@torch.no_grad()
def test_streams_together_equal_one_stream_at_a_time(form: str, kind: str) -> None:
    model = make_model(form, attn_implementation="eager")
    head = make_head(model, **KINDS[kind])
    features = features_of(model)
    _, frames = run(head, features, ANCHORS)
    found = head.label_logits(frames)
    for row in range(2):
        for column, anchor in enumerate(ANCHORS):
            before = features[row : row + 1, :anchor]
            expected = ReferenceStreams(model, head, before, INPUT_IDS[row, anchor]).frame_logits()
            torch.testing.assert_close(found[row, column], expected, **TOLERANCE)


@pytest.mark.parametrize("form", CASES)
def test_the_main_stream_is_the_target_models(form: str) -> None:
    """To the last bit the same, whatever the streams' parameters are, in every supported family."""
    model = make_model(form)
    head = make_head(model, trained=False)
    features = features_of(model)
    before, frames = run(head, features, ANCHORS)
    with torch.no_grad():
        torch.testing.assert_close(head.main_logits(before), model(INPUT_IDS).logits, **TOLERANCE)
    change_parameters(head)
    after, moved = run(head, features, ANCHORS)
    assert torch.equal(before, after)
    assert torch.equal(head.main_logits(before), head.main_logits(after))
    assert (frames - moved).abs().amax(-1).min() > 1e-3


@torch.no_grad()
def test_rows_that_pass_together_leave_the_main_stream_as_it_is() -> None:
    """As in the exported graph, where both are rows of one product; training parts them."""
    model = make_model("gemma3")
    head, main = make_head(model, trained=False), features_of(model)
    streams = head.start_streams(main[:, -1:]).flatten(1, 2)
    numbers = torch.arange(1, FRAMES + 1)
    positions = torch.arange(LENGTH + FRAMES).expand(2, -1)
    of_streams = torch.ones(2, 1, FRAMES, LENGTH + FRAMES, dtype=torch.bool)
    masks = text_masks(model.config, of_streams, positions, numbers)
    before, frames = head.run_streams(main, streams, positions, numbers, masks)
    change_parameters(head)
    after, moved = head.run_streams(main, streams, positions, numbers, masks)
    assert torch.equal(before, after)
    assert not torch.equal(frames, moved)


@pytest.mark.parametrize("form", ["mixtral", "qwen3-moe", "phi3"])
def test_no_weight_of_the_target_model_is_copied(form: str) -> None:
    model = make_model(form)
    head = make_head(model)
    known = {id(parameter) for module in (model, head) for parameter in module.parameters()}
    assert {id(parameter) for parameter in head.upper_layers.parameters()} <= known


@torch.no_grad()
def test_shared_adapters_fine_tune_the_model_and_merge_into_it() -> None:
    model = make_model()
    head = make_head(model, stream_mode="shared")
    own, features = model(INPUT_IDS).logits, features_of(model)
    main, frames = run(head, features, ANCHORS)
    merged = head.merge_shared(model)
    assert torch.equal(model(INPUT_IDS).logits, own)
    logits = merged(INPUT_IDS).logits
    assert (logits - own).abs().max() > 0.1
    torch.testing.assert_close(head.main_logits(main), logits, **TOLERANCE)
    # The head now runs through the merged model, without adapters.
    assert not any(head.upper_layers.adapters)
    main_after, frames_after = run(head, features, ANCHORS)
    torch.testing.assert_close(main_after, main, **TOLERANCE)
    torch.testing.assert_close(frames_after, frames, **TOLERANCE)


@torch.no_grad()
def test_early_exit_logits() -> None:
    """The LM head of the last norm of h + B A h."""
    model = make_model("gemma2-tied")
    head, features = make_head(model), features_of(model)
    adapter = head.exit_adapter
    hidden = features + features @ adapter.A.weight.T @ adapter.B.weight.T
    scores = model.lm_head(model.get_decoder().norm(hidden))
    cap = model.config.final_logit_softcapping
    torch.testing.assert_close(head.exit_logits(features), (scores / cap).tanh() * cap, **TOLERANCE)


@pytest.mark.parametrize("kind", KINDS)
def test_every_position_in_one_pass_equals_one_anchor_alone(kind: str) -> None:
    model = make_model()
    head, features = make_head(model, **KINDS[kind]), features_of(model)
    positions = list(range(1, LENGTH))
    _, together = run(head, features, positions)
    for column, position in enumerate(positions):
        _, alone = run(head, features, [position])
        torch.testing.assert_close(together[:, column], alone[:, 0], **TOLERANCE)


def test_a_stream_sees_the_streams_before_it_and_the_text_before_its_anchor() -> None:
    model = make_model()
    head, features = make_head(model), features_of(model)
    _, base = run(head, features, ANCHORS)
    assert head.stream_embeddings is not None
    with torch.no_grad():
        head.stream_embeddings[1] += 1
    _, found = run(head, features, ANCHORS)
    moved = (found - base).abs().amax(dim=(0, 1, 3))
    assert (moved > 1e-3).tolist() == [False, True, True]
    # A later token's hidden state is not seen.
    changed = features.clone()
    changed[:, ANCHORS[1]] += 1
    moved = (run(head, changed, ANCHORS)[1] - found).abs().amax(dim=(0, 2, 3))
    assert (moved > 1e-3).tolist() == [False, False, True]


def test_padding_anchors_are_harmless() -> None:
    model = make_model()
    head, features = make_head(model), features_of(model)
    _, found = run(head, features, [6, -1, 3])
    assert found.isfinite().all()
    torch.testing.assert_close(found[:, [0, 2]], run(head, features, [6, 3])[1], **TOLERANCE)


def test_an_mlp_start_begins_as_the_identity() -> None:
    model = make_model()
    features = features_of(model)
    identity, fresh = make_head(model, trained=False), make_head(model, trained=False, stream_start="mlp")
    assert identity.stream_embeddings is not None
    assert fresh.stream_embeddings is not None
    fresh.stream_embeddings.data.copy_(identity.stream_embeddings)
    assert torch.equal(identity.start_streams(features), fresh.start_streams(features))


@pytest.mark.parametrize("kind", KINDS)
def test_all_parameters_are_trained_and_the_base_is_not(kind: str) -> None:
    model = make_model()
    head, features = make_head(model, **KINDS[kind]), features_of(model)
    anchors, context = anchors_at(ANCHORS), torch.arange(LENGTH).expand(2, -1)
    hidden = head(features, context, anchors.anchor_ids, anchors.frame_position_ids, anchors.attn_mask)
    total = head.logits(hidden).square().sum() + head.exit_logits(features).square().sum()
    if head.transition is not None:
        labels = torch.zeros(2, 1, dtype=torch.long)
        state = head.transition.state(hidden, labels, head.embed_tokens)
        total = total + (state @ head.transition.right(head.lm_head)[3]).square().sum()
    total.backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    missing = {name for name, parameter in head.named_parameters() if parameter.grad is None}
    assert missing <= {"transition.blank"}
    assert not {name for name, p in head.named_parameters() if p.grad is not None and not p.grad.any()}


@pytest.mark.parametrize("kind", KINDS)
def test_save_and_load(kind: str, tmp_path: Path) -> None:
    model = make_model()
    head, features = make_head(model, **KINDS[kind]), features_of(model)
    head.save_pretrained(tmp_path)
    loaded = load_drafter(tmp_path).attach_model(model).eval()
    assert isinstance(loaded, StreamFrames)
    assert loaded.config == head.config
    for found, expected in zip(run(loaded, features, ANCHORS), run(head, features, ANCHORS), strict=True):
        assert torch.equal(found, expected)
    # Nothing of the target model is in the checkpoint, and so nothing is as wide as its vocabulary.
    saved = load_file(tmp_path / WEIGHTS_NAME)
    assert saved.keys() == dict(head.named_parameters()).keys()
    own = ("lora.", "stream_embeddings", "start.", "fusion.", "exit_adapter.", "blank.", "transition.")
    assert all(name.startswith(own) for name in saved)
    assert not any(VOCAB_SIZE in tensor.shape for tensor in saved.values())


def test_a_head_that_is_loaded_and_saved_again_keeps_its_adapters(tmp_path: Path) -> None:
    """Without its target model, as when only the calibration changes."""
    make_head(make_model()).save_pretrained(tmp_path / "a")
    load_drafter(tmp_path / "a").save_pretrained(tmp_path / "b")
    first, second = (load_file(tmp_path / name / WEIGHTS_NAME) for name in "ab")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: make_model(num_hidden_layers=4), "base_num_layers must be the target model's 4, got 3"),
        (lambda: make_model(hidden_size=32), r"embed_tokens .* must have shape \(60, 64\)"),
        (
            lambda: make_model(intermediate_size=96),
            r"lora\.0\.down_proj\.A\.weight must have shape \[4, 96\] for this target model, got \[4, 128\]; "
            "the head was made for another one",
        ),
        (
            lambda: make_model("phi3"),
            r"lora\.0\.gate_proj\.A\.weight must not be there for this target model, got \[4, 64\]",
        ),
    ],
)
def test_adapters_of_another_model_are_refused(make: Callable[[], Any], message: str, tmp_path: Path) -> None:
    make_head(make_model()).save_pretrained(tmp_path)
    with pytest.raises(DrafterConfigError, match=f"^{message}"):
        load_drafter(tmp_path).attach_model(make())


def test_adapters_of_other_weights_are_refused(tmp_path: Path) -> None:
    """A model of the same shape, which a name or a size does not give away."""
    model, other = make_model(), make_model()
    head = make_head(model, base_weights=weights_digest(model), stream_mode="shared")
    head.save_pretrained(tmp_path)
    load_drafter(tmp_path).attach_model(model)
    other.get_decoder().norm.weight.data[3] += 0.5
    with pytest.raises(
        DrafterConfigError, match=r"^base_weights must be .* a model of other weights(, .*)?$"
    ):
        load_drafter(tmp_path).attach_model(other)


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("lora.", "its adapters, .* are missing$"),
        ("lora.0.q_proj.B", r"lora\.0\.q_proj\.B\.weight is missing$"),
    ],
)
def test_a_checkpoint_without_adapters_is_refused(missing: str, message: str, tmp_path: Path) -> None:
    make_head(make_model()).save_pretrained(tmp_path)
    weights = load_file(tmp_path / WEIGHTS_NAME)
    save_file({k: v for k, v in weights.items() if not k.startswith(missing)}, tmp_path / WEIGHTS_NAME)
    with pytest.raises(DrafterConfigError, match=message):
        load_drafter(tmp_path)


def test_weights_that_do_not_fit_the_config_are_refused(tmp_path: Path) -> None:
    model = make_model()
    make_head(model).save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"lora_rank": 4', '"lora_rank": 8'))
    with pytest.raises(DrafterConfigError, match=r"^lora\.0\.down_proj\.A\.weight must .*\[8, 128\]"):
        load_drafter(tmp_path).attach_model(model)


def test_the_target_model_is_shared_and_left_as_it_was() -> None:
    model = make_model()
    with torch.no_grad():
        own = model(INPUT_IDS).logits
    tap = FeatureTap(model, (LAYERS - 1,))  # hooks of the model's layers are not the head's
    head = make_head(model, stream_identity="rotation")
    features = features_of(model)
    last = tap.take()
    run(head, features, ANCHORS)
    assert torch.equal(tap.take(), last)
    with torch.no_grad():
        assert torch.equal(model(INPUT_IDS).logits, own)
    # The layers have the model's own weights, and attend as it does.
    frozen = {id(parameter) for parameter in model.parameters()}
    adapters = {id(parameter) for parameter in head.parameters()}
    assert {id(parameter) for parameter in head.upper_layers.parameters()} <= frozen | adapters
    assert not frozen & adapters
    expected = run(head, features, ANCHORS)
    model.set_attn_implementation("eager")
    layers: Any = head.upper_layers.layers
    assert all(layer.self_attn.config is model.config for layer in layers)
    for found, value in zip(run(head, features, ANCHORS), expected, strict=True):
        torch.testing.assert_close(found, value, **TOLERANCE)

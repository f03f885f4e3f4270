"""Several heads behind one forward pass: each one's loss, dense and slow; their optimizers; warm starts."""

import dataclasses
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from drafters.base import Drafter
from drafters.config import WEIGHTS_NAME
from drafters.parallel import ParallelDrafter
from drafters.target_models import last_layer_logits
from training.config import TrainingConfig
from training.data.batches import Batch, BatchSampler, LiveFeatures, SampledBatch
from training.data.sequences import Sequences
from training.fresh_heads import make_head, warm_start
from training.head_config import HeadConfig
from training.head_set import HeadSet
from training.loop.optimizers import make_optimizers, set_learning_rate
from training.losses import DECAY
from training.settings import TrainingError

# float32 sums in another order.
TOLERANCE = 1e-4
HEADS: dict[str, HeadConfig] = {
    "block": HeadConfig(name="block", drafter_type="block", num_frames=3, num_labels=4),
    "block-mlp": HeadConfig(
        name="block-mlp", drafter_type="block", transition="mlp", num_frames=3, num_labels=3
    ),
    "medusa": HeadConfig(name="medusa", drafter_type="medusa", own_lm_head=True, num_frames=4, num_labels=4),
    "ctc": HeadConfig(name="ctc", num_frames=4, num_labels=3),
}


@pytest.fixture(scope="module")
def model(tiny_model_dir: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()
    weight = model.get_decoder().norm.weight  # all ones in a fresh model
    weight.data.copy_(torch.linspace(0.3, 2, weight.numel()))
    return model


@pytest.fixture(scope="module")
def sampled() -> SampledBatch:
    """Sequences so short that some anchors are padding and some targets are missing."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(2, 250, (length,), generator=generator).tolist() for length in (9, 12, 5)]
    sequences = Sequences([(row[:2], row[2:]) for row in rows])
    options: dict[str, int] = {"batch_size": 3, "num_anchors": 5, "max_length": 20, "seed": 0}
    return BatchSampler(sequences, torch.arange(3).numpy(), **options).batch(0)


def make_set(make_tiny_head: Callable[..., Drafter], model: Any, settings: list[HeadConfig]) -> HeadSet:
    heads = []
    for one in settings:
        options = {"drafter_type": one.drafter_type, "num_frames": one.num_frames}
        options |= {"transition": one.transition, "own_lm_head": one.own_lm_head}
        heads.append(make_tiny_head(**options))
    return HeadSet(heads, tuple(settings), functools.partial(last_layer_logits, model))


def test_a_batch_without_a_draft_has_no_loss(
    make_tiny_head: Callable[..., Drafter], model: Any, sampled: SampledBatch
) -> None:
    """No target of the batch is in the draft vocabulary."""
    for drafter_type in ("ctc", "hydra"):
        head = make_tiny_head(drafter_type, draft_vocab_size=4)
        head.set_draft_vocabulary(torch.tensor([0, 1, 251, 252]))
        settings = (HeadConfig(drafter_type=drafter_type),)
        heads = HeadSet([head], settings, functools.partial(last_layer_logits, model))
        loss = heads(LiveFeatures(model, heads.layer_ids)(sampled.batch), sampled)
        assert loss.tolist() == [0.0]
        loss.sum().backward()


def log_probs_alone(head: ParallelDrafter, features: Tensor, anchor: int, previous: list[int]) -> Tensor:
    """Log-probabilities [T, V (+ 1)] after an anchor, the features [1, A, F*H] being what is before it.

    With a transition, frame t is conditioned on the label ``previous[t]``.
    """
    length, num_frames = features.shape[1], head.config.num_frames
    mask = torch.ones(1, 1, num_frames, length + num_frames, dtype=torch.bool)
    frames = torch.arange(length, length + num_frames)[None]
    hidden = head(features, torch.arange(length)[None], torch.tensor([[anchor]]), frames, mask)[0]
    logits = head.logits(hidden)
    if head.transition is not None:
        best = logits.topk(head.config.num_candidates, dim=-1).indices
        right = head.transition.right(head.lm_head)
        for frame, label in enumerate(previous[:num_frames]):
            previous_ids = torch.tensor([[label]])
            state = head.transition.state(hidden[None], previous_ids, head.embed_tokens)[0, frame, 0]
            logits[frame, best[frame]] += right[best[frame]] @ state
    return logits.log_softmax(-1)


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("name", ["block", "block-mlp", "medusa"])
@torch.no_grad()
def test_the_loss_is_the_mean_of_each_anchor_alone(
    make_tiny_head: Callable[..., Drafter], model: Any, sampled: SampledBatch, name: str, share: float
) -> None:
    """Cross-entropy with the tokens that follow and the target model's own distribution of each of them."""
    settings = dataclasses.replace(HEADS[name], soft_labels=share)
    heads = make_set(make_tiny_head, model, [settings])
    (head,) = heads.drafters
    features = LiveFeatures(model, (0, 1))(sampled.batch)
    losses = []
    for row, positions in enumerate(sampled.positions.tolist()):
        tokens = sampled.batch.input_ids[row, : int(sampled.ends[row])].tolist()
        teacher = model(torch.tensor([tokens])).logits[0].softmax(-1)
        for column, at in enumerate(positions):
            following = tokens[at + 1 : at + 1 + settings.num_labels] if at >= 0 else []
            if not following:
                continue
            before = torch.tensor([tokens[:at]])
            context = LiveFeatures(model, (0, 1))(Batch((0,), before, torch.ones_like(before)))
            assert isinstance(head, ParallelDrafter)
            log_probs = log_probs_alone(head, context, tokens[at], tokens[at:])
            loss = 0.0
            for step, label in enumerate(following[: settings.num_frames]):
                hard = log_probs[step, label]
                soft = log_probs[step, :258] @ teacher[at + step]
                loss -= DECAY**step * ((1 - share) * hard + share * soft).item()
            losses.append(loss)
            # All other anchors are padding, which does not count.
            only = torch.full_like(sampled.positions, -1)
            only[row, column] = at
            found = heads(features, dataclasses.replace(sampled, positions=only))
            torch.testing.assert_close(found, torch.tensor([loss]), rtol=TOLERANCE, atol=0)
    assert 5 < len(losses) < sampled.positions.numel()
    expected = torch.tensor([sum(losses) / len(losses)])
    torch.testing.assert_close(heads(features, sampled), expected, rtol=TOLERANCE, atol=0)


def test_soft_labels_ask_for_every_distribution_once(
    make_tiny_head: Callable[..., Drafter], model: Any, sampled: SampledBatch
) -> None:
    """Anchors share targets; under autocast, the distributions are kept in bfloat16."""
    settings = [dataclasses.replace(HEADS["block"], soft_labels=0.5)]
    heads = make_set(make_tiny_head, model, settings)
    features = LiveFeatures(model, (0, 1))(sampled.batch)
    exact = heads(features, sampled)
    asked: list[int] = []

    def counting(hidden: Tensor) -> Tensor:
        asked.append(len(hidden))
        logits: Tensor = last_layer_logits(model, hidden)
        return logits

    counted = HeadSet(heads.drafters, tuple(settings), counting)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = counted(features, sampled)
    torch.testing.assert_close(rounded, exact, rtol=2e-2, atol=0)
    (num_distributions,) = asked
    needed = {
        (row, at + step)
        for row, positions in enumerate(sampled.positions.tolist())
        for at in positions
        for step in range(4)
        if at >= 0 and at + step < sampled.ends[row] - 1
    }
    # Of every sequence, at most the first token and those at the end are computed besides.
    assert len(needed) <= num_distributions <= len(needed) + 3 * 5 < sampled.positions.numel() * 4


def test_heads_do_not_see_each_other(
    make_tiny_head: Callable[..., Drafter], model: Any, sampled: SampledBatch
) -> None:
    """The sum of the losses has, for every head, the gradient of its own loss alone."""
    settings = [dataclasses.replace(one, soft_labels=0.5) for one in HEADS.values()]
    features = LiveFeatures(model, (0, 1))(sampled.batch)
    together = make_set(make_tiny_head, model, settings)
    losses = together(features, sampled)
    losses.sum().backward()
    for index, one in enumerate(settings):
        alone = make_set(make_tiny_head, model, [one])
        loss = alone(features, sampled)
        loss.sum().backward()
        assert torch.equal(loss[0], losses[index])
        for expected, found in zip(alone.parameters(), together.drafters[index].parameters(), strict=True):
            assert expected.grad is not None
            assert expected.grad.any()
            assert found.grad is not None
            assert torch.equal(found.grad, expected.grad)


def make_config(heads: tuple[HeadConfig, ...], **settings: Any) -> TrainingConfig:
    return TrainingConfig(model=Path("m"), out=Path("o"), data=(Path("d"),), heads=heads, **settings)


@pytest.mark.parametrize(
    ("model_type", "settings", "weight", "theta"),
    [
        ("llama", {}, 0.5, 10000.0),
        # Adds one to the weights of its norms, and rotates layers with a window on a base of their own.
        ("gemma3_text", {"head_dim": 8}, 1.5, 1000000.0),
        # Divides its logits.
        ("granite", {"logits_scaling": 4.0}, 0.125, 10000.0),
    ],
)
def test_a_fresh_head_starts_as_its_model_ends(
    model_type: str, settings: dict[str, Any], weight: float, theta: float
) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "vocab_size": 40, "pad_token_id": 0}
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes, **settings))
    model.requires_grad_(False).get_decoder().norm.weight.fill_(0.5)
    head = make_head(model, HeadConfig(), make_config((HeadConfig(),)))
    assert isinstance(head.norm, nn.Module)
    torch.testing.assert_close(head.norm.weight, torch.full((16,), weight))
    assert head.config.rope_theta == theta


@pytest.mark.parametrize(("optimizer", "fast"), [("muon", True), ("muon", False), ("adamw", False)])
def test_every_parameter_has_one_optimizer_and_its_heads_rate(
    make_tiny_head: Callable[..., Drafter],
    model: Any,
    optimizer: str,
    fast: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("training.loop.optimizers.multiplies_bf16", lambda: fast)
    settings = [
        dataclasses.replace(one, learning_rate=0.1 * number) for number, one in enumerate(HEADS.values(), 1)
    ]
    heads = make_set(make_tiny_head, model, settings)
    optimizers = make_optimizers(heads, make_config(tuple(settings), optimizer=optimizer))
    kinds = [type(one).__name__ for one in optimizers]
    muon = ["Muon" if fast else "Float32Muon"]
    assert kinds == ["AdamW", *(muon if optimizer == "muon" else [])]
    peaks: dict[int, float] = {}
    for one in optimizers:
        for group in one.param_groups:
            assert group["weight_decay"] == 0.01
            for parameter in group["params"]:
                assert id(parameter) not in peaks
                peaks[id(parameter)] = group["peak"]
                # Muon is for matrices: no norm's weight, and no blank's single row.
                is_matrix = parameter.ndim == 2 and min(parameter.shape) > 1
                assert isinstance(one, torch.optim.Muon) == (optimizer == "muon" and is_matrix)
    assert len(peaks) == len(list(heads.parameters()))
    for head, own in zip(heads.drafters, settings, strict=True):
        assert {peaks[id(parameter)] for parameter in head.parameters()} == {own.learning_rate}


def test_learning_rates_warm_up_then_fall_to_zero() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(3)]
    first = torch.optim.AdamW(
        [{"params": parameters[:1], "peak": 0.5}, {"params": parameters[1:2], "peak": 0.25}]
    )
    second = torch.optim.SGD([{"params": parameters[2:], "peak": 1.0}])
    config = make_config((HeadConfig(),), steps=100, warmup=10)
    rates = []
    for step in range(101):
        set_learning_rate([first, second], step, config)
        assert [group["lr"] for group in first.param_groups] == pytest.approx(
            [share * second.param_groups[0]["lr"] for share in (0.5, 0.25)]
        )
        rates.append(second.param_groups[0]["lr"])
    assert rates[:2] == pytest.approx([0.1, 0.2])
    assert rates[9] == rates[10] == max(rates) == 1.0
    assert rates[55] == pytest.approx(0.5)
    assert rates[100] == pytest.approx(0.0)
    assert sorted(rates[10:], reverse=True) == rates[10:]
    set_learning_rate([second], 0, make_config((HeadConfig(),), steps=1, warmup=0))
    assert second.param_groups[0]["lr"] == 1.0


@pytest.mark.parametrize("frames", [3, 4, 7])
def test_warm_start_from_a_head_with_another_number_of_frames(
    make_tiny_head: Callable[..., Drafter], tmp_path: Path, frames: int
) -> None:
    make_tiny_head().save_pretrained(tmp_path)  # four frames
    saved = load_file(tmp_path / WEIGHTS_NAME)
    head = make_tiny_head(num_frames=frames, rms_norm_eps=1e-5)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.zero_()
    assert warm_start(head, tmp_path) == sorted(saved)
    for name, value in head.state_dict().items():
        expected = saved[name]
        if name == "frame_queries":  # frames that the other head lacks start as its last
            expected = torch.cat((expected, expected[-1:].expand(3, -1)))[:frames]
        assert torch.equal(value, expected), name


def test_a_deeper_head_starts_with_the_drafts_of_the_other(
    make_tiny_head: Callable[..., Drafter], tmp_path: Path
) -> None:
    shallow = make_tiny_head()
    shallow.save_pretrained(tmp_path)
    deep = make_tiny_head(num_layers=3)
    features = torch.randn(1, 5, 2 * 64)
    inputs = features, torch.arange(5)[None], torch.tensor([[7]]), torch.arange(5, 9)[None]
    mask = torch.ones(1, 1, 4, 9, dtype=torch.bool)
    assert not torch.allclose(deep(*inputs, mask), shallow(*inputs, mask))
    warm_start(deep, tmp_path)
    assert torch.equal(deep(*inputs, mask), shallow(*inputs, mask))
    deep(*inputs, mask).square().sum().backward()
    outputs = [weight.grad for name, weight in deep.named_parameters() if name.endswith("o_proj.weight")]
    assert len(outputs) == 3
    assert all(gradient is not None and gradient.any() for gradient in outputs)


def test_warm_start_takes_what_fits_and_leaves_the_rest(
    make_tiny_head: Callable[..., Drafter], tmp_path: Path
) -> None:
    """From a head of another type, saved in half precision."""
    make_tiny_head("ctc", transition="markov").save_pretrained(tmp_path, dtype=torch.float16)
    saved = load_file(tmp_path / WEIGHTS_NAME)
    head = make_tiny_head("block", transition="mlp", transition_size=64)
    before = {name: value.clone() + 1 for name, value in head.state_dict().items()}
    head.load_state_dict(before)
    taken = warm_start(head, tmp_path)
    assert {"frame_queries", "context.feature_proj.weight", "layers.0.q_proj.weight"} <= set(taken)
    # No blank, another rank.
    assert not any(name.startswith(("blank", "transition")) for name in taken)
    for name, value in head.state_dict().items():
        assert value.dtype == torch.float32
        assert torch.equal(value, saved[name].float() if name in taken else before[name]), name


def test_warm_start_refuses_what_does_not_fit(make_tiny_head: Callable[..., Drafter], tmp_path: Path) -> None:
    head = make_tiny_head()
    with pytest.raises(TrainingError, match=r"--init-from: .*model\.safetensors cannot be read"):
        warm_start(head, tmp_path)
    save_file({"norm.weight": torch.zeros(32), "other": torch.zeros(64)}, tmp_path / WEIGHTS_NAME)
    with pytest.raises(TrainingError, match=rf"--init-from: no weight of {re.escape(str(tmp_path))} fits"):
        warm_start(head, tmp_path)
    (tmp_path / WEIGHTS_NAME).write_bytes(b"\x00" * 20)
    with pytest.raises(TrainingError, match=r"--init-from: .*model\.safetensors cannot be read"):
        warm_start(head, tmp_path)

"""What streams are trained on, against plain loops over anchors and the target model's own logits."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from drafters.streaming import StreamFrames
from drafters.target_models import last_layer_logits
from training.config import TrainingConfig
from training.data.batches import BatchSampler, LiveFeatures, SampledBatch, select_layers
from training.data.sequences import Sequences
from training.fresh_heads import make_head
from training.head_config import HeadConfig
from training.head_set import HeadSet

# float32 sums in another order; the target model's distribution is kept in bfloat16.
TOLERANCE, TEACHER_TOLERANCE = 1e-4, 1e-2
FRAMES = 3
STREAMS = HeadConfig(drafter_type="streaming", num_layers=1, num_frames=FRAMES, lora_rank=4)
CTC = HeadConfig(trunk="streams", num_layers=1, num_frames=FRAMES, num_labels=2, lora_rank=4)


@pytest.fixture(scope="module")
def model(tiny_model_dir: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()
    return model.requires_grad_(False)


@pytest.fixture(scope="module")
def sampled() -> SampledBatch:
    """Sequences so short that some anchors are padding and some targets are missing."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(2, 250, (length,), generator=generator).tolist() for length in (9, 12, 5)]
    sequences = Sequences([(row[:2], row[2:]) for row in rows])
    options: dict[str, int] = {"batch_size": 3, "num_anchors": 5, "max_length": 20, "seed": 0}
    return BatchSampler(sequences, torch.arange(3).numpy(), **options).batch(0)


def make_set(model: Any, *settings: HeadConfig) -> HeadSet:
    config = TrainingConfig(model=Path("m"), out=Path("o"), data=(Path("d"),), heads=settings)
    heads = [make_head(model, one, config) for one in settings]
    with torch.no_grad():
        for head in heads:
            for parameter in head.parameters():
                # Many parameters start at zero, where they would have no effect.
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return HeadSet(heads, settings, functools.partial(last_layer_logits, model))


def real_anchors(sampled: SampledBatch) -> list[tuple[int, int, list[int]]]:
    """Row, position and the tokens from the anchor on."""
    return [
        (row, at, sampled.batch.input_ids[row, at : int(sampled.ends[row])].tolist())
        for row, positions in enumerate(sampled.positions.tolist())
        for at in positions
        if at >= 0
    ]


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("mode", ["lossless", "shared"])
@torch.no_grad()
def test_the_loss_by_its_definition(model: Any, sampled: SampledBatch, mode: str, share: float) -> None:
    """a_0 = 1 for the main stream, in shared mode, a_j = 0.1 for every stream, and 0.1 for the early exit."""
    heads = make_set(model, dataclasses.replace(STREAMS, stream_mode=mode, soft_labels=share))
    (head,) = heads.drafters
    assert isinstance(head, StreamFrames)
    features = LiveFeatures(model, heads.layer_ids)(sampled.batch)
    main_logits = model(sampled.batch.input_ids).logits
    found = heads(features, sampled)
    before = features[..., : head.config.hidden_size]
    tuned = head.merge_shared(model)(sampled.batch.input_ids).logits if mode == "shared" else None
    losses, beside = [], []

    def main_and_exit(row: int, at: int, token: int) -> float:
        label = torch.tensor(token)
        loss = 0.1 * F.cross_entropy(head.exit_logits(before[row, at - 1]), label).item()
        return loss + (F.cross_entropy(tuned[row, at - 1], label).item() if tuned is not None else 0.0)

    for row, end in enumerate(sampled.ends.tolist()):
        # The last token is no anchor, and the main stream has to learn it too: it ends the text.
        beside.append(main_and_exit(row, end - 1, int(sampled.batch.input_ids[row, end - 1])))
    for row, at, tokens in real_anchors(sampled):
        context = before[row : row + 1, :at]
        positions = torch.arange(at)[None]
        frames = torch.arange(at, at + FRAMES)[None]
        mask = torch.ones(1, 1, FRAMES, at + FRAMES, dtype=torch.bool)
        log_probs = head.logits(head(context, positions, None, frames, mask))[0].log_softmax(-1)
        beside.append(main_and_exit(row, at, tokens[0]))
        loss = 0.0
        for j, label in enumerate(tokens[1 : 1 + FRAMES]):
            # The base model's distribution of this token.
            soft = log_probs[j] @ main_logits[row, at + j].softmax(-1)
            loss -= 0.1 * ((1 - share) * log_probs[j, label] + share * soft).item()
        losses.append(loss)
    assert 5 < len(losses) < sampled.positions.numel()
    expected = torch.tensor([sum(losses) / len(losses) + sum(beside) / len(beside)])
    torch.testing.assert_close(found, expected, rtol=TEACHER_TOLERANCE if share else TOLERANCE, atol=0)


@pytest.mark.parametrize("settings", [STREAMS, CTC, dataclasses.replace(STREAMS, stream_mode="shared")])
def test_every_parameter_learns_and_the_early_exit_alone(
    model: Any, sampled: SampledBatch, settings: HeadConfig
) -> None:
    heads = make_set(model, settings)
    (head,) = heads.drafters
    assert isinstance(head, StreamFrames)
    features = LiveFeatures(model, heads.layer_ids)(sampled.batch)
    heads(features, sampled).sum().backward()
    gradients = {name: parameter.grad for name, parameter in head.named_parameters()}
    assert all(gradient is not None and gradient.any() for gradient in gradients.values())
    assert all(parameter.grad is None for parameter in model.parameters())
    # Other adapters do not change what the early exit learns.
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if not name.startswith("exit_adapter"):
                parameter.mul_(2)
    heads.zero_grad()
    heads(features, sampled).sum().backward()
    for name, parameter in head.named_parameters():
        if name.startswith("exit_adapter"):
            torch.testing.assert_close(parameter.grad, gradients[name])


def test_heads_read_their_own_layers_of_what_a_run_taps(model: Any, sampled: SampledBatch) -> None:
    """Streams read the layer that they start from; soft labels need the last layer."""
    medusa = HeadConfig(drafter_type="medusa", num_frames=FRAMES)
    soft = dataclasses.replace(STREAMS, soft_labels=1.0)
    assert make_set(model, STREAMS).layer_ids == (0,)
    assert make_set(model, soft).layer_ids == (0, 1)
    both = make_set(model, STREAMS, medusa)
    assert both.layer_ids == (0, 1)
    source = LiveFeatures(model, both.layer_ids)
    tapped = source(sampled.batch)
    losses = both(tapped, sampled)
    for index, head in enumerate(both.drafters):
        features = select_layers(tapped, both.layer_ids, head.config.target_layer_ids)
        assert features.shape[-1] == head.config.feature_size
        alone = HeadSet([head], both.settings[index : index + 1], both._teacher)
        assert torch.equal(alone(features, sampled)[0], losses[index])

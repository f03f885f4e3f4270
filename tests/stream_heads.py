"""Heads of speculative streams for the tiny model that know by heart what it writes after some prompts.

Drafts of random heads are hardly ever accepted. These are fitted for a second, so that steps accept several.
"""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.build import build_drafter
from drafters.config import DrafterConfig
from drafters.features import FeatureTap
from drafters.streaming import StreamFrames
from training.data.batches import Batch, SampledBatch

PROMPT_TOKENS, NEW_TOKENS, NUM_FRAMES = 12, 40, 4
# Both modes, both types, with and without blanks and a transition.
HEADS: dict[str, dict[str, Any]] = {
    "streaming": {"drafter_type": "streaming", "stream_start": "mlp", "start_size": 96},
    "ctc": {
        "drafter_type": "ctc",
        "trunk": "streams",
        "frame_start": "fused",
        "transition": "mlp",
        "transition_size": 8,
        "num_candidates": 12,
        "stream_mode": "shared",
        "stream_start": "mlp",
        "start_size": 96,
    },
}


def prompts() -> list[list[int]]:
    """Four prompts of random tokens."""
    random = torch.Generator().manual_seed(3)
    tokens: list[list[int]] = torch.randint(2, 258, (4, PROMPT_TOKENS), generator=random).tolist()
    return tokens


def load_model(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return model.eval().requires_grad_(False)


def make_stream_head(model: Any, **settings: Any) -> StreamFrames:
    """A head whose parameters all have an effect."""
    torch.manual_seed(1)
    config = DrafterConfig(
        vocab_size=model.config.vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        num_frames=NUM_FRAMES,
        num_layers=1,
        base_num_layers=2,
        target_layer_ids=(0,),
        lora_rank=16,
        **settings,
    )
    head = build_drafter(config).attach_model(model)
    assert isinstance(head, StreamFrames)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return head


@torch.no_grad()
def written(model: Any) -> Tensor:
    """The prompts and what the model writes after them, [4, L]."""
    tokens = torch.tensor(prompts())
    for _ in range(NEW_TOKENS):
        tokens = torch.cat((tokens, model(tokens).logits[:, -1:].argmax(-1)), dim=1)
    return tokens


def fit(head: StreamFrames, steps: int = 70) -> StreamFrames:
    """Teach the streams what the model writes. Where the model is fine-tuned too, it stays as it is."""
    shared = head.config.stream_mode == "shared"
    writer = head.model
    if shared:
        # Merging attaches the head to the copy, so a second head does it.
        other = make_stream_head(head.model, **settings_of(head.config))
        other.load_state_dict(head.state_dict())
        writer = other.merge_shared(head.model)
    tokens = written(writer)
    tap = FeatureTap(head.model, (0,))
    with torch.no_grad():
        head.model(tokens)
    tap.remove()
    features = tap.take()
    rows, length = tokens.shape
    positions = torch.arange(PROMPT_TOKENS, length - NUM_FRAMES)
    ends = torch.full((rows,), length)
    batch = Batch(tuple(range(rows)), tokens, torch.ones_like(tokens))
    anchors = SampledBatch(batch, positions.expand(rows, -1), ends).anchors(NUM_FRAMES, NUM_FRAMES)
    labels = tokens[:, positions.unsqueeze(1) + torch.arange(1, NUM_FRAMES + 1)]
    trained = [p for name, p in head.named_parameters() if not (shared and name.startswith("lora"))]
    optimizer = torch.optim.Adam(trained, lr=0.01)
    for _ in range(steps):
        context = torch.arange(length).expand(rows, -1)
        frames = head(features, context, anchors.anchor_ids, anchors.frame_position_ids, anchors.attn_mask)
        loss = F.cross_entropy(head.logits(frames).flatten(0, 1), labels.flatten())
        # The early exit learns what comes next too.
        own = head.exit_logits(features[:, PROMPT_TOKENS - 1 : -1])
        loss = loss + F.cross_entropy(own.flatten(0, 1), tokens[:, PROMPT_TOKENS:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return head.eval()


def settings_of(config: DrafterConfig) -> dict[str, Any]:
    """The settings of one of ``HEADS`` that a configuration was made with."""
    names = {name for settings in HEADS.values() for name in settings}
    return {name: value for name, value in config.to_dict().items() if name in names}

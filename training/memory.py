"""How much memory a run needs, as far as that follows from its settings."""

import math
from typing import Any

from drafters.config import DrafterConfig
from drafters.parameter_count import count_trained_parameters
from training.config import TrainingConfig
from training.examples import Example

# Bytes of a trained parameter: itself, its gradient and at most two moments, in float32.
TRAINED_BYTES = 16
# Bytes of a probability of the target model: of the logits and their softmax in float32.
TAUGHT_BYTES = 8


def target_model_bytes(model: Any) -> int:
    """Bytes of a target model's weights, wherever they are."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def trained_bytes(shapes: list[DrafterConfig]) -> int:
    """Bytes of the heads' weights, gradients and moments."""
    return TRAINED_BYTES * sum(map(count_trained_parameters, shapes))


def soft_label_bytes(config: TrainingConfig, examples: list[Example], vocab_size: int) -> int:
    """Bytes that soft labels take in the largest micro step; 0 for hard labels alone.

    They are the target model's distributions over the vocabulary, which with a large vocabulary is what a
    micro step needs most memory for.
    """
    taught = [head for head in config.heads if head.soft_labels > 0]
    if not taught:
        return 0

    def length(example: Example) -> int:
        distilled = config.labels == "distill"
        following = config.max_new_tokens if distilled else len(example.answer_ids or [])
        return len(example.prompt_ids) + following

    tokens = config.batch_size * min(config.max_length, max(map(length, examples)))
    targets = config.batch_size * config.num_anchors * max(head.num_labels for head in taught)
    return vocab_size * TAUGHT_BYTES * min(tokens, targets)


def in_words(num_bytes: int) -> str:
    """Example: 1610612736 -> "1.5 GiB"; below 1 GiB in whole MiB."""
    gib = num_bytes / 2**30
    return f"{gib:,.1f} GiB" if gib >= 1 else f"{math.ceil(num_bytes / 2**20)} MiB"

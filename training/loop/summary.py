"""The messages of a run before its first step: machine, data, heads, and the memory that they need."""

from typing import Any

from accelerate import Accelerator
from torch import Tensor

from drafters.base import Drafter
from drafters.build import count_trained_parameters
from drafters.config import DrafterConfig
from training.config import TrainingConfig
from training.data.batches import num_held_out
from training.data.conversations import Turn
from training.data.sequences import Example, Sequences
from training.loop.evaluation import NUM_EVALUATED, HeldOut, held_out_sequences
from training.loop.progress import in_words
from training.loop.start import RunInputs
from training.settings import MODEL_DTYPES

# An evaluation on fewer held-out sequences is rough, and the run says so.
FEW_SEQUENCES = 20
# Bytes for each trained parameter: the parameter, its gradient and at most two moments in float32.
TRAINED_BYTES = 16
# Bytes for each probability of the target model: its logit and its softmax in float32.
TAUGHT_BYTES = 8


def print_summary(
    config: TrainingConfig,
    inputs: RunInputs,
    examples: list[Example],
    shapes: list[DrafterConfig],
    model: Any,
    accelerator: Accelerator,
    *,
    has_template: bool,
) -> None:
    """Print everything that is known before the target model has continued the prompts.

    has_template: whether the tokenizer has a chat template
    """
    base = sum(parameter.numel() for parameter in model.parameters())
    processes = accelerator.num_processes
    of_processes = f" on each of {processes} processes" if processes > 1 else ""
    _say(f"device {accelerator.device}{of_processes}, precision {config.precision}")
    _say(
        f"target model {config.model_name}, {_millions(base)} frozen parameters in "
        f"{MODEL_DTYPES[config.model_dtype]}{_places(model)}"
    )
    prompt_tokens = sum(len(example.prompt_ids) for example in examples)
    following = (
        f"each continued by at most {config.max_new_tokens} tokens"
        if config.labels == "distill"
        else f"with answers of {sum(len(example.answer_ids or []) for example in examples):,} tokens"
    )
    _say(
        f"{len(examples):,} prompts of {prompt_tokens:,} tokens, {following}; "
        f"{num_held_out(len(examples), config.holdout):,} held out"
    )
    if not has_template and any(isinstance(turn, Turn) for turn in inputs.turns):
        _say("the tokenizer has no chat template, so messages are given to the model as plain text")
    if inputs.bad.count:
        shown = "".join(f"\n  {problem}" for problem in inputs.bad.first)
        _say(f"--skip-bad-rows left out {inputs.bad.count:,} rows, the first:{shown}")
    for settings, shape in zip(config.heads, shapes, strict=True):
        count = count_trained_parameters(shape)
        name = f"head {settings.name}" if settings.name else "head"
        _say(
            f"{name}: {shape.drafter_type}, {shape.num_frames} frames of {settings.num_labels} labels, trunk "
            f"{shape.trunk}, transition {shape.transition}, loss {settings.loss}, {_millions(count)} trained "
            "parameters"
        )
    sequences = config.batch_size * config.grad_accumulation * processes
    _say(
        f"{config.steps:,} steps of {sequences} sequences with {config.num_anchors} anchors each; "
        "their time is estimated after the first three"
    )
    if config.warmup >= config.steps:
        _say(f"the learning rate rises to the end of the run; --warmup is {config.warmup} steps")
    parts = {
        "the target model": sum(p.numel() * p.element_size() for p in model.parameters()),
        "weights, gradients and moments of the heads": TRAINED_BYTES
        * sum(map(count_trained_parameters, shapes)),
        "soft labels of a batch": soft_label_bytes(config, examples, model.config.vocab_size),
    }
    listed = ", ".join(f"{in_words(size)} for {part}" for part, size in parts.items() if size)
    _say(
        f"about {in_words(sum(parts.values()))} of memory: {listed}; other activations and libraries come on "
        "top"
    )


def print_data(config: TrainingConfig, sequences: Sequences, num_trained: int, held_out: HeldOut) -> None:
    """Print a line about the sequences, after all prompts have been continued."""
    evaluated = held_out_sequences(min(NUM_EVALUATED, len(held_out.indices)))
    _say(
        f"training on {num_trained:,} sequences of {sequences.tokens.size:,} tokens in all; every "
        f"{config.eval_every} steps an evaluation on the same {evaluated}, at the end on "
        f"{len(held_out.indices)}"
    )
    if len(held_out.indices) < FEW_SEQUENCES:
        _say("an evaluation on so few sequences is rough; a larger --holdout holds out more")


def print_draft_vocabularies(heads: list[Drafter], token_counts: Tensor) -> None:
    """Print which share of the continuations' tokens can be drafted by heads with a draft vocabulary."""
    for head in heads:
        if head.draft_token_ids is not None:
            share = float(token_counts[head.draft_token_ids.cpu()].sum() / token_counts.sum())
            count = head.config.label_count
            _say(f"{count:,} tokens can be drafted, {share:.1%} of those of the continuations")


def _places(model: Any) -> str:
    """The devices over which accelerate has spread a model, in words; "" if it did not spread the model."""
    places = getattr(model, "hf_device_map", None)
    return f", spread over {', '.join(sorted(set(map(str, places.values()))))}" if places else ""


def _say(text: str) -> None:
    print(f"train: {text}", flush=True)


def _millions(count: int) -> str:
    return f"{count / 1e6:.1f} M" if count >= 1e5 else f"{count:,}"


def soft_label_bytes(config: TrainingConfig, examples: list[Example], vocab_size: int) -> int:
    """Bytes of the soft labels in the largest micro step, most of its memory if the vocabulary is large."""
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

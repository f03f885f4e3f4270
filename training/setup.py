"""What a training run starts with: fresh heads, the sequences and their features."""

import dataclasses
import hashlib
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from drafters.base import Drafter
from drafters.config import DrafterConfig, DrafterConfigError, HeadSettings
from drafters.registry import build_drafter
from drafters.target_models import rope_parameters
from drafters.weights import WEIGHTS_NAME, load_weights
from training.checks import RunInputs
from training.config import TrainingConfig
from training.conversations import Turn
from training.distill import Sequences, distill
from training.errors import TrainingError
from training.examples import Example, make_examples
from training.features import CachedFeatures, FeatureSource
from training.generation import write_self_prompts
from training.head_config import HeadConfig
from training.memory import in_words
from training.self_prompts import SelfPromptSettings, UserTemplate
from training.target_model import SharedTables, target_digest


def drafter_config(base: Any, settings: HeadConfig, config: TrainingConfig) -> DrafterConfig:
    """The configuration of a head for a target model of configuration ``base``. Raises TrainingError."""
    where = f"head {settings.name!r}: " if settings.name else ""
    shape = {field.name: getattr(settings, field.name) for field in dataclasses.fields(HeadSettings)}
    shape["intermediate_size"] = settings.intermediate_size or base.intermediate_size
    try:
        return DrafterConfig(
            **shape,
            vocab_size=base.vocab_size,
            hidden_size=base.hidden_size,
            num_heads=base.num_attention_heads,
            num_kv_heads=getattr(base, "num_key_value_heads", None) or base.num_attention_heads,
            head_dim=getattr(base, "head_dim", None) or base.hidden_size // base.num_attention_heads,
            target_layer_ids=config.target_layer_ids
            or settings.default_target_layers(base.num_hidden_layers),
            base_num_layers=base.num_hidden_layers,
            rope_theta=float(rope_parameters(base)["full_attention"].get("rope_theta", 10000.0)),
            rms_norm_eps=base.rms_norm_eps,
            base_model=config.model_name,
            base_model_revision=getattr(base, "_commit_hash", None),
        )
    except DrafterConfigError as error:
        raise TrainingError(f"{where}{error}") from error


def make_head(
    model: Any, settings: HeadConfig, config: TrainingConfig, tables: SharedTables | None = None
) -> Drafter:
    """A fresh head of the target model's width, sharing its embedding and LM head.

    tables: those of the model, if several heads share copies of them
    """
    shape = drafter_config(model.config, settings, config)
    torch.manual_seed(settings.seed)
    head = build_drafter(dataclasses.replace(shape, base_weights=target_digest(model, config.model)))
    tables = tables or SharedTables.of(model, config.precision, model.device)
    tables.attach(head, model)
    if settings.init_from:
        warm_start(head, settings.init_from)
    return head


def warm_start(head: Drafter, directory: Path) -> list[str]:
    """Take from another head's checkpoint every weight that fits; returns their names.

    Frame queries are taken frame by frame; frames beyond those of the other head start as its last one.
    Raises TrainingError if nothing fits.
    """
    path = directory / WEIGHTS_NAME
    try:
        found = load_weights(path)
    except (OSError, SafetensorError, KeyError) as error:
        raise TrainingError(f"--init-from: {path} cannot be read: {error}") from error
    own = head.state_dict()
    queries = found.get("frame_queries")
    if queries is not None and "frame_queries" in own and queries.shape[1:] == own["frame_queries"].shape[1:]:
        frames = torch.arange(own["frame_queries"].shape[0]).clamp(max=queries.shape[0] - 1)
        found["frame_queries"] = queries[frames]
    if head.config.trunk_type.borrows_layers:
        found = adapters_from_the_top(found, head.config.num_layers)
    taken = {name: value for name, value in found.items() if name in own and value.shape == own[name].shape}
    if not taken:
        raise TrainingError(f"--init-from: no weight of {directory} fits this head")
    head.load_state_dict(own | taken)
    return sorted(taken)


def adapters_from_the_top(found: dict[str, Tensor], num_layers: int) -> dict[str, Tensor]:
    """The adapters of another head's streams, for the same layers of the target model; all else as it is.

    They are numbered from the first upper layer. What belongs to that layer is of no use where it is another.
    """
    theirs = {int(name.split(".")[1]) for name in found if name.startswith("lora.")}
    shift = num_layers - len(theirs)
    if not theirs or not shift:
        return found
    moved = {}
    for name, value in found.items():
        where, _, rest = name.partition(".")
        if where == "lora":
            number, _, rest = rest.partition(".")
            moved[f"lora.{int(number) + shift}.{rest}"] = value
        elif where not in ("exit_adapter", "stream_embeddings", "start"):
            moved[name] = value
    return moved


def own_turns(
    config: TrainingConfig, model: Any, model_hash: str, tokenizer: Any, accelerator: Accelerator
) -> list[Turn]:
    """The prompts that the model writes itself; the main process lets it, the others read its cache."""
    assert config.self_prompts is not None
    settings = SelfPromptSettings(
        count=config.self_prompts,
        temperature=config.prompt_temperature,
        top_p=config.prompt_top_p,
        max_tokens=config.max_prompt_tokens,
        seed=config.data_seed,
    )
    name = model_hash + _computed_in(config)
    record = settings.record(UserTemplate.of(tokenizer), name)
    key = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
    with accelerator.main_process_first(), accelerator.autocast():
        prompts = write_self_prompts(
            model,
            tokenizer,
            settings,
            path=config.cache_directory / f"self-prompts-{key[:16]}.jsonl",
            model_name=name,
            end_token_ids=end_token_ids(model),
            batch_size=config.distill_batch_size,
            flag="--cache-dir",
        )
    if accelerator.is_main_process:
        print("\n".join(f"train: {line}" for line in prompts.report()), flush=True)
    return prompts.turns(config.self_prompts)


def end_token_ids(model: Any) -> list[int]:
    """The tokens with which the model ends a text."""
    eos = model.generation_config.eos_token_id
    return eos if isinstance(eos, list) else [] if eos is None else [eos]


def load_examples(
    config: TrainingConfig,
    inputs: RunInputs,
    tokenizer: PreTrainedTokenizerBase,
    own: Sequence[Turn] = (),
) -> list[Example]:
    """The prompts that are trained with, as token ids. Raises TrainingError if none is left.

    own: prompts that the model wrote, beside those of the data
    """
    examples = make_examples([*inputs.turns, *own], tokenizer, inputs.bad)
    longest = config.max_length - 2
    examples = [example for example in examples if len(example.prompt_ids) <= longest]
    # Shuffled, so that --max-samples takes its share of every file.
    random.Random(config.data_seed).shuffle(examples)
    examples = examples[: config.max_samples]
    if not examples:
        raise TrainingError(f"--max-length: every prompt is longer than {longest} tokens")
    if config.labels == "data":
        examples = [example for example in examples if example.answer_ids]
        if not examples:
            raise TrainingError("--labels data: no row of the data holds an answer")
    if len(examples) < 2:
        raise TrainingError(
            "--data: no sequence with a continuation is left for training; at least two prompts are needed, "
            "because one is held out"
        )
    return examples


def make_sequences(
    config: TrainingConfig, model: Any, model_hash: str, examples: list[Example], accelerator: Accelerator
) -> Sequences:
    """Prompts and their continuations; the main process distils them, the others read its cache."""
    if config.labels == "data":
        return Sequences([(example.prompt_ids, example.answer_ids or []) for example in examples])
    with accelerator.main_process_first(), accelerator.autocast():
        return distill(
            model,
            examples,
            model_fingerprint=model_hash + _computed_in(config),
            cache_dir=config.cache_directory,
            max_new_tokens=config.max_new_tokens,
            batch_size=config.distill_batch_size,
            eos_token_ids=end_token_ids(model),
        )


def cache_features(
    config: TrainingConfig,
    model_hash: str,
    live: FeatureSource,
    layer_ids: tuple[int, ...],
    sequences: Sequences,
    feature_size: int,
    accelerator: Accelerator,
) -> CachedFeatures:
    """The features of all sequences, computed on the main process unless an earlier run did."""
    key = hashlib.sha256(sequences.tokens.tobytes() + sequences.offsets.tobytes())
    key.update(f"{model_hash} {layer_ids} {config.max_length} {_computed_in(config)}".encode())
    path = config.cache_directory / f"features-{key.hexdigest()[:16]}.bfloat16"
    with accelerator.main_process_first(), accelerator.autocast():
        cached = CachedFeatures(path, sequences, feature_size, config.max_length)
        if not cached.complete:
            size = in_words(path.stat().st_size)
            print(f"train: the features of all sequences take {size} in {path.parent}", flush=True)
            cached.fill(live, accelerator.device)
    return cached


def _computed_in(config: TrainingConfig) -> str:
    """The number formats that the target model's outputs depend on, for the names of cached files."""
    return config.precision + ("" if config.model_dtype == "fp32" else f" {config.model_dtype}")

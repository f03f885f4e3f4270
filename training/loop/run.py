"""A training run, from a checked configuration to heads on disk."""

import dataclasses
import datetime
import hashlib
import json
import math
import random
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs, set_seed
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.utils.tensorboard import SummaryWriter
from transformers import PreTrainedTokenizerBase

from drafters.build import meta_head
from drafters.checkpoints.loading import load_config, load_tokenizer
from drafters.model_files import local_model
from runtime.core.system import git_sha
from training.config import TrainingConfig
from training.data.batches import BatchSampler, CachedFeatures, FeatureSource, LiveFeatures, split_holdout
from training.data.conversations import BadRows, Turn
from training.data.self_prompts import (
    SelfPrompts,
    UserTemplate,
    local_draw,
    self_prompts_record,
    write_self_prompts,
)
from training.data.sequences import Example, Sequences, distill, make_examples
from training.fresh_heads import drafter_config, fitting_weights, make_head
from training.head_set import HeadSet
from training.loop.evaluation import NUM_EVALUATED_AT_END, HeldOut
from training.loop.optimizers import make_optimizers, set_learning_rate
from training.loop.progress import Meter, RunPhase, in_words
from training.loop.start import CHECKPOINT, LOGS, RunInputs, check_resumed, forget_checkpoint, run_settings
from training.loop.summary import print_data, print_draft_vocabularies, print_summary
from training.loop.writer import WHOLE, Records, load_checkpoint, save_checkpoint
from training.settings import TrainingError
from training.target_model import (
    SharedTables,
    end_token_ids,
    fingerprint,
    load_pretrained,
    load_target_model,
    teacher,
    with_number_formats,
)

# What an answer of the data has to do to be learned; for messages about those that do not.
FOLLOWS = "follows its prompt in the chat template, which may open thoughts that the answer lacks"
# Time limit of the other processes, which wait while the main one distils. A long distillation takes days.
PROCESS_TIMEOUT = datetime.timedelta(days=7)


def train(config: TrainingConfig, inputs: RunInputs, phase: RunPhase) -> None:
    """Run the whole training. Raises UserError for unusable settings or data before any long work."""
    started_at = git_sha()
    directory = load_pretrained(local_model, config.model)
    if directory != config.model:  # It was given by its name on the hub.
        config = dataclasses.replace(config, model=directory, base_model=str(config.model))
    # Raises TrainingError for a model that cannot be exported.
    base = load_pretrained(load_config, config.model)
    config = with_number_formats(config, base)
    config = dataclasses.replace(config, max_length=min(config.max_length, base.max_position_embeddings))
    shapes = [drafter_config(base, settings, config) for settings in config.heads]
    for settings, shape in zip(config.heads, shapes, strict=True):
        # The adapters of streams have the names of the target model's layers, which are not loaded yet.
        if settings.init_from and not shape.trunk_type.borrows_layers:
            fitting_weights(meta_head(shape), settings.init_from)
    tokenizer = load_pretrained(load_tokenizer, config.model)
    if config.self_prompts:
        UserTemplate.all_of(tokenizer, config)
    if config.data:
        # With self-written prompts this only checks the data; its rows are counted when they are read again.
        bad = BadRows(skip=config.skip_bad_rows) if config.self_prompts else inputs.bad
        examples = load_examples(config, dataclasses.replace(inputs, bad=bad), tokenizer)
    model_hash = fingerprint(config.model)
    recorded = run_settings(config, model_hash, getattr(tokenizer, "chat_template", None))
    if inputs.checkpoint is not None:
        check_resumed(config, inputs.checkpoint, recorded)
    accelerator = _accelerator(config)
    main = accelerator.is_main_process
    set_seed(config.data_seed)
    model = load_target_model(config, accelerator.device)
    if config.self_prompts:
        phase.distilling(config)
        own = self_prompt_turns(config, model, model_hash, tokenizer, accelerator)
        examples = load_examples(config, inputs, tokenizer, own)
    if main:
        has_template = bool(getattr(tokenizer, "chat_template", None))
        print_summary(config, inputs, examples, shapes, model, accelerator, has_template=has_template)
    if config.labels == "distill":
        phase.distilling(config)
    sequences = make_sequences(config, model, model_hash, examples, accelerator)
    train_indices, held_out_indices = split_holdout(sequences, config.holdout, config.data_seed)
    if not train_indices.size:
        raise TrainingError("--data: no sequence with a continuation is left for training")
    token_counts = torch.from_numpy(sequences.token_counts(train_indices, model.config.vocab_size))
    heads = _make_heads(model, config, accelerator.device, token_counts)
    if main and inputs.checkpoint is None:
        forget_checkpoint(config)
        if config.resume:
            print(f"train: {config.run_directory} holds no checkpoint yet; training begins at step 0")
    batches = BatchSampler(
        sequences,
        train_indices,
        batch_size=config.batch_size,
        num_anchors=config.num_anchors,
        max_length=config.max_length,
        seed=config.data_seed,
    )
    optimizers = make_optimizers(heads, config)
    state: dict[str, Any] = {"step": 0, "curves": [[] for _ in config.heads], "settings": recorded}
    wrapped, *optimizers = accelerator.prepare(heads, *optimizers)
    if inputs.checkpoint is not None:
        state = load_checkpoint(inputs.checkpoint, heads, optimizers) | {"settings": recorded}
        if main and state["step"] >= config.steps:
            print(f"train: the checkpoint is of step {state['step']} already: nothing is left to train")
    # With FSDP a process has parts of the heads, so the main process evaluates and writes a whole copy.
    copy = heads
    if main and accelerator.is_fsdp2:
        copy = _make_heads(model, config, accelerator.device, token_counts)
    layer_ids = heads.layer_ids
    source: FeatureSource = LiveFeatures(model, layer_ids)
    if config.cache_features:
        width = len(layer_ids) * model.config.hidden_size
        source = cache_features(config, model_hash, source, layer_ids, sequences, width, accelerator)
    evaluated = held_out_indices[:NUM_EVALUATED_AT_END].tolist()
    held_out = HeldOut(source, layer_ids, sequences, evaluated, config.max_length, accelerator)
    if main:
        print_data(config, sequences, train_indices.size, held_out)
        print_draft_vocabularies(heads.drafters, token_counts)
    writer = SummaryWriter(str(config.run_directory / LOGS)) if main else None
    records = Records(config, sequences, started_at, state["curves"], held_out, writer)
    saved = state["step"] if inputs.checkpoint is not None else None
    phase.training(config, state["step"], saved)

    with Meter(config, state, visible=main, device=accelerator.device) as meter:
        for step in range(state["step"], config.steps):
            meter.begin_step()
            set_learning_rate(optimizers, step, config)
            losses, num_tokens = _train_step(
                step, config, wrapped, heads, optimizers, batches, source, accelerator
            )
            state["step"] = done = step + 1
            meter.update(losses, num_tokens, optimizers[0].param_groups[0]["lr"])
            last = done == config.steps
            if done % config.eval_every == 0 or last:
                _update_copy(copy, heads, accelerator)
                if main:
                    records.evaluate(copy.drafters, done, losses)
            if done % config.save_every == 0 or last:
                save_checkpoint(config.run_directory / CHECKPOINT, heads, optimizers, state, main=main)
                saved = done
            phase.training(config, done, saved)
            accelerator.wait_for_everyone()
    _update_copy(copy, heads, accelerator)  # A resumed run may have had no step left.
    phase.writing(config)
    if main:
        records.write_last(copy.drafters)
    if writer:
        writer.close()
    # The other processes stay in the group until the main one has written the heads.
    accelerator.wait_for_everyone()
    accelerator.end_training()


def _train_step(
    step: int,
    config: TrainingConfig,
    wrapped: torch.nn.Module,
    heads: HeadSet,
    optimizers: list[torch.optim.Optimizer],
    batches: BatchSampler,
    source: FeatureSource,
    accelerator: Accelerator,
) -> tuple[list[float], int]:
    """One optimizer step: the loss of every head in nats a draft, and the number of tokens of all processes.

    wrapped: the heads, as accelerate distributes them
    """
    processes, rank = accelerator.num_processes, accelerator.process_index
    total, num_tokens = torch.zeros(len(config.heads)), 0
    for micro in range(config.grad_accumulation):
        number = (step * config.grad_accumulation + micro) * processes + rank
        sampled = batches.batch(number)
        num_tokens += int(sampled.ends.sum()) * processes
        sampled = sampled.to(accelerator.device)
        with accelerator.autocast():
            losses = wrapped(source(sampled.batch), sampled)
        accelerator.backward(losses.sum() / config.grad_accumulation)
        total += losses.detach().cpu() / config.grad_accumulation
    _require_finite(total, step, config)
    for head in heads.drafters:
        accelerator.clip_grad_norm_(head.parameters(), config.max_grad_norm)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return total.tolist(), num_tokens


def _accelerator(config: TrainingConfig) -> Accelerator:
    # accelerate still uses the old name of the option.
    warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
    return Accelerator(
        mixed_precision="bf16" if config.precision == "bf16" else "no",
        cpu=not torch.cuda.is_available(),
        kwargs_handlers=[
            InitProcessGroupKwargs(timeout=PROCESS_TIMEOUT),
            # The heads' only buffers are constants and the target model's frozen embeddings.
            DistributedDataParallelKwargs(broadcast_buffers=False),
        ],
    )


def _make_heads(
    model: Any, config: TrainingConfig, device: torch.device, token_counts: torch.Tensor
) -> HeadSet:
    tables = SharedTables.of(model, config.precision, device)
    heads = [make_head(model, settings, config, tables, token_counts) for settings in config.heads]
    return HeadSet(heads, config.heads, teacher(model)).to(device)


def _update_copy(copy: HeadSet, heads: HeadSet, accelerator: Accelerator) -> None:
    """With FSDP, gather the heads' weights in the main process's copy. Every process has to call this."""
    if accelerator.is_fsdp2:
        weights = get_model_state_dict(heads, options=WHOLE)
        if accelerator.is_main_process:
            copy.load_state_dict(weights)


def _require_finite(losses: torch.Tensor, step: int, config: TrainingConfig) -> None:
    """Raises TrainingError if a loss is infinite or NaN."""
    for settings, loss in zip(config.heads, losses.tolist(), strict=True):
        if not math.isfinite(loss):
            name = f" of head {settings.name!r}" if settings.name else ""
            raise TrainingError(f"the loss{name} is {loss} at step {step}; lower --learning-rate")


def self_prompt_turns(
    config: TrainingConfig, model: Any, model_hash: str, tokenizer: Any, accelerator: Accelerator
) -> list[Turn]:
    """The prompts that the model writes itself. The main process writes them, the others read its cache."""
    assert config.self_prompts is not None
    name = model_hash + _computed_in(config)
    record = self_prompts_record(config, tokenizer, model_name=name, seed=config.data_seed)
    key = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
    with accelerator.main_process_first(), accelerator.autocast():
        ends = end_token_ids(model)
        path = config.cache_directory / f"self-prompts-{key[:16]}.jsonl"
        prompts = SelfPrompts(path, record, tokenizer.all_special_tokens, flag="--cache-dir")
        draw = local_draw(model, tokenizer, config, end_token_ids=ends, batch_size=config.distill_batch_size)
        write_self_prompts(draw, prompts, config.self_prompts)
    if accelerator.is_main_process:
        print("\n".join(f"train: {line}" for line in prompts.report()), flush=True)
    return prompts.turns(config.self_prompts)


def load_examples(
    config: TrainingConfig,
    inputs: RunInputs,
    tokenizer: PreTrainedTokenizerBase,
    own: Sequence[Turn] = (),
) -> list[Example]:
    """The prompts of the run as token ids. Raises TrainingError if none is left.

    own: prompts that the model wrote, in addition to those of the data
    """
    examples = make_examples([*inputs.turns, *own], tokenizer, inputs.bad)
    if not examples:
        raise TrainingError(
            f"--data: no row can be used; the first bad row: {inputs.bad.first[0]}"
            if inputs.bad.first
            else "--data: every prompt is empty, or a text of one token, which nothing continues"
        )
    longest, found = config.max_length - 2, len(examples)
    examples = [example for example in examples if len(example.prompt_ids) <= longest]
    if examples and len(examples) < found and (own or not config.self_prompts):
        num_long = found - len(examples)
        print(
            f"train: left out {num_long:,} of {found:,} prompts, which are longer than --max-length or the "
            "model's context allows"
        )
    # The prompts are shuffled, so that --max-samples takes its share of every file.
    random.Random(config.data_seed).shuffle(examples)
    examples = examples[: config.max_samples]
    if not examples:
        raise TrainingError(f"--max-length: every prompt is longer than {longest} tokens")
    if config.labels == "data":
        num_answers = sum(example.answer_ids is not None for example in examples)
        examples = [example for example in examples if example.answer_ids]
        if num_answers and not examples:
            raise TrainingError(f"--labels data: no answer of the data {FOLLOWS}")
        if not examples:
            raise TrainingError("--labels data: no row of the data holds an answer")
        if len(examples) < num_answers and (own or not config.self_prompts):
            lost = num_answers - len(examples)
            print(f"train: left out {lost:,} of {num_answers:,} answers; none of them {FOLLOWS}")
    if len(examples) < 2:
        raise TrainingError(
            "--data: no sequence with a continuation is left for training; at least two prompts are needed, "
            "because one is held out"
        )
    return examples


def make_sequences(
    config: TrainingConfig, model: Any, model_hash: str, examples: list[Example], accelerator: Accelerator
) -> Sequences:
    """Prompts and their continuations. The main process distils them, the others read its cache."""
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
    """The features of all sequences. The main process computes them, unless an earlier run already did."""
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
    """The number formats of the target model's outputs, for the names of cached files."""
    return config.precision + ("" if config.model_dtype == "fp32" else f" {config.model_dtype}")

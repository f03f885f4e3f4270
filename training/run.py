"""A training run: from a checked configuration to heads on disk."""

import dataclasses
import datetime
import math
import warnings
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs, set_seed
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.utils.tensorboard import SummaryWriter
from transformers import AutoTokenizer

from drafters.model_files import local_model
from drafters.target_models import TargetModelError
from training.batches import BatchSampler, split_holdout
from training.checkpoint import WHOLE, load_checkpoint, save_checkpoint
from training.checks import RunInputs
from training.config import TrainingConfig
from training.errors import TrainingError
from training.features import FeatureSource, LiveFeatures
from training.finish import HeadWriter, HeldOut, write_last_head
from training.hashing import fingerprint
from training.heads import HeadSet
from training.meter import Meter
from training.number_formats import with_number_formats
from training.optimizers import make_optimizers, set_learning_rate
from training.output import CHECKPOINT, LOGS, check_resumed, forget_checkpoint, run_settings
from training.provenance import git_sha
from training.records import Records
from training.self_prompts import UserTemplate
from training.setup import cache_features, drafter_config, load_examples, make_head, make_sequences, own_turns
from training.stage import Stage
from training.summary import print_data, print_summary
from training.target_model import (
    SharedTables,
    load_pretrained,
    load_target_model,
    read_model_config,
    teacher,
)

# How long the other processes wait for the main one, which distills; a shorter time ends long distillations.
PROCESS_TIMEOUT = datetime.timedelta(days=7)


def train(config: TrainingConfig, inputs: RunInputs, stage: Stage) -> None:
    """Run the whole training. Raises UserError for what cannot be used before any long work."""
    started_at = git_sha()
    config = _with_local_model(config)
    base = read_model_config(config)
    config = with_number_formats(config, base)
    shapes = [drafter_config(base, settings, config) for settings in config.heads]
    tokenizer = load_pretrained(AutoTokenizer, config.model)
    if config.self_prompts:
        UserTemplate.of(tokenizer)
    if config.data:
        examples = load_examples(config, inputs, tokenizer)
    model_hash = fingerprint(config.model)
    recorded = run_settings(config, model_hash)
    if inputs.checkpoint is not None:
        check_resumed(config, inputs.checkpoint, recorded)
    accelerator = _accelerator(config)
    main = accelerator.is_main_process
    set_seed(config.data_seed)
    model = load_target_model(config, accelerator.device)
    heads = _make_heads(model, config, accelerator.device)
    if config.self_prompts:
        stage.distilling(config)
        own = own_turns(config, model, model_hash, tokenizer, accelerator)
        examples = load_examples(config, inputs, tokenizer, own)
    if main:
        has_template = bool(getattr(tokenizer, "chat_template", None))
        print_summary(config, inputs, examples, shapes, model, accelerator, has_template=has_template)
    if config.labels == "distill":
        stage.distilling(config)
    sequences = make_sequences(config, model, model_hash, examples, accelerator)
    train_indices, held_out_indices = split_holdout(sequences, config.holdout, config.data_seed)
    if not train_indices.size:
        raise TrainingError("--data: no sequence with a continuation is left for training")
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
    # Under FSDP a process has parts of the heads; the main process evaluates and writes a whole copy.
    copy = _make_heads(model, config, accelerator.device) if main and accelerator.is_fsdp2 else heads
    layer_ids = heads.layer_ids
    source: FeatureSource = LiveFeatures(model, layer_ids)
    if config.cache_features:
        width = len(layer_ids) * model.config.hidden_size
        source = cache_features(config, model_hash, source, layer_ids, sequences, width, accelerator)
    held_out = HeldOut(source, layer_ids, sequences, held_out_indices, config.max_length, accelerator)
    if main:
        print_data(config, sequences, train_indices.size, held_out)
    writer = SummaryWriter(str(config.run_directory / LOGS)) if main else None
    head_writer = HeadWriter(config, sequences, started_at)
    records = Records(state["curves"], held_out, head_writer, writer)
    saved = state["step"] if inputs.checkpoint is not None else None
    stage.training(config, state["step"], saved)

    processes, rank = accelerator.num_processes, accelerator.process_index
    with Meter(config, state, visible=main, device=accelerator.device) as meter:
        for step in range(state["step"], config.steps):
            meter.begin_step()
            set_learning_rate(optimizers, step, config)
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
            _check_losses(total, step, config)
            for head in heads.drafters:
                accelerator.clip_grad_norm_(head.parameters(), config.max_grad_norm)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            state["step"] = done = step + 1
            meter.update(total.tolist(), num_tokens, optimizers[0].param_groups[0]["lr"])
            last = done == config.steps
            if done % config.eval_every == 0 or last:
                _update_copy(copy, heads, accelerator)
                if main:
                    records.evaluate(copy.drafters, done, total.tolist())
            if done % config.save_every == 0 or last:
                save_checkpoint(config.run_directory / CHECKPOINT, heads, optimizers, state, main=main)
                saved = done
            stage.training(config, done, saved)
            accelerator.wait_for_everyone()
    _update_copy(copy, heads, accelerator)  # Again, because there may have been no step left to do.
    stage.writing(config)
    if main:
        for settings, head, curve in zip(config.heads, copy.drafters, state["curves"], strict=True):
            write_last_head(head, settings, curve, held_out, head_writer)
    if writer:
        writer.close()
    # No process leaves the group while the main one still writes.
    accelerator.wait_for_everyone()
    accelerator.end_training()


def _with_local_model(config: TrainingConfig) -> TrainingConfig:
    """The configuration with the directory of a model that was named as on the hub."""
    try:
        directory = local_model(config.model)
    except TargetModelError as error:
        raise TrainingError(f"--model: {error}") from error
    if directory == config.model:
        return config
    return dataclasses.replace(config, model=directory, base_model=str(config.model))


def _accelerator(config: TrainingConfig) -> Accelerator:
    # accelerate does not know the name of what replaces it yet.
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


def _make_heads(model: Any, config: TrainingConfig, device: torch.device) -> HeadSet:
    tables = SharedTables.of(model, config.precision, device)
    heads = [make_head(model, settings, config, tables) for settings in config.heads]
    return HeadSet(heads, config.heads, teacher(model)).to(device)


def _update_copy(copy: HeadSet, heads: HeadSet, accelerator: Accelerator) -> None:
    """Under FSDP, gather the heads' weights into the main process's copy; every process has to call it."""
    if accelerator.is_fsdp2:
        weights = get_model_state_dict(heads, options=WHOLE)
        if accelerator.is_main_process:
            copy.load_state_dict(weights)


def _check_losses(losses: torch.Tensor, step: int, config: TrainingConfig) -> None:
    for settings, loss in zip(config.heads, losses.tolist(), strict=True):
        if not math.isfinite(loss):
            name = f" of head {settings.name!r}" if settings.name else ""
            raise TrainingError(f"the loss{name} is {loss} at step {step}; lower --learning-rate")

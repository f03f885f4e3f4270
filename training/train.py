"""Train draft heads for a Hugging Face model.

    python -m training.train --model MODEL_DIR --data conversations.jsonl --out heads/ctc
    python -m training.train --model MODEL_DIR --data a.jsonl b.jsonl --out heads --heads heads.toml
    torchrun --nproc-per-node 4 -m training.train --model MODEL_DIR --data a.jsonl --out heads/ctc

The model stays frozen. Its own greedy continuations of the prompts, which are cached, are the targets. The
heads read its hidden states; several heads are trained with one forward pass. An interrupted run is
continued with ``--resume``.
"""

import datetime
import functools
import json
import math
import warnings
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs, set_seed
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from drafters.target_models import last_layer_logits
from runtime.cli import exit_status
from training.batches import BatchSampler, split_holdout
from training.checkpoint import WHOLE, load_checkpoint, save_checkpoint
from training.config import TrainingConfig, parse_config
from training.errors import TrainingError
from training.features import FeatureSource, LiveFeatures
from training.finish import HeldOut, write_head
from training.heads import HeadSet
from training.optimizers import make_optimizers, set_learning_rate
from training.output import CHECKPOINT, check_output, check_resumed, forget_checkpoint, run_settings
from training.provenance import git_sha
from training.setup import cache_features, load_sequences, load_target_model, make_head

# How long the other processes wait for the main one, which distills; a shorter time ends long distillations.
PROCESS_TIMEOUT = datetime.timedelta(days=7)


def train(config: TrainingConfig) -> None:
    """Run the whole training. Raises UserError for what cannot be used before any long work."""
    if not (config.model / "config.json").is_file():
        raise TrainingError(
            f"--model: {config.model} has no config.json; expected a Hugging Face model directory"
        )
    checkpoint = check_output(config)
    recorded = run_settings(config)
    if checkpoint is not None:
        check_resumed(config, checkpoint, recorded)
    started_at = git_sha()
    # accelerate does not know the name of what replaces it yet.
    warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
    accelerator = Accelerator(
        mixed_precision="bf16" if config.precision == "bf16" else "no",
        cpu=not torch.cuda.is_available(),
        kwargs_handlers=[
            InitProcessGroupKwargs(timeout=PROCESS_TIMEOUT),
            # The heads' only buffers are constants and the target model's frozen embeddings.
            DistributedDataParallelKwargs(broadcast_buffers=False),
        ],
    )
    set_seed(config.data_seed)
    model = load_target_model(config.model).to(accelerator.device)
    heads = _make_heads(model, config).to(accelerator.device)
    sequences = load_sequences(config, model, accelerator)
    train_indices, held_out_indices = split_holdout(sequences, config.holdout, config.data_seed)
    if not train_indices.size:
        raise TrainingError("--data: no sequence with a continuation is left for training")
    if accelerator.is_main_process and checkpoint is None:
        forget_checkpoint(config)
        if config.resume:
            print(f"train: {config.out} holds no checkpoint yet; training begins at step 0")
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
    if checkpoint is not None:
        state = load_checkpoint(checkpoint, heads, optimizers) | {"settings": recorded}
    main = accelerator.is_main_process
    # Under FSDP a process has parts of the heads; the main process evaluates and writes a whole copy.
    copy = _make_heads(model, config).to(accelerator.device) if main and accelerator.is_fsdp2 else heads
    layer_ids = heads.layer_ids
    source: FeatureSource = LiveFeatures(model, layer_ids)
    if config.cache_features:
        width = len(layer_ids) * model.config.hidden_size
        source = cache_features(config, source, layer_ids, sequences, width, accelerator)
    held_out = HeldOut(source, layer_ids, sequences, held_out_indices, config.max_length, accelerator)
    writer = SummaryWriter(str(config.out / "logs")) if main else None
    bar = tqdm(total=config.steps, initial=state["step"], disable=not main, desc="training", unit="step")

    processes, rank = accelerator.num_processes, accelerator.process_index
    for step in range(state["step"], config.steps):
        set_learning_rate(optimizers, step, config)
        total = torch.zeros(len(config.heads))
        for micro in range(config.grad_accumulation):
            number = (step * config.grad_accumulation + micro) * processes + rank
            sampled = batches.batch(number).to(accelerator.device)
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
        done = step + 1
        bar.update()
        bar.set_postfix(loss=" ".join(f"{value:.3f}" for value in total.tolist()))
        last = done == config.steps
        if done % config.eval_every == 0 or last:
            _update_copy(copy, heads, accelerator)
        if main and (done % config.eval_every == 0 or last):
            for settings, head, curve, loss in zip(
                config.heads, copy.drafters, state["curves"], total.tolist(), strict=True
            ):
                beta = held_out.evaluate(head).tokens_per_step
                curve.append({"step": done, "loss": round(loss, 4), "beta": round(beta, 3)})
                tqdm.write(json.dumps({"head": settings.name, **curve[-1]} if settings.name else curve[-1]))
                if writer:
                    writer.add_scalar(f"{settings.name}/loss".lstrip("/"), loss, done)
                    writer.add_scalar(f"{settings.name}/tokens_per_step".lstrip("/"), beta, done)
        state["step"] = done
        if done % config.save_every == 0 or last:
            save_checkpoint(config.out / CHECKPOINT, heads, optimizers, state, main=main)
        accelerator.wait_for_everyone()
    bar.close()
    _update_copy(copy, heads, accelerator)  # Again, because there may have been no step left to do.
    if main:
        for settings, head, curve in zip(config.heads, copy.drafters, state["curves"], strict=True):
            write_head(head, settings, config, curve, sequences, held_out, started_at)
    if writer:
        writer.close()
    # No process leaves the group while the main one still writes.
    accelerator.wait_for_everyone()
    accelerator.end_training()


def _make_heads(model: Any, config: TrainingConfig) -> HeadSet:
    return HeadSet(
        [make_head(model, settings, config) for settings in config.heads],
        config.heads,
        functools.partial(last_layer_logits, model),
    )


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


def main(argv: list[str] | None = None) -> int:
    def command() -> int:
        train(parse_config(argv, __doc__ or ""))
        return 0

    return exit_status(
        "train", command, interrupted="interrupted; add --resume to continue from the last checkpoint"
    )


if __name__ == "__main__":
    raise SystemExit(main())

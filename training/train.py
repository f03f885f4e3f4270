"""Train a CTC draft head for a Hugging Face model.

    python -m training.train --model MODEL_DIR --data conversations.jsonl --out heads/ctc
    torchrun --nproc-per-node 4 -m training.train --model MODEL_DIR --data a.jsonl b.jsonl --out heads/ctc

The backbone stays frozen. Its own greedy continuations of the prompts are the targets (cached);
the head learns from the hidden states of the backbone. Interrupt it and add ``--resume``.
"""

import datetime
import json
import math
import sys
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs, set_seed
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from runtime.errors import UserError
from training.batches import AnchoredBatch, BatchSampler, split_holdout
from training.checkpoint import find_checkpoint, load_checkpoint, save_checkpoint
from training.config import TrainingConfig, parse_config
from training.errors import TrainingError
from training.evaluate import drafter_logits, evaluate
from training.features import FeatureSource, LiveFeatures
from training.losses import LOSSES, gather_log_probs
from training.provenance import provenance
from training.setup import cache_features, load_pretrained, load_sequences, make_drafter

# Held-out sequences that one acceptance estimate looks at.
NUM_EVALUATED = 64
# The other processes wait while the main one distills.
PROCESS_TIMEOUT = datetime.timedelta(days=7)


def learning_rate(step: int, config: TrainingConfig) -> float:
    """Linear warm-up, then cosine to zero."""
    if step < config.warmup:
        return config.learning_rate * (step + 1) / config.warmup
    progress = (step - config.warmup) / max(1, config.steps - config.warmup)
    return config.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))


def batch_loss(
    source: FeatureSource, drafter: torch.nn.Module, batch: AnchoredBatch, loss: str, num_frames: int
) -> torch.Tensor:
    """Mean loss over the real anchors of a batch."""
    anchors = batch.anchors
    real = anchors.lengths.flatten() > 0
    logits = drafter_logits(source, drafter, batch).unflatten(1, (-1, num_frames)).flatten(0, 1)[real]
    targets, lengths = anchors.targets.flatten(0, 1)[real], anchors.lengths.flatten()[real]
    label_logp, blank_logp = gather_log_probs(logits, targets)
    return LOSSES[loss](label_logp, blank_logp, targets, lengths).mean()


def train(config: TrainingConfig) -> None:
    """Run the whole training; see the module's text. Raises UserError before any long work."""
    if not (config.model / "config.json").is_file():
        raise TrainingError(
            f"--model: {config.model} has no config.json; expected a Hugging Face model directory"
        )
    if config.out.exists() and not config.out.is_dir():
        raise TrainingError(f"--out: {config.out} is a file; expected a directory")
    checkpoint = config.out / "checkpoint"
    if config.resume:
        find_checkpoint(checkpoint)
    accelerator = Accelerator(
        mixed_precision="bf16" if config.precision == "bf16" else "no",
        cpu=not torch.cuda.is_available(),
        kwargs_handlers=[
            InitProcessGroupKwargs(timeout=PROCESS_TIMEOUT),
            # The head's only buffers are constants and the backbone's frozen embeddings.
            DistributedDataParallelKwargs(broadcast_buffers=False),
        ],
    )
    set_seed(config.seed)
    model = load_pretrained(AutoModelForCausalLM, config.model, dtype=torch.float32)
    model = model.to(accelerator.device).eval().requires_grad_(False)
    drafter = make_drafter(model, config).to(accelerator.device)
    sequences = load_sequences(config, model, accelerator)
    train_rows, held_out = split_holdout(sequences, config.holdout, config.seed)
    if not train_rows.size:
        raise TrainingError("--data: no sequence with a continuation is left for training")

    def sampler(rows: Any, batch_size: int) -> BatchSampler:
        return BatchSampler(
            sequences,
            rows,
            batch_size=batch_size,
            num_anchors=config.num_anchors,
            num_frames=config.num_frames,
            num_labels=config.num_labels,
            max_length=config.max_length,
            seed=config.seed,
        )

    batches = sampler(train_rows, config.batch_size)
    held_out = held_out[:NUM_EVALUATED]
    validation = sampler(held_out, min(8, held_out.size))
    optimizer = torch.optim.AdamW(
        drafter.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=config.weight_decay
    )
    state: dict[str, Any] = {"step": 0, "curve": []}
    if config.resume:
        state = load_checkpoint(checkpoint, drafter, optimizer)
    wrapped, optimizer = accelerator.prepare(drafter, optimizer)
    source: FeatureSource = LiveFeatures(model, drafter.config.target_layer_ids)
    if config.cache_features:
        source = cache_features(config, source, sequences, drafter.config.feature_size, accelerator)
    main = accelerator.is_main_process
    writer = SummaryWriter(str(config.out / "logs")) if main else None
    bar = tqdm(total=config.steps, initial=state["step"], disable=not main, desc="training", unit="step")

    def evaluation() -> float:
        generator = torch.Generator().manual_seed(config.seed)
        rows = [list(range(i, min(i + 8, held_out.size))) for i in range(0, held_out.size, 8)]
        found = [validation.collate([int(held_out[i]) for i in part], generator) for part in rows]
        with accelerator.autocast():
            return evaluate(source, drafter, [b.to(accelerator.device) for b in found]).tokens_per_step

    processes, rank = accelerator.num_processes, accelerator.process_index
    for step in range(state["step"], config.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config)
        total = 0.0
        for micro in range(config.grad_accumulation):
            number = (step * config.grad_accumulation + micro) * processes + rank
            batch = batches.batch(number).to(accelerator.device)
            with accelerator.autocast():
                loss = batch_loss(source, wrapped, batch, config.loss, config.num_frames)
            accelerator.backward(loss / config.grad_accumulation)
            total += loss.item() / config.grad_accumulation
        if not math.isfinite(total):
            raise TrainingError(f"the loss is {total} at step {step}; lower --learning-rate")
        accelerator.clip_grad_norm_(drafter.parameters(), config.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        done = step + 1
        bar.update()
        bar.set_postfix(
            loss=f"{total:.3f}", **({"beta": state["curve"][-1]["beta"]} if state["curve"] else {})
        )
        if writer:
            writer.add_scalar("loss", total, done)
        last = done == config.steps
        if main and (done % config.eval_every == 0 or last):
            beta = evaluation()
            state["curve"].append({"step": done, "loss": round(total, 4), "beta": round(beta, 3)})
            tqdm.write(json.dumps(state["curve"][-1]))
            if writer:
                writer.add_scalar("tokens_per_step", beta, done)
        state["step"] = done
        if main and (done % config.save_every == 0 or last):
            save_checkpoint(checkpoint, drafter, optimizer, state)
        accelerator.wait_for_everyone()
    bar.close()
    if main:
        dtype = torch.float16 if config.save_precision == "fp16" else torch.float32
        drafter.save_pretrained(config.out, dtype=dtype)
        (config.out / "training.json").write_text(
            json.dumps(provenance(config, state, sequences), indent=2) + "\n"
        )
        measured = (
            f": tokens per step {state['curve'][-1]['beta']} on held-out text" if state["curve"] else ""
        )
        print(f"wrote {config.out}{measured}")
    if writer:
        writer.close()
    accelerator.end_training()


def main(argv: list[str] | None = None) -> int:
    try:
        train(parse_config(argv, __doc__ or ""))
    except UserError as error:
        print(f"train: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("train: interrupted; add --resume to continue from the last checkpoint", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

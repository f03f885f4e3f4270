"""Train a CTC draft head for a Hugging Face model.

    python -m training.train --model MODEL_DIR --data conversations.jsonl --out heads/ctc
    torchrun --nproc-per-node 4 -m training.train --model MODEL_DIR --data a.jsonl b.jsonl --out heads/ctc

The backbone stays frozen. Its own greedy continuations of the prompts are the targets (cached);
the head learns from the hidden states of the backbone. Interrupt it and add ``--resume``.
"""

import dataclasses
import datetime
import hashlib
import importlib.metadata
import json
import math
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs, set_seed
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from drafters.config import DrafterConfig, DrafterConfigError, default_target_layers
from drafters.ctc import CTCDrafter
from runtime.errors import UserError
from training.batches import AnchoredBatch, BatchSampler, split_holdout
from training.checkpoint import find_checkpoint, load_checkpoint, save_checkpoint
from training.config import TrainingConfig, parse_config
from training.conversations import Example, read_examples
from training.distill import Sequences, distill, fingerprint
from training.errors import TrainingError
from training.evaluate import drafter_logits, evaluate
from training.features import CachedFeatures, FeatureSource, LiveFeatures
from training.losses import LOSSES, gather_log_probs

# Held-out sequences that one acceptance estimate looks at.
NUM_EVALUATED = 64
# The other processes wait while the main one distills.
PROCESS_TIMEOUT = datetime.timedelta(days=7)


def make_drafter(model: Any, config: TrainingConfig) -> CTCDrafter:
    """A fresh head of the backbone's width, sharing its embedding and LM head."""
    base = model.config
    rope = getattr(base, "rope_parameters", None) or {}
    try:
        drafter_config = DrafterConfig(
            vocab_size=base.vocab_size,
            hidden_size=base.hidden_size,
            intermediate_size=config.intermediate_size or base.intermediate_size,
            num_heads=base.num_attention_heads,
            num_kv_heads=getattr(base, "num_key_value_heads", None) or base.num_attention_heads,
            head_dim=getattr(base, "head_dim", None) or base.hidden_size // base.num_attention_heads,
            target_layer_ids=config.target_layer_ids or default_target_layers(base.num_hidden_layers),
            base_num_layers=base.num_hidden_layers,
            num_frames=config.num_frames,
            num_layers=config.num_layers,
            rope_theta=float(rope.get("rope_theta", 10000.0)),
            rms_norm_eps=base.rms_norm_eps,
            base_model=Path(base.name_or_path).name,
            base_model_revision=getattr(base, "_commit_hash", None),
        )
    except DrafterConfigError as error:
        raise TrainingError(str(error)) from error
    drafter = CTCDrafter(drafter_config)
    with torch.no_grad():
        # The LM head expects what the backbone's last norm hands it.
        drafter.norm.weight.copy_(model.get_decoder().norm.weight)
    return drafter.attach_base(model.get_input_embeddings().weight, model.lm_head.weight)


def load_sequences(config: TrainingConfig, model: Any, accelerator: Accelerator) -> Sequences:
    """Prompts and their targets: distilled on the main process, read from the cache by the others."""
    tokenizer = _load(AutoTokenizer, config.model)
    examples: list[Example] = []
    for path in config.data:
        examples.extend(read_examples(path, tokenizer))
    longest = config.max_length - 2
    examples = [e for e in examples if len(e.prompt_ids) <= longest]
    # Shuffled, so that --max-samples takes its share of every file.
    random.Random(config.seed).shuffle(examples)
    examples = examples[: config.max_samples]
    if not examples:
        raise TrainingError(f"--max-length: every prompt is longer than {longest} tokens")
    if config.labels == "data":
        answered = [(e.prompt_ids, e.answer_ids) for e in examples if e.answer_ids]
        if not answered:
            raise TrainingError("--labels data: no row of the data holds an answer")
        return Sequences(answered)
    eos = model.generation_config.eos_token_id
    with accelerator.main_process_first(), accelerator.autocast():
        return distill(
            model,
            examples,
            model_fingerprint=fingerprint(config.model) + config.precision,
            cache_dir=config.cache_dir or config.out / "cache",
            max_new_tokens=config.max_new_tokens,
            batch_size=config.distill_batch_size,
            eos_token_ids=eos if isinstance(eos, list) else [] if eos is None else [eos],
        )


def cache_features(
    config: TrainingConfig,
    live: FeatureSource,
    sequences: Sequences,
    feature_size: int,
    accelerator: Accelerator,
) -> CachedFeatures:
    """All features, computed on the main process unless an earlier run left them."""
    layers = config.target_layer_ids
    key = hashlib.sha256(sequences.tokens.tobytes() + sequences.offsets.tobytes())
    key.update(f"{fingerprint(config.model)} {layers} {config.max_length} {config.precision}".encode())
    path = (config.cache_dir or config.out / "cache") / f"features-{key.hexdigest()[:16]}.bfloat16"
    with accelerator.main_process_first(), accelerator.autocast():
        cached = CachedFeatures(path, sequences, feature_size, config.max_length)
        if not cached.complete:
            cached.fill(live, accelerator.device)
    return cached


def _load(kind: Any, directory: Path, **options: Any) -> Any:
    try:
        return kind.from_pretrained(directory, **options)
    except (OSError, ValueError) as error:
        raise TrainingError(f"--model: {directory}: {str(error).strip().splitlines()[0]}") from error


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
    model = _load(AutoModelForCausalLM, config.model, dtype=torch.float32)
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
        drafter.save_pretrained(config.out)
        (config.out / "training.json").write_text(
            json.dumps(_provenance(config, state, sequences), indent=2) + "\n"
        )
        measured = (
            f": tokens per step {state['curve'][-1]['beta']} on held-out text" if state["curve"] else ""
        )
        print(f"wrote {config.out}{measured}")
    if writer:
        writer.close()
    accelerator.end_training()


def _provenance(config: TrainingConfig, state: dict[str, Any], sequences: Sequences) -> dict[str, Any]:
    """What ``training.json`` keeps; paths only by name, so that it can be published."""
    settings = dataclasses.asdict(config)
    settings |= {"model": config.model.name, "data": [p.name for p in config.data], "out": config.out.name}
    settings["cache_dir"] = None
    return {
        "settings": settings,
        "steps": state["step"],
        "curve": state["curve"],
        "num_sequences": len(sequences),
        "data_sha256": hashlib.sha256(sequences.tokens.tobytes()).hexdigest(),
        "git_sha": _git_sha(),
        "versions": {n: importlib.metadata.version(n) for n in ("torch", "transformers", "accelerate")},
    }


def _git_sha() -> str | None:
    command = ["git", "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except OSError:  # no git on this machine
        return None
    return done.stdout.strip() or None


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

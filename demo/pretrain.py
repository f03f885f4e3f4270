"""Train the demo's target model from scratch: a tokenizer and a small Llama, on CPU or one GPU.

    python -m demo.pretrain --gsm8k gsm8k_train.jsonl --out build/backbone
    python -m demo.pretrain --gsm8k gsm8k_train.jsonl --out build/backbone --minutes 10

Training takes ``--minutes``, whatever the machine's speed, and the learning rate follows the clock. A
checkpoint is written every few minutes; the same command resumes from it.
"""

import argparse
import json
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from demo.corpus import END_OF_TEXT, dialogue, gsm8k_documents, is_held_out, python_documents
from runtime.core.cli import Parser, at_least, exit_status, positive
from runtime.core.errors import UserError

VOCAB_SIZE = 4096
# Windows of every source on which the loss is measured, at most.
VALIDATION_WINDOWS = 48
SECONDS_PER_CHECKPOINT = 300
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ 'Q: ' + message['content'] + '\\nA:' }}{% else %}"
    "{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
)


def train_tokenizer(documents: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE. Digits are single tokens, so that a number has one spelling."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.Split(Regex(r" {2,}(?= )|\n+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(documents, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END_OF_TEXT)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_model() -> LlamaForCausalLM:
    """A Llama of 18.4 million parameters."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def tokenise(tokenizer: PreTrainedTokenizerFast, documents: list[str]) -> list[NDArray[np.int32]]:
    """Token ids of each document, an end-of-text token before and after. int32 arrays."""
    end = tokenizer.eos_token_id
    batch = tokenizer(documents, add_special_tokens=False)["input_ids"]
    return [np.array([end, *ids, end], dtype=np.int32) for ids in batch]


class WindowSampler:
    """Consecutive windows from documents in shuffled order, epoch after epoch."""

    def __init__(self, documents: list[NDArray[np.int32]], seed: int):
        self.documents = documents
        self.random = np.random.default_rng(seed)
        self.buffer = np.empty(0, dtype=np.int32)

    def next(self, count: int, length: int) -> NDArray[np.int32]:
        """The next ``count`` windows of ``length`` tokens, [count, length] int32."""
        while self.buffer.size < count * length:
            order = self.random.permutation(len(self.documents))
            self.buffer = np.concatenate([self.buffer, *(self.documents[i] for i in order)])
        taken, self.buffer = np.split(self.buffer, [count * length])
        return taken.reshape(count, length)


@dataclass
class Corpus:
    """Windows of each source, and those that are kept from training, [n, length] int32."""

    train: dict[str, WindowSampler]
    validation: dict[str, NDArray[np.int32]]

    @classmethod
    def read(
        cls, tokenizer: PreTrainedTokenizerFast, sources: dict[str, list[str]], window: int, seed: int
    ) -> "Corpus":
        """Raises UserError for a source of which no window is left for training or for validation."""
        samplers, validation = {}, {}
        for name, documents in sources.items():
            train = tokenise(tokenizer, [d for d in documents if not is_held_out(d)])
            held_out = tokenise(tokenizer, [d for d in documents if is_held_out(d)])
            num_train, num_held_out = sum(map(len, train)), sum(map(len, held_out))
            if not train or num_held_out < window:
                raise UserError(
                    f"{name}: the documents that are held out, about one in 50, must have a window of "
                    f"{window} tokens, got {num_held_out:,}, and {num_train:,} for training"
                )
            count = min(VALIDATION_WINDOWS, num_held_out // window)
            validation[name] = np.concatenate(held_out)[: count * window].reshape(count, window)
            samplers[name] = WindowSampler(train, seed)
            print(f"{name}: {num_train:,} training tokens, {num_held_out:,} held out")
        return cls(samplers, validation)

    def windows(self, count: int, length: int) -> Tensor:
        """The windows of a step, a third of them of code: [count, length] int64."""
        num_code = count // 3
        maths = self.train["gsm8k"].next(count - num_code, length)
        code = self.train["python"].next(num_code, length)
        return torch.from_numpy(np.concatenate([maths, code]).astype(np.int64))


@dataclass
class Run:
    """A model in training, and how far it has come.

    elapsed: seconds of training
    curve: losses, one entry every 100 steps
    """

    model: LlamaForCausalLM
    optimizers: list[torch.optim.Optimizer]
    step: int = 0
    elapsed: float = 0.0
    curve: list[dict[str, Any]] = field(default_factory=list)

    def save(self, path: Path) -> None:
        partial = path.with_suffix(".partial")
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step,
            "elapsed": self.elapsed,
            "log": self.curve,
        }
        torch.save(state, partial)
        partial.replace(path)

    def load(self, path: Path) -> None:
        state = torch.load(path, map_location="cpu", weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.elapsed, self.curve = state["step"], state["elapsed"], state["log"]

    def train_step(self, ids: Tensor, learning_rate: float) -> float:
        """One step on windows [n, length] int64; returns its loss in nats a token."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate
        with torch.autocast(ids.device.type, torch.bfloat16):
            loss = self.model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return float(loss.item())

    def evaluate(self, loss: float, corpus: Corpus) -> None:
        """Add the losses of validation to the curve, and print them."""
        self.model.eval()
        losses = {name: validation_loss(self.model, windows) for name, windows in corpus.validation.items()}
        self.model.train()
        rounded = {name: round(value, 3) for name, value in {"train": loss, **losses}.items()}
        self.curve.append({"step": self.step, "minutes": round(self.elapsed / 60, 1), **rounded})
        tqdm.write(json.dumps(self.curve[-1]))


def make_optimizers(model: LlamaForCausalLM, lr: float) -> list[torch.optim.Optimizer]:
    """Muon (Jordan et al., 2024) for the layers' matrices, AdamW for everything else."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "layers" in n]
    chosen = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    return [
        torch.optim.Muon(matrices, lr=lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def learning_rate_factor(progress: float) -> float:
    """Warm-up over 3 % of the run, flat to 40 %, then linear to 2 %."""
    if progress < 0.03:
        return progress / 0.03
    return 1.0 if progress < 0.4 else 0.02 + 0.98 * max(0.0, 1 - progress) / 0.6


@torch.no_grad()
def validation_loss(model: LlamaForCausalLM, windows: NDArray[np.int32]) -> float:
    """Mean cross entropy per token in nats over [n, length] windows."""
    device = model.device
    losses = []
    for start in range(0, len(windows), 8):
        ids = torch.from_numpy(windows[start : start + 8].astype(np.int64)).to(device)
        with torch.autocast(device.type, torch.bfloat16):
            losses.append(model(input_ids=ids, labels=ids).loss.item())
    return float(np.mean(losses))


def main(argv: list[str] | None = None) -> int:
    parser = Parser("pretrain", "demo.pretrain", __doc__)
    parser.add_argument("--gsm8k", type=Path, required=True, help="GSM8K training split, jsonl")
    parser.add_argument("--out", type=Path, required=True, help="directory of the checkpoint")
    parser.add_argument("--minutes", type=positive, default=60, help="training time")
    parser.add_argument("--learning-rate", type=positive, default=3e-3, help="peak")
    parser.add_argument("--batch-size", type=at_least(1), default=12, help="windows a step")
    parser.add_argument("--window", type=at_least(2), default=512, help="tokens a window")
    parser.add_argument("--seed", type=at_least(0), default=0)
    args = parser.parse_args(argv)
    stopped = "interrupted; the same command goes on from its last checkpoint, if there is one"
    return exit_status("pretrain", lambda: pretrain(args), interrupted=stopped)


def pretrain(args: argparse.Namespace) -> int:
    """Train, or go on with a training. Raises UserError for unusable data and an infinite loss."""
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sources = {"gsm8k": gsm8k_documents(args.gsm8k), "python": python_documents()}
    args.out.mkdir(parents=True, exist_ok=True)
    if (args.out / "tokenizer.json").exists():
        tokenizer = PreTrainedTokenizerFast.from_pretrained(args.out)
    else:
        # The maths is far smaller than the library. It is repeated, so that the merges fit both.
        tokenizer = train_tokenizer(sources["gsm8k"] * 3 + sources["python"])
        tokenizer.save_pretrained(args.out)
    corpus = Corpus.read(tokenizer, sources, args.window, args.seed)

    with device:
        model = build_model().train()
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    run, state = Run(model, make_optimizers(model, args.learning_rate)), args.out / "training_state.pt"
    if state.exists():
        run.load(state)
        for sampler in corpus.train.values():
            sampler.random = np.random.default_rng(args.seed + run.step)
    train(run, corpus, args, state)

    model.eval().half().save_pretrained(args.out)
    tokens = run.step * args.batch_size * args.window
    record = {"steps": run.step, "tokens": tokens, "curve": run.curve}
    (args.out / "training.json").write_text(json.dumps(record, indent=1))
    model.float()
    question = "Tom has 3 boxes with 12 apples each. He eats 5. How many are left?"
    prompt = tokenizer(dialogue(question, "").rstrip(), return_tensors="pt").to(device)
    print(tokenizer.decode(model.generate(**prompt, max_new_tokens=128, do_sample=False)[0]))
    return 0


def train(run: Run, corpus: Corpus, args: argparse.Namespace, state: Path) -> None:
    """Train until ``--minutes`` are over, with checkpoints in ``state``."""
    budget, saved = args.minutes * 60, run.elapsed
    with tqdm(total=round(budget), initial=round(run.elapsed), unit="s") as bar:
        while run.elapsed < budget:
            began = time.perf_counter()
            factor = learning_rate_factor(run.elapsed / budget)
            # Short windows first: attention over 512 tokens is a third of a step's time on a CPU.
            fold = 2 if run.elapsed < 0.7 * budget else 1
            ids = corpus.windows(args.batch_size * fold, args.window // fold).to(run.model.device)
            loss = run.train_step(ids, args.learning_rate * factor)
            if not math.isfinite(loss):
                raise UserError(f"the loss is {loss} at step {run.step}; lower --learning-rate")
            run.step += 1
            run.elapsed += time.perf_counter() - began
            bar.n = round(min(run.elapsed, budget))
            bar.set_postfix(step=run.step, loss=f"{loss:.3f}", lr=f"{factor:.2f}")
            if run.step % 100 == 0 or run.elapsed >= budget:
                run.evaluate(loss, corpus)
            if run.elapsed - saved > SECONDS_PER_CHECKPOINT or run.elapsed >= budget:
                run.save(state)
                saved = run.elapsed


if __name__ == "__main__":
    raise SystemExit(main())

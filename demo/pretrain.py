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
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from demo.corpus import END_OF_TEXT, dialogue, gsm8k_documents, is_held_out, python_documents

VOCAB_SIZE = 4096
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


def tokenise(tokenizer: PreTrainedTokenizerFast, documents: list[str]) -> list[np.ndarray]:
    """Token ids of each document, an end-of-text token before and after. int32 arrays."""
    end = tokenizer.eos_token_id
    batch = tokenizer(documents, add_special_tokens=False)["input_ids"]
    return [np.array([end, *ids, end], dtype=np.int32) for ids in batch]


class WindowSampler:
    """Consecutive windows from documents in shuffled order, epoch after epoch."""

    def __init__(self, documents: list[np.ndarray], seed: int):
        self.documents = documents
        self.random = np.random.default_rng(seed)
        self.buffer = np.empty(0, dtype=np.int32)

    def next(self, count: int, length: int) -> np.ndarray:
        """The next ``count`` windows of ``length`` tokens, [count, length] int32."""
        while self.buffer.size < count * length:
            order = self.random.permutation(len(self.documents))
            self.buffer = np.concatenate([self.buffer, *(self.documents[i] for i in order)])
        taken, self.buffer = np.split(self.buffer, [count * length])
        return taken.reshape(count, length)


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
def validation_loss(model: LlamaForCausalLM, windows: np.ndarray) -> float:
    """Mean cross entropy per token in nats over [n, length] windows."""
    device = model.device
    losses = []
    for start in range(0, len(windows), 8):
        ids = torch.from_numpy(windows[start : start + 8].astype(np.int64)).to(device)
        with torch.autocast(device.type, torch.bfloat16):
            losses.append(model(input_ids=ids, labels=ids).loss.item())
    return float(np.mean(losses))


def validation_windows(documents: list[np.ndarray], length: int, count: int) -> np.ndarray:
    stream = np.concatenate(documents)
    count = min(count, stream.size // length)
    return stream[: count * length].reshape(count, length)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gsm8k", type=Path, required=True, help="GSM8K training split, jsonl")
    parser.add_argument("--out", type=Path, required=True, help="directory of the checkpoint")
    parser.add_argument("--minutes", type=float, default=60, help="training time (default 60)")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="peak (default 3e-3)")
    parser.add_argument("--batch-size", type=int, default=12, help="windows a step (default 12)")
    parser.add_argument("--window", type=int, default=512, help="tokens a window (default 512)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)

    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    args.out.mkdir(parents=True, exist_ok=True)
    maths, code = gsm8k_documents(args.gsm8k), python_documents()
    if (args.out / "tokenizer.json").exists():
        tokenizer = PreTrainedTokenizerFast.from_pretrained(args.out)
    else:
        # The maths is far smaller than the library. It is repeated, so that the merges fit both.
        tokenizer = train_tokenizer(maths * 3 + code)
        tokenizer.save_pretrained(args.out)

    samplers, validation = [], {}
    for name, documents in (("gsm8k", maths), ("python", code)):
        train = tokenise(tokenizer, [d for d in documents if not is_held_out(d)])
        held_out = tokenise(tokenizer, [d for d in documents if is_held_out(d)])
        validation[name] = validation_windows(held_out, args.window, 48)
        samplers.append(WindowSampler(train, args.seed))
        print(f"{name}: {sum(map(len, train)):,} training tokens, {sum(map(len, held_out)):,} held out")

    with device:
        model = build_model().train()
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    optimizers = make_optimizers(model, args.learning_rate)
    state_path = args.out / "training_state.pt"
    step, elapsed, log = 0, 0.0, []
    if state_path.exists():
        state = torch.load(state_path, weights_only=True)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        step, elapsed, log = state["step"], state["elapsed"], state["log"]
        for sampler in samplers:
            sampler.random = np.random.default_rng(args.seed + step)

    def save() -> None:
        partial = state_path.with_suffix(".partial")
        torch.save(
            {
                "model": model.state_dict(),
                "optimizers": [o.state_dict() for o in optimizers],
                "step": step,
                "elapsed": elapsed,
                "log": log,
            },
            partial,
        )
        partial.replace(state_path)

    budget = args.minutes * 60
    bar = tqdm(total=round(budget), initial=round(elapsed), unit="s")
    last_saved = elapsed
    while elapsed < budget:
        began = time.perf_counter()
        factor = learning_rate_factor(elapsed / budget)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = args.learning_rate * factor
        # Short windows first: attention over 512 tokens is a third of a step's time on a CPU.
        fold = 2 if elapsed < 0.7 * budget else 1
        count, length = args.batch_size * fold, args.window // fold
        num_code = count // 3
        windows = np.concatenate(
            [samplers[0].next(count - num_code, length), samplers[1].next(num_code, length)]
        )
        ids = torch.from_numpy(windows.astype(np.int64)).to(device)
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step += 1
        elapsed += time.perf_counter() - began
        bar.n = round(min(elapsed, budget))
        bar.set_postfix(step=step, loss=f"{loss.item():.3f}", lr=f"{factor:.2f}")
        if step % 100 == 0 or elapsed >= budget:
            row = {"step": step, "minutes": round(elapsed / 60, 1), "train": round(loss.item(), 3)}
            row |= {k: round(validation_loss(model.eval(), v), 3) for k, v in validation.items()}
            model.train()
            log.append(row)
            tqdm.write(json.dumps(row))
        if elapsed - last_saved > 300:
            save()
            last_saved = elapsed
    save()
    bar.close()

    if any(math.isnan(row["train"]) for row in log):
        raise RuntimeError("training diverged: the loss is NaN; lower --learning-rate")
    model.eval().half().save_pretrained(args.out)
    (args.out / "training.json").write_text(
        json.dumps({"steps": step, "tokens": step * args.batch_size * args.window, "curve": log}, indent=1)
    )
    model.float()
    for question in ("Tom has 3 boxes with 12 apples each. He eats 5. How many are left?",):
        prompt = tokenizer(dialogue(question, "").rstrip(), return_tensors="pt").to(device)
        out = model.generate(**prompt, max_new_tokens=128, do_sample=False)
        print(tokenizer.decode(out[0]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

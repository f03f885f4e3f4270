"""Self-distillation: the target model's own greedy continuations become the training targets.

A draft is accepted when it is what the target model would write, so the model's own text makes the best
labels. Every batch is kept as soon as it is generated, so an interrupted run continues. The file's name
has a hash of everything that the text depends on.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm
from transformers import GenerationConfig

from runtime.jsonl_store import JsonlStore
from training.conversations import Example


class Sequences:
    """Token sequences of varying length: prompt, then continuation.

    ``tokens`` [total] int32, ``offsets`` [n + 1] int64, ``prompt_lengths`` [n] int64.
    """

    def __init__(self, rows: list[tuple[list[int], list[int]]]):
        lengths = [len(prompt) + len(answer) for prompt, answer in rows]
        self.offsets: NDArray[np.int64] = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        flat = [token for prompt, answer in rows for token in (*prompt, *answer)]
        self.tokens: NDArray[np.int32] = np.array(flat, np.int32)
        self.prompt_lengths: NDArray[np.int64] = np.array([len(prompt) for prompt, _ in rows], np.int64)

    def __len__(self) -> int:
        return self.prompt_lengths.size

    def __getitem__(self, index: int) -> NDArray[np.int32]:
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]


def fingerprint(model_dir: Path) -> str:
    """Hash of a model directory's configuration and weights."""
    digest = hashlib.sha256()
    for path in sorted(
        [*model_dir.glob("*.safetensors"), *model_dir.glob("*.bin"), model_dir / "config.json"]
    ):
        digest.update(path.name.encode())
        with path.open("rb") as stream:
            hashlib.file_digest(stream, lambda: digest)  # adds to it
    return digest.hexdigest()


def distill(
    model: Any,
    examples: list[Example],
    *,
    model_fingerprint: str,
    cache_dir: Path,
    max_new_tokens: int,
    batch_size: int,
    eos_token_ids: list[int],
) -> Sequences:
    """Greedy continuations of all prompts, from the cache where it has them."""
    key = hashlib.sha256(model_fingerprint.encode())
    key.update(json.dumps([[e.prompt_ids for e in examples], max_new_tokens, eos_token_ids]).encode())
    answers: dict[int, list[int]] = {}
    store = JsonlStore(
        cache_dir / f"distilled-{key.hexdigest()[:16]}.jsonl",
        {"key": key.hexdigest()},
        lambda batch: answers.update(zip(batch["prompts"], batch["answers"], strict=True)),
        flag="--cache-dir",
    )
    # Batches of like length waste little on padding.
    order = np.argsort([len(e.prompt_ids) for e in examples], kind="stable").tolist()
    left = [index for index in order if index not in answers]
    bar = tqdm(total=len(examples), initial=len(answers), desc="distilling", unit="prompt")
    for start in range(0, len(left), batch_size):
        batch = left[start : start + batch_size]
        prompts = [examples[index].prompt_ids for index in batch]
        found = list(_generate(model, prompts, max_new_tokens, eos_token_ids))
        store.append({"prompts": batch, "answers": found})
        answers.update(zip(batch, found, strict=True))
        bar.update(len(batch))
    bar.close()
    return Sequences([(e.prompt_ids, answers[i]) for i, e in enumerate(examples)])


@torch.no_grad()
def _generate(
    model: Any, prompts: list[list[int]], max_new_tokens: int, eos_token_ids: list[int]
) -> Iterator[list[int]]:
    """Greedy continuations of a batch, each up to and with its first end-of-text token."""
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    # Replaced, because generate() takes from it what a call leaves open, such as a repetition penalty.
    model.generation_config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        num_beams=1,
        eos_token_id=eos_token_ids or None,
        pad_token_id=(eos_token_ids or [0])[0],
    )
    output = model.generate(input_ids=ids.to(model.device), attention_mask=mask.to(model.device))
    for row in output[:, width:].tolist():
        ends = [row.index(token) for token in eos_token_ids if token in row]
        yield row[: min(ends) + 1] if ends else row

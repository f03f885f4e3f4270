"""Self-distillation: the target model's own greedy continuations become the training targets.

A draft is accepted when it is what the target model would write, so the model's own text makes the best
labels. Every batch is kept as soon as it is generated, so an interrupted run continues. The file's name
has a hash of everything that the text depends on.
"""

import hashlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from runtime.core.jsonl_store import JsonlStore
from training.examples import Example


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


class BatchProgress(StoppingCriteria):
    """Moves a progress bar with every token of a batch; it stops nothing.

    A prompt counts as done after its end of text; the rest of a batch, when the batch is done.
    """

    def __init__(self, bar: Any, num_prompts: int, eos_token_ids: list[int]):
        self._bar = bar
        self._eos = torch.tensor(eos_token_ids)
        self._ended = torch.zeros(num_prompts, dtype=torch.bool)
        self._num_tokens = 0
        self._shown = time.perf_counter()

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """input_ids [B, S] -> [B] bool, all False."""
        ended = self._ended | torch.isin(input_ids[:, -1].cpu(), self._eos)
        self._num_tokens += int((~self._ended).sum())
        self._move(int(ended.sum() - self._ended.sum()))
        self._ended = ended
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    def finish(self, num_tokens: int) -> None:
        """The batch is done, with so many tokens."""
        self._num_tokens = num_tokens
        self._move(int((~self._ended).sum()))

    def _move(self, num_prompts: int) -> None:
        self._bar.set_postfix_str(f"{self._num_tokens:,} tokens of this batch", False)
        self._bar.update(num_prompts)
        # Shown also where no prompt has ended yet.
        if time.perf_counter() - self._shown > self._bar.mininterval:
            self._shown = time.perf_counter()
            self._bar.refresh()


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
    # The time left follows from the mean of all batches, because prompts are done many at once.
    bar = tqdm(total=len(examples), initial=len(answers), desc="distilling", unit="prompt", smoothing=0)
    with bar:
        began, num_tokens = time.perf_counter(), 0
        for start in range(0, len(left), batch_size):
            batch = left[start : start + batch_size]
            prompts = [examples[index].prompt_ids for index in batch]
            progress = BatchProgress(bar, len(batch), eos_token_ids)
            found = list(_generate(model, prompts, max_new_tokens, eos_token_ids, progress))
            store.append({"prompts": batch, "answers": found})
            answers.update(zip(batch, found, strict=True))
            progress.finish(sum(map(len, found)))
            num_tokens += sum(map(len, found))
    if left:
        seconds = time.perf_counter() - began
        print(
            f"train: the target model continued {len(left):,} prompts by {num_tokens:,} tokens in "
            f"{seconds:,.1f} s, {num_tokens / seconds:,.1f} tokens/s",
            flush=True,
        )
    return Sequences([(e.prompt_ids, answers[i]) for i, e in enumerate(examples)])


@torch.no_grad()
def _generate(
    model: Any,
    prompts: list[list[int]],
    max_new_tokens: int,
    eos_token_ids: list[int],
    progress: StoppingCriteria,
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
    # Weights that accelerate keeps on disk are on no device, and where the inputs are does not matter then.
    device = torch.device("cpu") if model.device.type == "meta" else model.device
    output = model.generate(
        input_ids=ids.to(device),
        attention_mask=mask.to(device),
        stopping_criteria=StoppingCriteriaList([progress]),
    )
    for row in output[:, width:].tolist():
        ends = [row.index(token) for token in eos_token_ids if token in row]
        yield row[: min(ends) + 1] if ends else row

"""Self-distillation: the target model's own greedy continuations become the training targets.

A draft is accepted when it is what the target model would write, so the model's own text makes the best
labels. Every batch is kept as soon as it is generated, so an interrupted run continues. The file's name
has a hash of everything that the text depends on.
"""

import hashlib
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from runtime.core.jsonl_store import JsonlStore
from training.examples import Example
from training.generation import continue_prompts


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


class BatchProgress:
    """Moves a progress bar with every token of a batch.

    A prompt counts as done after its end of text; the rest of a batch, when the batch is done.
    """

    def __init__(self, bar: Any):
        self._bar = bar
        self._num_ended = 0
        self._shown = time.perf_counter()

    def __call__(self, num_tokens: int, num_ended: int) -> None:
        """So many tokens of the batch are there, and so many of its prompts are done."""
        self._bar.set_postfix_str(f"{num_tokens:,} tokens of this batch", False)
        self._bar.update(num_ended - self._num_ended)
        self._num_ended = num_ended
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
            progress = BatchProgress(bar)
            found = continue_prompts(
                model,
                prompts,
                max_new_tokens=max_new_tokens,
                end_token_ids=eos_token_ids,
                progress=progress,
            )
            store.append({"prompts": batch, "answers": found})
            answers.update(zip(batch, found, strict=True))
            progress(sum(map(len, found)), len(batch))
            num_tokens += sum(map(len, found))
    if left:
        seconds = time.perf_counter() - began
        print(
            f"train: the target model continued {len(left):,} prompts by {num_tokens:,} tokens in "
            f"{seconds:,.1f} s, {num_tokens / seconds:,.1f} tokens/s",
            flush=True,
        )
    return Sequences([(e.prompt_ids, answers[i]) for i, e in enumerate(examples)])

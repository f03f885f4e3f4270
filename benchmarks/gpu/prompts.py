"""What is decoded: prompts, and contexts of any length made of them."""

from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path

from benchmarks.arguments import read_prompt_files
from runtime.core.bundle import Bundle
from runtime.core.errors import UserError
from runtime.core.prompts import Prompt
from runtime.text import PromptTokenizer

# Without --prompts. The answers are long enough to measure, and of different kinds.
DEFAULT_PROMPTS = (
    "Explain how a refrigerator keeps food cold.",
    "A train travels 180 km in 2.5 hours. What is its average speed? Show every step.",
    "Write a Python function that returns the prime numbers below n, and explain it.",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "What are the causes of the seasons on Earth?",
    "List ten tips for a first-time gardener.",
    "Summarise the plot of Romeo and Juliet in five sentences.",
    "Compare TCP and UDP, and say when to use which.",
)


def encoded_prompts(bundle: Bundle, paths: Sequence[Path], limit: int | None) -> list[list[int]]:
    """The token ids of the files' prompts, or of ``DEFAULT_PROMPTS``; the first ``limit`` of every file."""
    files = read_prompt_files(paths, limit) if paths else {}
    found = [prompt for prompts in files.values() for prompt in prompts]
    found = found or [Prompt(text, raw=False) for text in DEFAULT_PROMPTS[:limit]]
    tokenizer = PromptTokenizer(bundle)
    encoded = [tokenizer.encode(prompt.text, raw=prompt.raw) for prompt in found]
    if not all(encoded):
        raise UserError("--prompts: a prompt has no tokens")
    return encoded


def contexts(prompts: Sequence[Sequence[int]], length: int, count: int) -> list[list[int]]:
    """``count`` prompts of ``length`` tokens each: all prompts, one after the other, from another one on."""
    tokens = []
    for first in range(count):
        start = first % len(prompts)
        endless = cycle([*prompts[start:], *prompts[:start]])
        tokens.append(list(islice((token for prompt in endless for token in prompt), length)))
    return tokens

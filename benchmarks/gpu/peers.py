"""Other programs on the same model, where they are installed. Nothing is said of one that did not run."""

import gc
import importlib.util
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.gpu.decoders import Skip
from benchmarks.gpu.job import Job
from benchmarks.gpu.report import Part, cell

# Tokens a second, or None; and how it was measured, or why it was not.
Found = tuple[float | None, str]
# Texts of the same prompt: the first ones compile and capture.
WARMUP_REPEATS, REPEATS = 2, 3
NO_MODEL = "--peer-model was not given"


def measure(job: Job) -> Part:
    """Plain greedy decoding of the first prompt, one text at a time; the first token is left out."""
    # They need the memory.
    job.decoders.close()
    rows: list[list[str]] = [["program", "tokens/s", "note"]]
    data: list[dict[str, Any]] = []
    for name, run in tqdm(PEERS.items(), desc="peers", unit="peer", leave=False):
        try:
            job.check_time()
            speed, note = run(job.peer_model, list(job.prompts[0]), job.max_new_tokens)
        except Skip as skip:
            speed, note = None, str(skip)
        except Exception as error:
            speed, note = None, f"failed: {type(error).__name__}: {error}"
        _free_memory()
        data.append({"program": name, "tokens_per_second": speed, "note": note})
        rows.append([name, "not run" if speed is None else cell(speed, 1), note])
    return Part(tables={"Plain greedy decoding of the first prompt": rows}, data={"rows": data})


def _free_memory() -> None:
    """Give back what a program's model took, for the next program."""
    gc.collect()
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_available():
        sys.modules["torch"].cuda.empty_cache()


def vllm(model_dir: Path | None, prompt: list[int], max_new_tokens: int) -> Found:
    """vLLM's offline engine with its defaults, CUDA graphs among them."""
    if importlib.util.find_spec("vllm") is None:
        return None, "vllm is not installed"
    if model_dir is None:
        return None, NO_MODEL
    library = importlib.import_module("vllm")
    engine = library.LLM(str(model_dir), max_model_len=len(prompt) + max_new_tokens)

    def generate(prompt: Sequence[int], count: int) -> None:
        sampling = library.SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        engine.generate([{"prompt_token_ids": list(prompt)}], sampling, use_tqdm=False)

    return tokens_per_second(generate, prompt, max_new_tokens), f"vllm {library.__version__}"


def hf_plain(model_dir: Path | None, prompt: list[int], max_new_tokens: int, **options: Any) -> Found:
    """``generate`` of Hugging Face transformers, with its growing cache unless the options say otherwise."""
    for name in ("torch", "transformers"):
        if importlib.util.find_spec(name) is None:
            return None, f"{name} is not installed"
    import torch

    if not torch.cuda.is_available():
        return None, f"torch {torch.__version__} finds no CUDA device"
    if model_dir is None:
        return None, NO_MODEL
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype="auto")
    model.to("cuda").eval()

    def generate(prompt: Sequence[int], count: int) -> None:
        ids = torch.tensor([list(prompt)], device="cuda")
        limits = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False}
        with torch.inference_mode():
            model.generate(ids, attention_mask=torch.ones_like(ids), **limits, **options)
        torch.cuda.synchronize()

    speed = tokens_per_second(generate, prompt, max_new_tokens)
    return speed, f"transformers {transformers.__version__}, torch {torch.__version__}"


# The same with a cache of fixed size, for which ``generate`` compiles the step.
hf_static = partial(hf_plain, cache_implementation="static")


def tokens_per_second(generate: Callable[[Sequence[int], int], None], prompt: list[int], count: int) -> float:
    """``generate(prompt, n)`` writes n tokens. What it takes for one token is subtracted.

    One prompt is used, since a program that compiles for every length would compile in the timed runs.
    """
    seconds = 0.0
    for repeat in range(WARMUP_REPEATS + REPEATS):
        times = []
        for number in (count, 1):
            began = time.perf_counter()
            generate(prompt, number)
            times.append(time.perf_counter() - began)
        if repeat >= WARMUP_REPEATS:
            seconds += times[0] - times[1]
    return REPEATS * (count - 1) / seconds


PEERS: dict[str, Callable[[Path | None, list[int], int], Found]] = {
    "Hugging Face generate": hf_plain,
    "Hugging Face generate, static cache, compiled": hf_static,
    "vLLM": vllm,
}

"""Is sampling lossless? Chi-square of sampled continuations against the exact distribution.

    python -m benchmarks.checks.sampling --samples 200000 --out build/sampling_check

A random model of eight tokens and a random draft head go through the exporter and the runtime. Every
continuation of length 3 is drawn with a seed of its own, with the head and without; the exact probabilities
of all 512 are those of PyTorch's logits behind Hugging Face's processors. With the head and without, a
seed's continuation must be the same.
"""

import argparse
import itertools
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, pre_tokenizers
from tqdm import tqdm
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from benchmarks.arguments import Parser, check_out
from drafters.config import DrafterConfig
from drafters.registry import build_drafter
from export.build_engines import build
from export.options import Options
from runtime.cli import at_least, exit_status
from runtime.decoder import SpeculativeDecoder
from runtime.decoding.batch import FixedPlan
from runtime.decoding.sampling import SamplingParams
from runtime.decoding.sequence import Row
from runtime.load import METHODS
from runtime.profiler.environment import versions
from runtime.profiler.files import write_files

VOCAB, LENGTH, NUM_NODES, NUM_ROWS = "abcdefgh", 3, 6, 32
PROMPT = "badcafe"
SETTINGS: dict[str, dict[str, Any]] = {
    "temperature 1": {"temperature": 1.0},
    "temperature 0.7": {"temperature": 0.7},
    "temperature 1, top-k 4": {"temperature": 1.0, "top_k": 4},
    "temperature 1, top-p 0.8": {"temperature": 1.0, "top_p": 0.8},
}
LEAST_P = 0.01


def main(argv: list[str] | None = None) -> int:
    """Command line; 0, 1 when a check fails, 2 for input that cannot be used, 130 for Ctrl-C."""
    return exit_status("sampling_check", lambda: measure(parse_args(sys.argv[1:] if argv is None else argv)))


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = Parser("python -m benchmarks.checks.sampling", __doc__)
    parser.add_argument(
        "--samples",
        type=at_least(1000),
        default=200_000,
        help="continuations a setting (default %(default)s)",
    )
    parser.add_argument("--out", type=Path, required=True, help="directory of sampling_check.json")
    return parser.parse_args(argv)


def measure(args: argparse.Namespace) -> int:
    """Build, draw, compare, print, write."""
    check_out(args.out)
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        model = make_bundle(Path(directory))
        decoders = {
            method: SpeculativeDecoder.from_bundle(
                Path(directory) / "bundle", method=method, num_rows=NUM_ROWS, num_threads=1
            )
            for method in METHODS
        }
        prompt = decoders["vanilla"].prompt_tokenizer.encode(PROMPT, raw=True)
        for name, settings in SETTINGS.items():
            expected = exact(model, prompt, settings)
            drawn = {}
            steps = {}
            for method, decoder in decoders.items():
                drawn[method], steps[method] = draw(
                    decoder, prompt, settings, args.samples, f"{name}, {method}"
                )
            counts = np.bincount(drawn["draft"], minlength=expected.size)
            rows.append(
                {
                    "setting": name,
                    "samples": args.samples,
                    "chi_square_p": chi_square_p(counts, args.samples * expected),
                    "different": int((drawn["draft"] != drawn["vanilla"]).sum()),
                    "steps_saved": 1 - steps["draft"] / steps["vanilla"],
                }
            )
    print("| setting | continuations | p of chi-square | differ with and without drafts | steps saved |")
    print("|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['setting']} | {row['samples']} | {row['chi_square_p']:.3f} | {row['different']} "
            f"| {row['steps_saved']:.0%} |"
        )
    args.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"rows": rows, "versions": versions()}, indent=1) + "\n"
    write_files(args.out, {"sampling_check.json": text})
    return int(any(row["different"] or row["chi_square_p"] <= LEAST_P for row in rows))


def make_bundle(directory: Path) -> LlamaForCausalLM:
    """A random model, whose tokens are letters, and a random head for it, as ``directory / "bundle"``."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(VOCAB),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(directory / "model")
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(VOCAB)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory / "model")
    head = build_drafter(
        DrafterConfig(
            vocab_size=len(VOCAB),
            hidden_size=32,
            intermediate_size=64,
            num_heads=2,
            num_kv_heads=1,
            head_dim=16,
            target_layer_ids=(0, 1),
            base_num_layers=2,
            base_model="model",
            num_frames=4,
            num_candidates=4,
        )
    )
    head.attach_base(model.get_input_embeddings().weight, model.lm_head.weight)
    head.start_from(model.model.norm.weight)
    head.save_pretrained(directory / "head")
    options = Options(top_k=4)
    build(directory / "model", directory / "bundle", drafter_dir=directory / "head", options=options)
    return model


@torch.no_grad()
def exact(model: LlamaForCausalLM, prompt: Sequence[int], settings: dict[str, Any]) -> NDArray[np.float64]:
    """Probabilities of all continuations, [V^L], the first token the most significant digit."""
    processors = LogitsProcessorList([TemperatureLogitsWarper(settings["temperature"])])
    if "top_k" in settings:
        processors.append(TopKLogitsWarper(settings["top_k"]))
    if "top_p" in settings:
        processors.append(TopPLogitsWarper(settings["top_p"]))
    found = torch.ones(1, dtype=torch.float64)
    for length in range(LENGTH):
        prefixes = [[*prompt, *each] for each in itertools.product(range(len(VOCAB)), repeat=length)]
        ids = torch.LongTensor(prefixes)
        logits = model(ids).logits[:, -1].double()
        found = (found[:, None] * processors(ids, logits).softmax(-1)).flatten()
    return found.numpy()


def draw(
    decoder: SpeculativeDecoder, prompt: Sequence[int], settings: dict[str, Any], count: int, name: str
) -> tuple[NDArray[np.int64], int]:
    """The continuations of seeds 0, 1, ... as numbers, and the steps that they took, rows counted singly."""
    batch, plan = decoder.batch, FixedPlan(NUM_NODES)
    batch.clear()
    tokens: list[list[int]] = [[] for _ in range(count)]
    seeds: dict[Row, int] = {}
    steps = 0

    def step() -> None:
        nonlocal steps
        steps += len(batch.rows)
        for row, chunk in batch.step(plan):
            tokens[seeds[row]] += chunk.token_ids
            if chunk.finish_reason:
                del seeds[row]

    for seed in tqdm(range(count), desc=name, leave=False):
        while not batch.has_room:
            step()
        sampling = SamplingParams(**settings, seed=seed)
        row = decoder.row(prompt, max_new_tokens=LENGTH, stop_token_ids=(), sampling=sampling)
        seeds[row] = seed
        batch.admit(row)
        first = batch.read_prompt()
        assert first is not None
        tokens[seed] += first.token_ids
    while batch.rows:
        step()
    places = len(VOCAB) ** np.arange(LENGTH)[::-1]
    return np.array(tokens) @ places, steps


def chi_square_p(found: NDArray[np.int64], expected: NDArray[np.float64]) -> float:
    """The probability of counts at least this far from the expected; cells below 5 are put together.

    0 where something was drawn that cannot be.
    """
    if found[expected == 0].any():
        return 0.0
    rare = expected < 5
    observed, wanted = found[~rare].astype(np.float64), expected[~rare]
    if expected[rare].sum() >= 5:
        observed = np.append(observed, found[rare].sum())
        wanted = np.append(wanted, expected[rare].sum())
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    half = torch.tensor([(wanted.size - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


if __name__ == "__main__":
    raise SystemExit(main())

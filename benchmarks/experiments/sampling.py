"""Compares sampled continuations with the exact distribution, by a chi-square test: sampling is lossless.

    python -m benchmarks.experiments.sampling --samples 200000 --out build/sampling

A random model of eight tokens and a random draft head go through the exporter and the runtime. Every
continuation of length 3 is drawn with a seed of its own, with the head and without; the exact probabilities
of all 512 are those of PyTorch's logits behind Hugging Face's processors. With the head and without, a
seed's continuation must be the same.
"""

import argparse
import itertools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import pre_tokenizers
from tqdm import tqdm
from transformers import (
    LlamaForCausalLM,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from benchmarks.arguments import Parser
from benchmarks.experiments.random_model import random_head, save_random_model
from benchmarks.experiments.step_equality import decode_together
from benchmarks.report import markdown_table, write_report
from export.build_engines import build
from export.options import Options
from runtime.core.bundle import DRAFT, PLAIN
from runtime.core.cli import at_least
from runtime.decode.budget import FixedBudget
from runtime.decode.sampling_params import SamplingParams
from runtime.decoder import SpeculativeDecoder

VOCAB, LENGTH, NUM_NODES, NUM_SEQUENCES = "abcdefgh", 3, 6, 32
PROMPT = "badcafe"
SETTINGS: dict[str, dict[str, Any]] = {
    "temperature 1": {"temperature": 1.0},
    "temperature 0.7": {"temperature": 0.7},
    "temperature 1, top-k 4": {"temperature": 1.0, "top_k": 4},
    "temperature 1, top-p 0.8": {"temperature": 1.0, "top_p": 0.8},
}
LEAST_P = 0.01
METHODS = (DRAFT, PLAIN)


def main(argv: list[str] | None = None) -> int:
    """Command line; 0, 1 when a check fails, 2 for input that cannot be used, 130 for Ctrl-C."""
    parser = Parser("benchmarks.experiments.sampling", __doc__)
    parser.add("--samples", type=at_least(1000), default=200_000, help="continuations a setting")
    parser.add("--out", help="directory of sampling.json")
    return parser.run(measure, argv)


def measure(args: argparse.Namespace) -> int:
    """Build the bundle, check every setting, print and write the table; 1 when a check fails."""
    with tempfile.TemporaryDirectory() as directory:
        model = make_bundle(Path(directory))
        decoders = {
            method: SpeculativeDecoder.from_bundle(
                Path(directory) / "bundle", method=method, max_num_seqs=NUM_SEQUENCES, num_threads=1
            )
            for method in METHODS
        }
        rows = [check(name, model, decoders, args.samples) for name in SETTINGS]
    header = ["setting", "continuations", "p of chi-square", "differ with and without drafts", "steps saved"]
    formats = ("{}", "{}", "{:.3f}", "{}", "{:.0%}")
    lines = [[form.format(value) for form, value in zip(formats, row.values(), strict=True)] for row in rows]
    print(markdown_table(header, lines))
    write_report(args, "sampling.json", {"rows": rows})
    return int(any(row["different"] or row["chi_square_p"] <= LEAST_P for row in rows))


def check(
    name: str, model: LlamaForCausalLM, decoders: dict[str, SpeculativeDecoder], num_samples: int
) -> dict[str, Any]:
    """Compare what the decoders draw in one of ``SETTINGS`` with the model's exact probabilities."""
    prompt = decoders[PLAIN].prompt_tokenizer.encode(PROMPT, raw=True)
    expected = exact(model, prompt, SETTINGS[name])
    drawn, steps = {}, {}
    for method, decoder in decoders.items():
        label = f"{name}, {method}"
        drawn[method], steps[method] = draw(decoder, prompt, SETTINGS[name], num_samples, label)
    counts = np.bincount(drawn[DRAFT], minlength=expected.size)
    return {
        "setting": name,
        "samples": num_samples,
        "chi_square_p": chi_square_p(counts, num_samples * expected),
        "different": int((drawn[DRAFT] != drawn[PLAIN]).sum()),
        "steps_saved": 1 - steps[DRAFT] / steps[PLAIN],
    }


def make_bundle(directory: Path) -> LlamaForCausalLM:
    """Build ``directory / "bundle"`` of a random model, whose tokens are letters, and a random draft head."""
    model = save_random_model(
        directory / "model",
        list(VOCAB),
        pre_tokenizers.Split("", "isolated"),
        vocab_size=len(VOCAB),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.3,
    )
    head = random_head(model, num_frames=4, num_candidates=4)
    head.save_pretrained(directory / "head")
    options = Options(top_k=4)
    build(directory / "model", directory / "bundle", drafter_dir=directory / "head", options=options)
    return model


@torch.no_grad()
def exact(model: LlamaForCausalLM, prompt: Sequence[int], settings: dict[str, Any]) -> NDArray[np.float64]:
    """Return the probabilities of all continuations, [V^L]; the first token is the most significant digit."""
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
    decoder: SpeculativeDecoder, prompt: Sequence[int], settings: dict[str, Any], count: int, label: str
) -> tuple[NDArray[np.int64], int]:
    """Draw a continuation for every seed 0, 1, ...; returns them as numbers [count], and how many steps."""
    sequences = (
        decoder.new_sequence(
            prompt,
            max_new_tokens=LENGTH,
            stop_token_ids=(),
            sampling=SamplingParams(**settings, seed=seed),
        )
        for seed in tqdm(range(count), desc=label, leave=False)
    )
    tokens, num_steps = decode_together(decoder, sequences, FixedBudget(NUM_NODES))
    places = len(VOCAB) ** np.arange(LENGTH)[::-1]
    return np.array(tokens) @ places, num_steps


def chi_square_p(found: NDArray[np.int64], expected: NDArray[np.float64]) -> float:
    """Return the probability of counts at least this far from the expected ones.

    Cells with an expected count below 5 are put together. The result is 0 when something was drawn whose
    probability is zero.
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

"""A draft head in ``generate`` of Transformers against plain ``generate``, token for token, and its speed.

    python -m benchmarks.experiments.hf_generate --bundle build/demo/bundle --model demo/backbone \\
        --head demo/heads/ctc --prompts gsm8k.jsonl --max-prompts 60

Every prompt is decoded by plain ``generate``, with trees and with chains, in turn, and by our own runtime
from the bundle of the same head, whose tokens per step stand beside those in Transformers. How much drafts
can gain depends on the processor, so the times of a pass over one row and of one over a whole tree are
measured too.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, DynamicCache

from benchmarks.arguments import Parser, all_prompts
from integrations.transformers.head import SpeculativeHead
from runtime.core.cli import at_least
from runtime.decode.budget import FixedBudget
from runtime.decoder import SpeculativeDecoder

SHAPES = ("tree", "chain")
PLAIN = "plain"
# Passes that are timed for one figure, after as many that warm up.
NUM_PASSES = 40


def main(argv: list[str] | None = None) -> int:
    """Command line; 0, 1 when a text differs, 2 for input that cannot be used, 130 for Ctrl-C."""
    parser = Parser("benchmarks.experiments.hf_generate", __doc__)
    parser.add("--bundle", "--prompts", "--max-prompts", "--max-new-tokens", "--threads")
    parser.add("--model", type=Path, required=True, help="the model that the bundle was built from")
    parser.add("--head", type=Path, required=True, help="the head that the bundle was built from")
    parser.add("--nodes", type=at_least(1), default=8, help="drafts of a step")
    return parser.run(compare, argv)


@torch.no_grad()
def compare(args: argparse.Namespace) -> int:
    """Decode all prompts and print counts, tokens per step and ratios of times; 1 when an output differs."""
    prompts = all_prompts(args.prompts, args.max_prompts)
    decoder = SpeculativeDecoder.from_bundle(args.bundle, num_threads=args.threads)
    if args.threads:
        torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    heads: dict[str, SpeculativeHead | None] = {PLAIN: None} | {
        shape: SpeculativeHead.from_pretrained(args.head, model, num_nodes=args.nodes, tree=shape)
        for shape in SHAPES
    }
    seconds, equal, steps, tokens = (dict.fromkeys(heads, 0.0) for _ in range(4))
    own_tokens = own_steps = 0

    def generate(name: str, ids: list[int]) -> list[int]:
        inputs = torch.tensor([ids])
        began = time.perf_counter()
        options: dict[str, Any] = {"custom_generate": heads[name]} if heads[name] else {}
        found = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=args.max_new_tokens,
            do_sample=False,
            **options,
        )
        seconds[name] += time.perf_counter() - began
        output: list[int] = found[0, len(ids) :].tolist()
        return output

    for number, prompt in enumerate(tqdm(prompts, unit="prompt")):
        ids = decoder.prompt_tokenizer.encode_prompt(prompt)
        if not number:
            for name in heads:  # the first call compiles the search
                generate(name, ids)
            seconds = dict.fromkeys(heads, 0.0)
        outputs = {name: generate(name, ids) for name in heads}
        for shape in SHAPES:
            head = heads[shape]
            assert head is not None
            equal[shape] += outputs[shape] == outputs[PLAIN]
            tokens[shape] += len(outputs[shape]) - 1
            # A text that ends with its first token has no step.
            steps[shape] += (len(outputs[shape]) - 1) / (head.tokens_per_step or 1)
        chunks = list(decoder.stream(ids, max_new_tokens=args.max_new_tokens, budget=FixedBudget(args.nodes)))
        own_tokens += sum(len(chunk.token_ids) for chunk in chunks[1:])
        own_steps += len(chunks) - 1
    result: dict[str, Any] = {"prompts": len(prompts), "nodes": args.nodes}
    for shape in SHAPES:
        result[f"{shape}_equal"] = int(equal[shape])
        result[f"{shape}_tokens_per_step"] = round(tokens[shape] / max(steps[shape], 1), 3)
        result[f"{shape}_speedup"] = round(seconds[PLAIN] / seconds[shape], 3)
    result["runtime_tokens_per_step"] = round(own_tokens / max(own_steps, 1), 3)
    result["pass_ms"] = {rows: round(pass_ms(model, ids, rows), 2) for rows in (1, args.nodes + 1)}
    print(json.dumps(result))
    return 0 if all(equal[shape] == len(prompts) for shape in SHAPES) else 1


def pass_ms(model: Any, ids: list[int], rows: int) -> float:
    """Milliseconds of the target model's pass over ``rows`` tokens that follow ``ids``: a median."""
    cache = DynamicCache(config=model.config)
    model(input_ids=torch.tensor([ids]), past_key_values=cache)
    row_ids = torch.tensor([ids[-1:] * rows])
    times = []
    for _ in range(2 * NUM_PASSES):
        began = time.perf_counter()
        model(input_ids=row_ids, past_key_values=cache)
        times.append(time.perf_counter() - began)
        cache.crop(-rows)
    return statistics.median(times[NUM_PASSES:]) * 1e3


if __name__ == "__main__":
    raise SystemExit(main())

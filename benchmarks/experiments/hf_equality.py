"""Plain decoding against Hugging Face ``generate`` on the same model, token for token.

    python -m benchmarks.experiments.hf_equality --bundle build/demo/bundle --model demo/backbone \\
        --prompts a.jsonl

The first prompts go through ``generate`` itself. For every prompt, one forward pass of the model
over prompt and output checks that each token is the argmax after the ones before it, which by
induction is what greedy ``generate`` writes, without its hours on a CPU.
"""

import argparse
import json
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from benchmarks.arguments import Parser, all_prompts
from runtime.core.cli import at_least
from runtime.decoder import SpeculativeDecoder
from runtime.profiler.runs import TIE_TOLERANCE


def main(argv: list[str] | None = None) -> int:
    """Command line; 0, 1 when a text differs, 2 for input that cannot be used, 130 for Ctrl-C."""
    parser = Parser("benchmarks.experiments.hf_equality", __doc__)
    parser.add("--bundle", "--prompts", "--max-new-tokens")
    parser.add("--model", type=Path, required=True, help="the model it was built from")
    parser.add("--generate", type=at_least(0), default=10, help="prompts that go through generate itself")
    return parser.run(compare, argv)


@torch.no_grad()
def compare(args: argparse.Namespace) -> int:
    """Decode all prompts, compare the outputs and print the counts; 1 when an output differs."""
    decoder = SpeculativeDecoder.from_bundle(args.bundle, method="plain")
    prompts = all_prompts(args.prompts, None)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    generated_equal, argmax_equal, ties = 0, 0, 0
    for number, prompt in enumerate(tqdm(prompts, unit="prompt")):
        ids = decoder.prompt_tokenizer.encode_prompt(prompt)
        output = [t for c in decoder.stream(ids, max_new_tokens=args.max_new_tokens) for t in c.token_ids]
        if number < args.generate:
            tensor = torch.tensor([ids])
            options = {"max_new_tokens": args.max_new_tokens, "do_sample": False}
            found = model.generate(tensor, attention_mask=torch.ones_like(tensor), **options)
            generated_equal += found[0, len(ids) :].tolist() == output
        logits = model(torch.tensor([ids + output[:-1]])).logits[0, len(ids) - 1 :]
        gaps = logits.max(-1).values - logits.gather(1, torch.tensor(output)[:, None])[:, 0]
        argmax_equal += bool((gaps == 0).all())
        ties += bool((gaps > 0).any() and (gaps <= TIE_TOLERANCE).all())
    result = {
        "prompts": len(prompts),
        "argmax_equal": argmax_equal,
        "ties": ties,
        "generated": min(args.generate, len(prompts)),
        "generated_equal": generated_equal,
    }
    print(json.dumps(result))
    return 0 if argmax_equal + ties == len(prompts) else 1


if __name__ == "__main__":
    raise SystemExit(main())

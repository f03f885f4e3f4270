"""Plain decoding against Hugging Face ``generate`` on the same model, token for token.

    python -m benchmarks.checks.hf_equality --bundle build/demo/bundle --model demo/backbone --prompts a.jsonl

The first prompts go through ``generate`` itself. For every prompt, one forward pass of the model
over prompt and output checks that each token is the argmax after the ones before it, which by
induction is what greedy ``generate`` writes, without its hours on a CPU.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from runtime.decoder import SpeculativeDecoder
from runtime.errors import UserError
from runtime.text.prompts import read_prompts

TIE = 1e-4


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bundle", type=Path, required=True, help="engine bundle directory")
    parser.add_argument("--model", type=Path, required=True, help="the model it was built from")
    parser.add_argument("--prompts", type=Path, nargs="+", required=True, help="jsonl files of prompts")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="default 128")
    parser.add_argument("--generate", type=int, default=10, help="prompts that go through generate itself")
    args = parser.parse_args(argv)
    try:
        decoder = SpeculativeDecoder.from_bundle(args.bundle, method="vanilla")
        prompts = [p for path in args.prompts for p in read_prompts(path)]
    except UserError as error:
        print(f"hf_equality: {error}", file=sys.stderr)
        return 2
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    generated_equal, argmax_equal, ties = 0, 0, 0
    for number, prompt in enumerate(tqdm(prompts, unit="prompt")):
        ids = decoder.prompt_tokenizer.encode(prompt.text, raw=prompt.raw)
        output = [t for c in decoder.stream(ids, max_new_tokens=args.max_new_tokens) for t in c.token_ids]
        with torch.no_grad():
            if number < args.generate:
                tensor = torch.tensor([ids])
                found = model.generate(
                    tensor,
                    attention_mask=torch.ones_like(tensor),
                    max_new_tokens=args.max_new_tokens,
                    do_sample=False,
                )
                generated_equal += found[0, len(ids) :].tolist() == output
            logits = model(torch.tensor([ids + output[:-1]])).logits[0, len(ids) - 1 :]
        gaps = logits.max(-1).values - logits.gather(1, torch.tensor(output)[:, None])[:, 0]
        argmax_equal += bool((gaps == 0).all())
        ties += bool((gaps > 0).any() and (gaps < TIE).all())
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

"""What our runtime makes of prompts with chains, for ``test_in_vllm`` to compare with.

    python -m tests.integrations.vllm.oracle --bundle BUNDLE --draft DRAFT --prompts a.jsonl --out FILE

Runs in the project's own environment, because vLLM's has other versions of the libraries.
"""

import argparse
import json
from pathlib import Path

from runtime.core.prompts import read_prompts
from runtime.decoder import SpeculativeDecoder
from tests.integrations.vllm.drafts import speculative

NEW_TOKENS = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument(
        "--draft", type=Path, required=True, help="draft directory, which says how many drafts"
    )
    parser.add_argument("--prompts", type=Path, nargs="+", required=True)
    parser.add_argument(
        "--max-prompts", type=int, default=20, help="of all files together, equally many of each"
    )
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    num_drafts = speculative(args.draft)["num_speculative_tokens"]
    decoder = SpeculativeDecoder.from_bundle(args.bundle, tree="chain", num_nodes=num_drafts)
    texts = []
    share = -(-args.max_prompts // len(args.prompts))
    for prompt in [prompt for path in args.prompts for prompt in read_prompts(path)[:share]]:
        ids = decoder.prompt_tokenizer.encode(prompt.text, raw=prompt.raw)
        chunks = list(decoder.stream(ids, max_new_tokens=NEW_TOKENS))
        tokens = [token for chunk in chunks for token in chunk.token_ids]
        texts.append({"prompt_ids": list(ids), "token_ids": tokens, "num_steps": len(chunks) - 1})
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(texts), encoding="utf-8")


if __name__ == "__main__":
    main()

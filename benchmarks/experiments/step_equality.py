"""Steps of graphs on a device against steps on the host, token for token.

    python -m benchmarks.experiments.step_equality --bundle build/demo/bundle --prompts a.jsonl --batch 3

    python -m benchmarks.experiments.step_equality --bundle build/torch --reference build/graphs \\
        --prompts a.jsonl --device cpu --batch 3 --contexts 400,920,1950 --max-new-tokens 96

Sequences join as soon as there is room and leave when they end. The host decodes them one at a time. A bundle
of compiled engines cannot be run on the host; ``--reference`` names one of the same model and head that can.
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.arguments import Parser, all_prompts, numbers
from benchmarks.gpu.job import contexts
from runtime.core.cli import at_least
from runtime.decode.budget import NodeBudget
from runtime.decode.sampling_params import GREEDY, SamplingParams
from runtime.decode.sequence import SequenceState
from runtime.decoder import GRAPH_STEP, HOST_STEP, SpeculativeDecoder


def main(argv: list[str] | None = None) -> int:
    """Command line; 0, 1 when a text differs, 2 for input that cannot be used, 130 for Ctrl-C."""
    parser = Parser("benchmarks.experiments.step_equality", __doc__)
    parser.add("--bundle", "--prompts", "--max-new-tokens")
    parser.add("--reference", type=Path, help="bundle for the steps on the host (default: the same)")
    parser.add("--max-prompts", type=at_least(1), help="the first so many of every file")
    parser.add("--batch", type=at_least(1), default=1, help="sequences that decode together on the device")
    parser.add("--num-nodes", type=at_least(1), default=8, help="draft nodes of a step")
    parser.add("--device", help="cpu, or a GPU as cuda:0; by default what the bundle's target runs on")
    parser.add(
        "--contexts",
        type=numbers(at_least(1)),
        help="texts that begin with so many tokens of all prompts, and do not end at stop tokens",
    )
    parser.add("--sampled", action="store_true", help="draw the tokens, with a seed for every prompt")
    return parser.run(compare, argv)


def compare(args: argparse.Namespace) -> int:
    """Decode all prompts twice and print how many outputs are equal; 1 when one is not."""
    prompts = all_prompts(args.prompts, args.max_prompts)
    reference = args.reference or args.bundle
    host = SpeculativeDecoder.from_bundle(reference, step=HOST_STEP, num_nodes=args.num_nodes)
    ids = [host.prompt_tokenizer.encode_prompt(prompt) for prompt in prompts]
    if args.contexts:
        ids = [each for length in args.contexts for each in contexts(ids, length, len(ids))]
    samplings = [
        SamplingParams(temperature=0.8, top_k=50, top_p=0.95, min_p=0.02, seed=seed)
        if args.sampled
        else GREEDY
        for seed in range(len(ids))
    ]

    def decoded(decoder: SpeculativeDecoder) -> list[list[int]]:
        options: dict[str, Any] = {"max_new_tokens": args.max_new_tokens}
        options |= {"stop_token_ids": ()} if args.contexts else {}
        requests = tqdm(list(zip(ids, samplings, strict=True)), unit="prompt")
        sequences = (decoder.new_sequence(each, sampling=sampling, **options) for each, sampling in requests)
        return decode_together(decoder, sequences, decoder.new_budget())[0]

    expected = decoded(host)
    device = SpeculativeDecoder.from_bundle(
        args.bundle,
        step=GRAPH_STEP,
        device=args.device,
        num_nodes=args.num_nodes,
        max_num_seqs=args.batch,
        max_length=max(map(len, ids)) + args.max_new_tokens,
    )
    found = decoded(device)
    equal = sum(a == b for a, b in zip(found, expected, strict=True))
    result = {"prompts": len(ids), "equal": equal, "batch": args.batch, "sampled": args.sampled}
    print(json.dumps(result))
    return 0 if equal == len(ids) else 1


def decode_together(
    decoder: SpeculativeDecoder, sequences: Iterable[SequenceState], budget: NodeBudget
) -> tuple[list[list[int]], int]:
    """The tokens of every sequence and the number of steps; a step of n sequences counts n times."""
    batch = decoder.batch
    batch.clear()
    tokens: dict[SequenceState, list[int]] = {}
    num_steps = 0
    waiting = iter(sequences)
    following = next(waiting, None)
    while following is not None or batch.sequences:
        while following is not None and batch.has_room:
            tokens[following] = list(batch.enter(following).token_ids)
            following = next(waiting, None)
        num_steps += len(batch.sequences)
        for stepped, chunk in batch.step(budget) if batch.sequences else ():
            tokens[stepped] += chunk.token_ids
    return list(tokens.values()), num_steps


if __name__ == "__main__":
    raise SystemExit(main())

"""Steps of graphs on a device against steps on the host, token for token.

    python -m benchmarks.experiments.step_equality --bundle build/demo/bundle --prompts a.jsonl --batch 3

    python -m benchmarks.experiments.step_equality --bundle build/torch --reference build/graphs \\
        --prompts a.jsonl --device cpu --batch 3 --contexts 400,920,1950 --max-new-tokens 96

Sequences join as soon as there is room and leave when they end. The host decodes them one at a time. A bundle
of compiled engines cannot be run on the host; ``--reference`` names one of the same model and head that can.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from benchmarks.arguments import Parser, numbers
from benchmarks.gpu.job import contexts
from runtime.core.cli import at_least
from runtime.core.prompts import read_prompts
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
    prompts = [prompt for path in args.prompts for prompt in read_prompts(path)[: args.max_prompts]]
    reference = args.reference or args.bundle
    host = SpeculativeDecoder.from_bundle(reference, step=HOST_STEP, num_nodes=args.num_nodes)
    ids = [host.prompt_tokenizer.encode_prompt(prompt) for prompt in prompts]
    if args.contexts:
        ids = [each for length in args.contexts for each in contexts(ids, length, len(ids))]
    stop = () if args.contexts else None
    samplings = [
        SamplingParams(temperature=0.8, top_k=50, top_p=0.95, min_p=0.02, seed=seed)
        if args.sampled
        else GREEDY
        for seed in range(len(ids))
    ]
    expected = _decode(host, ids, samplings, args.max_new_tokens, stop)
    device = SpeculativeDecoder.from_bundle(
        args.bundle,
        step=GRAPH_STEP,
        device=args.device,
        num_nodes=args.num_nodes,
        max_num_seqs=args.batch,
        max_length=max(map(len, ids)) + args.max_new_tokens,
    )
    found = _decode(device, ids, samplings, args.max_new_tokens, stop)
    equal = sum(a == b for a, b in zip(found, expected, strict=True))
    result = {"prompts": len(ids), "equal": equal, "batch": args.batch, "sampled": args.sampled}
    print(json.dumps(result))
    return 0 if equal == len(ids) else 1


def _decode(
    decoder: SpeculativeDecoder,
    prompts: Sequence[Sequence[int]],
    samplings: Sequence[SamplingParams],
    max_new_tokens: int,
    stop: tuple[int, ...] | None,
) -> list[list[int]]:
    """The tokens of every prompt's output. stop: tokens that end it; None for the model's"""
    batch, budget = decoder.batch, decoder.new_budget()
    outputs: list[list[int]] = []
    of_sequence: dict[SequenceState, list[int]] = {}
    requests = iter(tqdm(list(zip(prompts, samplings, strict=True)), unit="prompt"))
    batch.clear()
    waiting = True
    while waiting or batch.sequences:
        while waiting and batch.has_room:
            request = next(requests, None)
            if request is None:
                waiting = False
                break
            ids, sampling = request
            sequence = decoder.new_sequence(
                ids, max_new_tokens=max_new_tokens, sampling=sampling, stop_token_ids=stop
            )
            outputs.append(batch.enter(sequence).token_ids)
            of_sequence[sequence] = outputs[-1]
        if batch.sequences:
            for sequence, chunk in batch.step(budget):
                of_sequence[sequence] += chunk.token_ids
    return outputs


if __name__ == "__main__":
    raise SystemExit(main())

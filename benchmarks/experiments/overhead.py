"""What plain decoding costs beyond its engine, and what unused capacity costs.

    python -m benchmarks.experiments.overhead --bundle build/demo/bundle --out build/bench

Two questions, answered in one run, settings taking turns:

* plain decoding through ``SpeculativeDecoder`` against a bare loop over the same graph: fixed
  buffers, one token a pass, nothing else (ratio of medians of ms per token);
* plain decoding with the context limited to 512 and to 4096 positions, the context in use the same.
"""

import argparse
import statistics
import time
from typing import Any

import numpy as np

from benchmarks.arguments import Parser
from benchmarks.report import print_result, write_report
from runtime.core.bundle import Bundle
from runtime.core.cli import at_least
from runtime.decode.load import load_target_model
from runtime.decode.target_model import TargetModel
from runtime.decoder import SpeculativeDecoder

CONTEXT = 64
NEW_TOKENS = 128
WARMUP_ROUNDS = 2
# Positions to which the context is limited; plain decoding's own time is taken with the larger.
LIMITS = (512, 4096)


def bare_loop(target_model: TargetModel, prompt: list[int], count: int) -> float:
    """Return milliseconds per token of the smallest loop that decodes: fixed buffers, three writes a pass."""
    target_model.engine.kv.reserve(len(prompt) + count, 1)
    token = int(target_model.prefill(np.array(prompt), 0).next_tokens[0, 0])
    forward = target_model.engine.forward_pass(B=1, N=1, M=1)
    ids, positions, index = (forward.inputs[n] for n in ("input_ids", "position_ids", "write_index"))
    mask, next_tokens = forward.inputs["attn_mask"], forward.outputs["next_tokens"]
    forward.inputs["logit_indices"][:] = 0
    mask[:] = False
    mask[..., : len(prompt)] = True
    began = time.perf_counter()
    for position in range(len(prompt), len(prompt) + count - 1):
        ids[0, 0] = token
        positions[0, 0] = index[0] = position
        mask[..., position] = True
        forward.run()
        token = int(next_tokens[0, 0])
    return 1000 * (time.perf_counter() - began) / (count - 1)


def decode(decoder: SpeculativeDecoder, prompt: list[int], count: int) -> float:
    """Return milliseconds per token of the decoder's own loop; reading the prompt is not counted."""
    times = [time.perf_counter() for _ in decoder.stream(prompt, max_new_tokens=count, stop_token_ids=())]
    return 1000 * (times[-1] - times[0]) / (count - 1)


def main(argv: list[str] | None = None) -> int:
    """Command line; 0, or 2 for input that cannot be used, 130 for Ctrl-C."""
    parser = Parser("benchmarks.experiments.overhead", __doc__)
    parser.add("--bundle")
    parser.add("--rounds", type=at_least(1), default=15, help="measurements of each")
    parser.add("--out", help="directory of overhead.json")
    return parser.run(measure, argv)


def measure(args: argparse.Namespace) -> int:
    """Measure, write and print the result, and return 0."""
    bundle = Bundle.load(args.bundle)
    bare = load_target_model(bundle, max_nodes=1, features=False)
    decoders = {
        limit: SpeculativeDecoder.from_bundle(args.bundle, method="plain", max_length=limit)
        for limit in LIMITS
    }
    prompt = np.random.default_rng(0).integers(0, bundle.manifest.model.vocab_size, CONTEXT).tolist()
    times: dict[int | str, list[float]] = {"bare": [], **{limit: [] for limit in LIMITS}}
    for _ in range(WARMUP_ROUNDS + args.rounds):
        times["bare"].append(bare_loop(bare, prompt, NEW_TOKENS))
        for limit, decoder in decoders.items():
            times[limit].append(decode(decoder, prompt, NEW_TOKENS))
    times = {name: values[WARMUP_ROUNDS:] for name, values in times.items()}
    bare_ms, small_ms, large_ms = (statistics.median(values) for values in times.values())
    result: dict[str, Any] = {
        "bare_ms_per_token": round(bare_ms, 4),
        "plain_ms_per_token": round(large_ms, 4),
        "plain_over_bare": round(large_ms / bare_ms, 4),
        f"capacity_{LIMITS[1]}_over_{LIMITS[0]}": round(large_ms / small_ms, 4),
        "spread_ms": {str(n): [round(min(v), 4), round(max(v), 4)] for n, v in times.items()},
    }
    write_report(args, "overhead.json", result, bundle=bundle)
    print_result(result)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

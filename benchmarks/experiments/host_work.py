"""What the host does in a captured graph step: everything but the launch, whose work is left out here.

    python -m benchmarks.experiments.host_work --bundle build/demo/bundle

The device is the host, and what it captures does nothing, so what is timed is Python. The driver's own calls,
one to launch and one to wait, are not in it.
"""

import argparse
import json
from collections.abc import Callable
from time import perf_counter

import numpy as np

from benchmarks.arguments import Parser
from runtime.core.bundle import Bundle
from runtime.core.cli import at_least
from runtime.decode.budget import FixedBudget
from runtime.decode.sampling_params import GREEDY, SamplingParams
from runtime.decoder import GRAPH_STEP, SpeculativeDecoder
from runtime.device.device import Device, HostDevice, MakeEngine
from runtime.device.ort import open_ort
from runtime.device.step import GraphStep

SAMPLED = SamplingParams(temperature=0.7, top_p=0.9, seed=1)


class IdleDevice(HostDevice):
    """The host as a device that does nothing when it replays what it captured."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        return lambda: None


def main(argv: list[str] | None = None) -> int:
    """Command line; 2 for input that cannot be used, 130 for Ctrl-C."""
    parser = Parser("benchmarks.experiments.host_work", __doc__)
    parser.add("--bundle")
    parser.add("--steps", type=at_least(1), default=3000, help="steps that are timed")
    parser.add("--num-nodes", type=at_least(1), default=8, help="draft nodes of a step")
    return parser.run(measure, argv)


def measure(args: argparse.Namespace) -> int:
    """Print the microseconds of a step of 1 and of 16 sequences, greedy and sampled."""
    rows = []
    for count in (1, 16):
        for name, sampling in (("greedy", GREEDY), ("sampled", SAMPLED)):
            times = step_times(args, count, sampling)
            found = {q: round(1e6 * float(np.quantile(times, q / 100)), 1) for q in (50, 95)}
            rows.append({"sequences": count, "tokens": name, "p50_us": found[50], "p95_us": found[95]})
            print(json.dumps(rows[-1]))
    return 0


def step_times(args: argparse.Namespace, count: int, sampling: SamplingParams) -> list[float]:
    """Seconds of each step."""

    def open_idle(bundle: Bundle, device: str | None, num_threads: int | None) -> tuple[Device, MakeEngine]:
        return IdleDevice(), open_ort(bundle, device, num_threads)[1]

    decoder = SpeculativeDecoder.from_bundle(
        args.bundle,
        step=GRAPH_STEP,
        max_num_seqs=count,
        max_length=256,
        num_nodes=args.num_nodes,
        opener=open_idle,
    )
    batch, runner = decoder.batch, decoder.batch.runner
    assert isinstance(runner, GraphStep)
    batch.clear()
    for index in range(count):
        options = {"max_new_tokens": 200, "stop_token_ids": (), "sampling": sampling}
        batch.enter(decoder.new_sequence([5 + index, 6, 7], **options))
    # The first step of a kind is not captured, the second is.
    runner.capture = True
    for _ in range(2):
        batch.step(FixedBudget(args.num_nodes))
    times = []
    for _ in range(args.steps):
        began = perf_counter()
        runner.step(batch.sequences, args.num_nodes)
        times.append(perf_counter() - began)
    return times


if __name__ == "__main__":
    raise SystemExit(main())

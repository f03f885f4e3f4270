"""How long short requests wait for their first token beside a long prompt that is being read.

    python -m benchmarks.load.short_beside_long --bundle build/chat/bundle --prompts demo/prompts.jsonl \\
        --long-tokens 6000 --out build/short_beside_long

Requests of one token are asked one after the other: alone first, then while a scheduler reads a prompt of
``--long-tokens``. Each round has another long prompt, of random words; no prefixes are kept. Writes
short_beside_long.json with every time, and prints medians in milliseconds.
"""

import argparse
import random
import statistics
import threading
import time
from collections.abc import Sequence

from tqdm import tqdm

from benchmarks.arguments import Parser, all_prompts
from benchmarks.report import markdown_table, write_report
from runtime.core.cli import at_least
from runtime.core.errors import UserError
from runtime.decoder import SpeculativeDecoder
from runtime.serve.scheduler import Scheduler

# Before the first short request, and at most between two, so that they come at any moment of a chunk.
START_SECONDS, MAX_PAUSE_SECONDS = 0.3, 0.2


def main(argv: list[str] | None = None) -> int:
    parser = Parser("benchmarks.load.short_beside_long", __doc__)
    parser.add("--bundle", "--prompts", "--threads")
    parser.add("--long-tokens", type=at_least(1), default=6000, help="of the long prompt (default 6000)")
    parser.add("--rounds", type=at_least(1), default=3, help="long prompts, one after the other (default 3)")
    parser.add("--alone", type=at_least(1), default=20, help="short requests alone, in a round (default 20)")
    parser.add("--out", help="directory of the report")
    return parser.run(measure, argv)


def measure(args: argparse.Namespace) -> int:
    """Time the requests, write the report and print the table."""
    prompts = all_prompts(args.prompts, None)
    decoder = SpeculativeDecoder.from_bundle(args.bundle, max_num_seqs=4, num_threads=args.threads)
    if args.long_tokens >= decoder.max_length:
        raise UserError(f"--long-tokens: must be less than {decoder.max_length}, got {args.long_tokens}")
    short = [decoder.prompt_tokenizer.encode(prompt.text) for prompt in prompts]
    words = sorted({int(token) for prompt in short for token in prompt})
    alone: list[float] = []
    beside: list[float] = []
    reading: list[float] = []
    with Scheduler(decoder) as scheduler:
        _first_tokens(scheduler, short[:4])
        for number in tqdm(range(args.rounds), desc="rounds", unit="round"):
            alone += _first_tokens(scheduler, [short[index % len(short)] for index in range(args.alone)])
            numbers = random.Random(number)
            long: Sequence[int] = [numbers.choice(words) for _ in range(args.long_tokens)]
            reader = threading.Thread(
                target=lambda given=long: reading.extend(_first_tokens(scheduler, [given]))
            )
            reader.start()
            time.sleep(START_SECONDS)
            index = 0
            while reader.is_alive():
                time.sleep(numbers.uniform(0, MAX_PAUSE_SECONDS))
                beside += _first_tokens(scheduler, [short[index % len(short)]])
                index += 1
            # The last one may have come when the long prompt had been read.
            del beside[-1:]
    if not beside:
        raise UserError(
            f"--long-tokens: must be more, {args.long_tokens} are read before a short request comes"
        )
    result = {"alone_s": alone, "beside_s": beside, "long_prompt_s": reading}
    rows = [
        [name, f"{1e3 * statistics.median(times):.0f}", f"{1e3 * max(times):.0f}"]
        for name, times in (("alone", alone), ("beside", beside))
    ]
    print(markdown_table(["short requests", "median, ms", "longest, ms"], rows))
    ratio = statistics.median(beside) / statistics.median(alone)
    print(f"ratio of medians {ratio:.2f}; long prompt in {statistics.median(reading):.1f} s")
    write_report(args, "short_beside_long.json", result)
    return 0


def _first_tokens(scheduler: Scheduler, prompts: Sequence[Sequence[int]]) -> list[float]:
    """Seconds to the only token of each request, asked one after the other."""
    found = []
    for prompt in prompts:
        begin = time.perf_counter()
        next(scheduler.stream(prompt, max_new_tokens=1))
        found.append(time.perf_counter() - begin)
    return found


if __name__ == "__main__":
    raise SystemExit(main())

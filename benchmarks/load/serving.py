"""Load on a real server: the bundle with its draft head and the same without, in turns.

    python -m benchmarks.load.serving --bundle engines/ --prompts prompts.jsonl --out build/serving
    python -m benchmarks.load.serving --bundle engines/ --prompts prompts.jsonl --servers --out servers
    python -m benchmarks.load.serving --bundle engines/ --prompts prompts.jsonl --conversations 10 --out chats

For every number of streams (closed loop) and every rate (Poisson arrivals): tokens a second, time to the
first token, milliseconds a token, the longest wait between two responses, and whether the texts are the same.
The client runs on the same machine and takes its share of the cores, of both models alike. No prefixes are
reused, because every prompt is sent many times.

With --servers it compares Triton with our own server, in turns, each with the draft head. With
--conversations it measures only conversations of four turns, whose questions are those of the prompts:
the time to the first token of every turn, by a server that keeps keys and values for later prompts and by one
that does not. Every second conversation draws its tokens with a seed.
"""

import argparse
import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from tritonclient.utils import InferenceServerException

from benchmarks.arguments import Parser, all_prompts, numbers
from benchmarks.load.clients import Served, converse, running_server, send
from benchmarks.report import draw, looks, markdown_table, require_matplotlib, write_report
from runtime.core.bundle import Bundle
from runtime.core.cli import AUTO, at_least, positive
from runtime.core.errors import UserError
from runtime.core.options import DEFAULT_PREFIX_CACHE_MB
from runtime.profiler.runs import PLAIN
from triton_repo.triton.server import OWN, TRITON
from triton_repo.triton.tensors import MODEL, PLAIN_MODEL

if TYPE_CHECKING:
    from matplotlib.axes import Axes

METHODS = {"draft": MODEL, PLAIN: PLAIN_MODEL}
SERVERS = (OWN, TRITON)
PERCENTILES = (50, 95, 99)
NUM_TURNS = 4
CONVERSATIONS_HEADER = ["turn", "prompt tokens", "first token ms", "with reused prefixes", "ratio"]
HEADER = [
    "load", "method", "tokens/s", "ratio", "first token ms, p50 / p95 / p99", "ms/token", "longest wait ms",
    "slowest / mean",
]  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Command line; 0, 1 when a text differs, 2 for input that cannot be used, 130 for Ctrl-C."""
    parser = Parser("benchmarks.load.serving", __doc__)
    parser.add("--bundle", help="engine bundle, with a draft head")
    parser.add("--prompts", "--max-prompts", "--threads")
    parser.add("--streams", type=numbers(at_least(1)), default="1,2,4,8,16,32", help="requests at a time")
    parser.add(
        "--rates", type=numbers(positive), default=(), help="requests a second, such as 1,2; default none"
    )
    text = "compare Triton with our own server, and not the draft head with plain decoding"
    parser.add("--servers", action="store_true", help=text)
    text = "measure so many conversations, and nothing else"
    parser.add("--conversations", type=at_least(1), help=text)
    text = "of these conversations, how many are held together (default 1)"
    parser.add("--at-a-time", type=at_least(1), default=1, help=text)
    parser.add("--requests", type=at_least(1), default=32, help="requests a setting, at least")
    parser.add("--max-new-tokens", default=64, help="tokens a request")
    parser.add("--num-nodes", default=AUTO, help="drafts a request and step")
    parser.add(
        "--max-num-seqs", type=at_least(1), default=32, help="requests that the server decodes together"
    )
    parser.add("--out", help="directory of serving.json, serving.md and serving.svg")
    return parser.run(_with_refusals_named, argv)


def _with_refusals_named(args: argparse.Namespace) -> int:
    """``measure``; a prompt that the server refuses, such as one that is too long, is one line."""
    try:
        return measure(args)
    except InferenceServerException as error:
        raise UserError(f"--prompts: the server refuses one of them: {error}") from error


def measure(args: argparse.Namespace) -> int:
    """Send every load to both models, write and print the report; 1 when a text differs."""
    require_matplotlib()
    prompts = all_prompts(args.prompts, args.max_prompts)
    bundle = Bundle.load(args.bundle, verify=False)  # the server verifies the files
    if bundle.manifest.drafter is None:
        raise UserError(f"--bundle: {args.bundle} has no draft head")
    if args.conversations:
        return measure_conversations(args, [prompt.text for prompt in prompts], bundle)
    options = [*_sizes(args), "--max-queue-size", "1000", "--prefix-cache-mb", "0"]
    names = SERVERS if args.servers else tuple(METHODS)
    loads: list[dict[str, Any]] = [{"streams": streams, "rate": None} for streams in args.streams]
    loads += [{"streams": None, "rate": rate} for rate in args.rates]
    rows = []
    texts: dict[int, set[str]] = {}
    with ExitStack() as stack:
        if args.servers:
            started = [
                stack.enter_context(running_server(args.bundle, args.threads, *options, "--server", name))
                for name in names
            ]
            asked = [(server.url, MODEL) for server in started]
        else:
            server = stack.enter_context(running_server(args.bundle, args.threads, *options, "--plain"))
            asked = [(server.url, model) for model in METHODS.values()]
        asks = {
            name: partial(send, url, prompts, max_tokens=args.max_new_tokens, model=model)
            for name, (url, model) in zip(names, asked, strict=True)
        }
        for ask in asks.values():
            asyncio.run(ask(streams=1, count=2))  # warms up
        for load in loads:
            count = max(args.requests, 2 * (load["streams"] or 1))
            for name, ask in asks.items():
                found = asyncio.run(ask(count=count, **load))
                rows.append({"method": name, **load, **summary(found)})
                for served in found:
                    texts.setdefault(served.prompt, set()).add(served.text)
    different = sum(len(found) > 1 for found in texts.values())
    report = {
        "rows": rows,
        "prompts": len(texts),
        "different_texts": different,
        "settings": {
            key: getattr(args, key) for key in ("max_new_tokens", "requests", "num_nodes", "max_num_seqs")
        },
    }
    table = table_text(rows, len(texts), different)
    files_of_out = {"serving.md": table, "serving.svg": plot(rows)}
    write_report(args, "serving.json", report, bundle=bundle, texts=files_of_out)
    print(table)
    return 1 if different else 0


def _sizes(args: argparse.Namespace) -> list[str]:
    """What every server of a run is given."""
    return ["--max-num-seqs", str(args.max_num_seqs), "--num-nodes", args.num_nodes]


def measure_conversations(args: argparse.Namespace, questions: Sequence[str], bundle: Bundle) -> int:
    """Hold the same conversations with both servers, write and print the report; 1 when a text differs."""
    conversations = [
        [questions[(NUM_TURNS * number + turn) % len(questions)] for turn in range(NUM_TURNS)]
        for number in range(args.conversations)
    ]
    found = []
    for megabytes in (0, DEFAULT_PREFIX_CACHE_MB):
        options = [*_sizes(args), "--prefix-cache-mb", str(megabytes)]
        with running_server(args.bundle, args.threads, *options) as server:
            asyncio.run(converse(server.url, [["Hello"]], max_tokens=8))  # warms up
            held = converse(
                server.url, conversations, max_tokens=args.max_new_tokens, at_a_time=args.at_a_time
            )
            found.append(asyncio.run(held))
    rows = []
    for turn in range(NUM_TURNS):
        fresh, reused = ([turns[turn] for turns in served] for served in found)
        rows.append(
            {
                "turn": turn + 1,
                "prompt_tokens": float(np.mean([served.num_input_tokens for served in fresh])),
                "fresh_first_ms": float(np.median([served.first_ms for served in fresh])),
                "reused_first_ms": float(np.median([served.first_ms for served in reused])),
                "different_texts": sum(a.text != b.text for a, b in zip(fresh, reused, strict=True)),
            }
        )
    lines = [
        [
            str(row["turn"]),
            *(f"{row[name]:.0f}" for name in ("prompt_tokens", "fresh_first_ms", "reused_first_ms")),
            f"{row['fresh_first_ms'] / row['reused_first_ms']:.1f}",
        ]
        for row in rows
    ]
    different = int(sum(row["different_texts"] for row in rows))
    same = "all texts are the same" if not different else f"**{different} texts differ**"
    conclusion = f"{len(conversations)} conversations, {args.at_a_time} at a time; {same}."
    table = f"{markdown_table(CONVERSATIONS_HEADER, lines)}\n\n{conclusion}\n"
    counts = {"conversations": len(conversations), "at_a_time": args.at_a_time}
    report = {"rows": rows, **counts, "max_new_tokens": args.max_new_tokens}
    write_report(args, "conversations.json", report, bundle=bundle, texts={"conversations.md": table})
    print(table)
    return 1 if different else 0


def summary(found: Sequence[Served]) -> dict[str, Any]:
    """Summarise one load: tokens per second, percentiles over requests, and how evenly they were served."""
    seconds = max(served.times[-1] for served in found) - min(served.begin for served in found)
    response_ms = [served.response_ms for served in found]
    mean_ms = float(np.mean(response_ms))
    percentiles = {
        name: {
            f"p{p}": float(np.percentile([getattr(served, name) for served in found], p)) for p in PERCENTILES
        }
        for name in ("first_ms", "token_ms", "longest_ms")
    }
    return {
        "requests": len(found),
        "tokens_per_second": sum(served.num_tokens for served in found) / seconds,
        **percentiles,
        # Texts of one response each are served alike.
        "slowest_share": max(response_ms) / mean_ms if mean_ms else 1.0,
    }


def table_text(rows: Sequence[dict[str, Any]], num_texts: int, different: int) -> str:
    """Format the Markdown table; "ratio" is a load's tokens per second over plain decoding's or Triton's."""
    reference = {(row["streams"], row["rate"]): row for row in rows if row["method"] in (PLAIN, TRITON)}
    lines = []
    for row in rows:
        load = f"{row['streams']} streams" if row["streams"] else f"{row['rate']:g} requests/s"
        ratio = row["tokens_per_second"] / reference[row["streams"], row["rate"]]["tokens_per_second"]
        times = [
            " / ".join(f"{row[name][f'p{p}']:.{digits}f}" for p in PERCENTILES)
            for name, digits in (("first_ms", 0), ("token_ms", 1), ("longest_ms", 0))
        ]
        speed = [f"{row['tokens_per_second']:.0f}", f"{ratio:.2f}"]
        lines.append([load, row["method"], *speed, *times, f"{row['slowest_share']:.2f}"])
    same = f"all {num_texts} texts are the same" if not different else f"**{different} texts differ**"
    return markdown_table(HEADER, lines) + f"\n\nOver all loads and all rows {same}.\n"


def plot(rows: Sequence[dict[str, Any]]) -> str:
    """Draw throughput and time to the first token by number of streams, as an SVG text."""
    styles = looks(list(dict.fromkeys(row["method"] for row in rows)))

    def fill(axes: Sequence["Axes"]) -> None:
        for method, style in styles.items():
            shown = [row for row in rows if row["method"] == method and row["streams"]]
            streams = [row["streams"] for row in shown]
            axes[0].plot(streams, [row["tokens_per_second"] for row in shown], **style)
            axes[1].plot(streams, [row["first_ms"]["p50"] for row in shown], **style)
        for axis in axes:
            axis.set_xscale("log", base=2)
            axis.set_xlabel("streams")
            axis.set_ylim(bottom=0)

    return draw(["tokens per second", "time to the first token, ms (median)"], fill, styles)


if __name__ == "__main__":
    raise SystemExit(main())

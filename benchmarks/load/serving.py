"""Load on real Triton servers: one with the draft head, one that decodes plainly, in turns.

    python -m benchmarks.load.serving --bundle engines/ --prompts prompts.jsonl --out build/serving

For every number of streams (closed loop) and every rate (Poisson arrivals): tokens a second, time to the
first token, milliseconds a token, the longest wait between two responses, and whether the texts are the same.
The client runs on the same machine and takes its share of the cores, of both servers alike.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.arguments import Parser, check_out, read_prompt_files, require_matplotlib
from benchmarks.load.clients import Served, closed_loop, poisson
from benchmarks.plot_style import add_legend, looks, panels, svg_text
from runtime.bundle import Bundle
from runtime.cli import at_least, exit_status
from runtime.decoder import AUTO
from runtime.errors import UserError
from runtime.load import METHODS
from runtime.profiler.environment import describe_bundle, machine, versions
from runtime.profiler.files import write_files
from runtime.text.prompts import Prompt
from triton_repo.process import ServerProcess

PERCENTILES = (50, 95, 99)


def main(argv: list[str] | None = None) -> int:
    """Command line; 0, 1 when a text differs, 2 for input that cannot be used, 130 for Ctrl-C."""
    return exit_status("serving", lambda: measure(parse_args(sys.argv[1:] if argv is None else argv)))


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = Parser("python -m benchmarks.load.serving", __doc__)
    add = parser.add_argument
    add("--bundle", type=Path, required=True, help="engine bundle, with a draft head")
    add("--prompts", type=Path, nargs="+", required=True, help="jsonl; turns, question, prompt or text")
    add("--streams", type=_numbers(int), default=(1, 2, 4, 8, 16, 32), help="default 1,2,4,8,16,32")
    add("--rates", type=_numbers(float), default=(), help="requests a second, such as 1,2; default none")
    add("--requests", type=at_least(1), default=32, help="requests a setting, at least (default %(default)s)")
    add("--max-new-tokens", type=at_least(2), default=64, help="tokens a request (default %(default)s)")
    add("--max-prompts", type=at_least(1), help="use the first prompts of every file only")
    add("--num-nodes", default=AUTO, help="drafts a request and step (default %(default)s)")
    add("--max-num-seqs", type=at_least(1), default=32, help="requests at a time (default %(default)s)")
    add("--threads", type=at_least(1), help="threads per engine (default: the available cores)")
    add("--out", type=Path, required=True, help="directory of serving.json, serving.md and serving.svg")
    return parser.parse_args(argv)


def measure(args: argparse.Namespace) -> int:
    """Serve, ask, write, print."""
    require_matplotlib()
    check_out(args.out)
    prompts = [
        prompt for rows in read_prompt_files(args.prompts, args.max_prompts).values() for prompt in rows
    ]
    bundle = Bundle.load(args.bundle, verify=False)  # the servers verify the files
    if bundle.manifest.drafter is None:
        raise UserError(f"--bundle: {args.bundle} has no draft head")
    rows = []
    texts: dict[int, set[str]] = {}
    with ExitStack() as stack:
        urls = {method: stack.enter_context(serving(args, method)) for method in METHODS}
        for url in urls.values():
            _run(url, prompts, args, streams=1, rate=None, count=2)
        loads = [(streams, None) for streams in args.streams] + [(None, rate) for rate in args.rates]
        for streams, rate in loads:
            for method, url in urls.items():
                count = max(args.requests, 2 * (streams or 1))
                found = _run(url, prompts, args, streams=streams, rate=rate, count=count)
                rows.append({"method": method, "streams": streams, "rate": rate, **summary(found)})
                for served in found:
                    texts.setdefault(served.prompt, set()).add(served.text)
    different = sum(len(found) > 1 for found in texts.values())
    report = {
        "rows": rows,
        "prompts": len(texts),
        "different_texts": different,
        "settings": {
            key: getattr(args, key) for key in ("max_new_tokens", "requests", "num_nodes", "num_rows")
        },
        "bundle": describe_bundle(bundle),
        "machine": machine(args.threads),
        "versions": versions(),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    table = table_text(rows, len(texts), different)
    write_files(
        args.out,
        {
            "serving.json": json.dumps(report, indent=1) + "\n",
            "serving.md": table,
            "serving.svg": plot(rows),
        },
    )
    print(table)
    return 1 if different else 0


def _run(
    url: str,
    prompts: Sequence[Prompt],
    args: argparse.Namespace,
    *,
    streams: int | None,
    rate: float | None,
    count: int,
) -> list[Served]:
    common = {"count": count, "max_tokens": args.max_new_tokens}
    if rate is not None:
        return asyncio.run(poisson(url, prompts, rate=rate, seed=0, **common))
    return asyncio.run(closed_loop(url, prompts, streams=streams or 1, **common))


@contextmanager
def serving(args: argparse.Namespace, method: str) -> Iterator[str]:
    """A server of its own; the gRPC address."""
    options = ["--method", method, "--max-num-seqs", str(args.num_rows), "--num-nodes", str(args.num_nodes)]
    options += ["--threads", str(args.threads or 0), "--max-queue-size", "1000"]
    with tempfile.TemporaryDirectory() as directory:
        server = ServerProcess(args.bundle, Path(directory) / "log", *options)
        try:
            if not server.is_ready:
                raise UserError(f"the server cannot load the bundle:\n{server.log.read_text()[-2000:]}")
            yield server.url
        finally:
            server.stop()


def summary(found: Sequence[Served]) -> dict[str, Any]:
    """Of one load: tokens a second over all, percentiles over requests, and how evenly they were served."""
    seconds = max(served.times[-1] for served in found) - min(served.begin for served in found)
    response_ms = np.array([served.response_ms for served in found])
    return {
        "requests": len(found),
        "tokens_per_second": sum(served.num_tokens for served in found) / seconds,
        "first_ms": _percentiles([served.first_ms for served in found]),
        "token_ms": _percentiles([served.token_ms for served in found]),
        "longest_ms": _percentiles([served.longest_ms for served in found]),
        "slowest_share": float(response_ms.max() / response_ms.mean()),
    }


def _percentiles(values: "Sequence[float] | np.ndarray") -> dict[str, float]:
    return {f"p{p}": float(np.percentile(values, p)) for p in PERCENTILES}


def table_text(rows: Sequence[dict[str, Any]], num_texts: int, different: int) -> str:
    """Markdown; the ratio is that of a load's tokens a second to plain decoding's."""
    plain = {(row["streams"], row["rate"]): row for row in rows if row["method"] == "vanilla"}
    lines = [
        "| load | method | tokens/s | ratio | first token ms, p50 / p95 / p99 | ms/token | longest wait ms "
        "| slowest / mean |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        load = f"{row['streams']} streams" if row["streams"] else f"{row['rate']:g} requests/s"
        ratio = row["tokens_per_second"] / plain[row["streams"], row["rate"]]["tokens_per_second"]
        cells = [
            " / ".join(f"{row[name][f'p{p}']:.{digits}f}" for p in PERCENTILES)
            for name, digits in (("first_ms", 0), ("token_ms", 1), ("longest_ms", 0))
        ]
        lines.append(
            f"| {load} | {row['method']} | {row['tokens_per_second']:.0f} | {ratio:.2f} "
            f"| {' | '.join(cells)} | {row['slowest_share']:.2f} |"
        )
    same = f"all {num_texts} texts are the same" if not different else f"**{different} texts differ**"
    return "\n".join(lines) + f"\n\nOver all loads and both methods {same}.\n"


def plot(rows: Sequence[dict[str, Any]]) -> str:
    """Throughput and time to the first token by number of streams."""
    methods = list(dict.fromkeys(row["method"] for row in rows))
    styles = looks(methods)
    with panels(["tokens per second", "time to the first token, ms (median)"]) as (figure, axes):
        for method in methods:
            shown = [row for row in rows if row["method"] == method and row["streams"]]
            streams = [row["streams"] for row in shown]
            axes[0].plot(streams, [row["tokens_per_second"] for row in shown], **styles[method])
            axes[1].plot(streams, [row["first_ms"]["p50"] for row in shown], **styles[method])
        for axis in axes:
            axis.set_xscale("log", base=2)
            axis.set_xlabel("streams")
            axis.set_ylim(bottom=0)
        add_legend(figure, styles)
        return svg_text(figure)


def _numbers(kind: Any) -> Any:
    """An argument type: "1,2,4" -> (1, 2, 4), all above 0."""

    def parse(text: str) -> tuple[Any, ...]:
        try:
            values = tuple(kind(part) for part in text.split(","))
        except ValueError:
            values = ()
        if not values or min(values) <= 0:
            raise argparse.ArgumentTypeError(f"must be numbers above 0, such as 1,2,4; got {text!r}")
        return values

    return parse


if __name__ == "__main__":
    raise SystemExit(main())

"""Tokens per verify step by tree size: the prefix search beside the seed paper's transform.

    python -m benchmarks.acceptance --bundle build/demo/bundle --prompts a.jsonl b.jsonl --out build/bench

Every setting decodes every prompt; each output is compared with plain decoding. Prints a table,
writes acceptance.json and ends with one JSON line.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from runtime.decoder import SpeculativeDecoder
from runtime.errors import UserError
from runtime.measure import measure_runs
from runtime.prompts import read_prompts
from runtime.runs import VANILLA, Run, find_differences


def beta(runs: list[Run]) -> float:
    """Tokens emitted by verify steps, per verify step."""
    return sum(run.num_decoded for run in runs) / sum(len(run.steps) for run in runs)


def measure_file(
    path: Path,
    vanilla: SpeculativeDecoder,
    speculative: dict[str, SpeculativeDecoder],
    args: argparse.Namespace,
) -> list[dict[str, Any]]:
    """One row for every transform and tree size."""
    prompts = [
        vanilla.prompt_tokenizer.encode(p.text, raw=p.raw) for p in read_prompts(path)[: args.max_prompts]
    ]
    rows = []
    for transform, decoder in speculative.items():
        runs = measure_runs(
            vanilla, decoder, prompts, num_nodes=args.num_nodes, max_new_tokens=args.max_new_tokens, warmup=2
        )
        plain = [run for run in runs if run.setting == VANILLA]
        ms_plain = sum(r.decode_ms for r in plain) / sum(r.num_decoded for r in plain)
        different = {(d.setting, d.prompt) for d in find_differences(runs)}
        for num_nodes in args.num_nodes:
            own = [run for run in runs if run.setting == num_nodes]
            ms = sum(r.decode_ms for r in own) / sum(r.num_decoded for r in own)
            rows.append(
                {
                    "prompts": path.stem,
                    "transform": transform,
                    "nodes": num_nodes,
                    "beta": round(beta(own), 3),
                    "gamma": round(ms_plain / ms, 3),
                    "identical": len(prompts) - len({p for s, p in different if s == num_nodes}),
                    "of": len(prompts),
                }
            )
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bundle", type=Path, required=True, help="engine bundle with a draft head")
    parser.add_argument("--prompts", type=Path, nargs="+", required=True, help="jsonl files of prompts")
    parser.add_argument("--num-nodes", type=int, nargs="+", default=[4, 8, 16], help="default 4 8 16")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="default 128")
    parser.add_argument("--max-prompts", type=int, help="default: all")
    parser.add_argument("--out", type=Path, required=True, help="directory for acceptance.json")
    args = parser.parse_args(argv)
    try:
        vanilla = SpeculativeDecoder.from_bundle(args.bundle, method="vanilla")
        speculative = {
            name: SpeculativeDecoder.from_bundle(args.bundle, method="draft", transform=name)
            for name in ("prefix", "paper")
        }
        rows = [row for path in args.prompts for row in measure_file(path, vanilla, speculative, args)]
    except UserError as error:
        print(f"acceptance: {error}", file=sys.stderr)
        return 2
    print("| prompts | transform | nodes | beta | gamma | identical |")
    print("|---|---|---|---|---|---|")
    for r in rows:
        print(
            f"| {r['prompts']} | {r['transform']} | {r['nodes']} | {r['beta']:.2f} | {r['gamma']:.2f} "
            f"| {r['identical']}/{r['of']} |"
        )
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "acceptance.json").write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    print(json.dumps({"rows": rows}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

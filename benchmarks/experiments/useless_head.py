"""Measures what ``auto`` costs where hardly any draft is right.

    python -m benchmarks.experiments.useless_head --bundle build/chat/bundle --prompts a.jsonl --out DIR

The bundle's head drafts as always, and then every draft token is replaced by another one. So the head is as
sure as before, and wrong. One decoder decodes the prompts greedily, plainly and with ``auto`` in turns.
Writes useless_head.json and prints a row for every file: milliseconds a token, how much more ``auto`` takes,
and the share of its steps that drafted.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.arguments import Parser, read_prompt_files
from benchmarks.report import markdown_table, write_report
from runtime.core.bundle import Bundle
from runtime.core.cli import AUTO
from runtime.core.errors import UserError
from runtime.core.token_tree import TokenTree
from runtime.decode.budget import FixedBudget
from runtime.decode.step import HostStep
from runtime.decoder import SpeculativeDecoder, encode_prompts
from runtime.engines.recorder import Recorder
from runtime.profiler.measure import Setting, host_step, measure_runs
from runtime.profiler.report import median_ms_per_token
from runtime.profiler.runs import PLAIN, Run, find_differences

HEADER = ("prompts", "plain, ms a token", "auto", "longer", "steps with drafts")


def main(argv: list[str] | None = None) -> int:
    """Command line; 0, 1 if a text differs from plain decoding, 2 for unusable input, 130 for Ctrl-C."""
    parser = Parser("benchmarks.experiments.useless_head", __doc__)
    parser.add("--bundle", "--prompts", "--max-prompts", "--max-new-tokens", "--repeats", "--threads")
    parser.add("--out", help="directory of useless_head.json")
    return parser.run(measure, argv)


def measure(args: argparse.Namespace) -> int:
    """Decode all prompts in turns, write and print the table."""
    files = read_prompt_files(args.prompts, args.max_prompts)
    bundle = Bundle.load(args.bundle)
    if bundle.manifest.drafter is None:
        raise UserError(f"--bundle: expected one with a draft head, {args.bundle} has none")
    decoder = SpeculativeDecoder.from_bundle(args.bundle, num_threads=args.threads)
    draft_wrong_tokens(host_step(decoder), bundle.manifest.model.vocab_size)
    settings = [Setting(PLAIN, decoder, FixedBudget(0)), Setting(AUTO, decoder)]
    limit = args.max_new_tokens
    rows, num_different = [], 0
    for name, prompts in files.items():
        ids = encode_prompts(decoder, prompts, max_new_tokens=limit, where=f"--prompts: {name}")
        runs = measure_runs(settings, ids, max_new_tokens=limit, repeats=args.repeats, warmup=1)
        plain, auto = ([run for run in runs if run.setting == setting] for setting in (PLAIN, AUTO))
        num_different += len(find_differences(runs))
        if not any(run.num_decoded for run in auto):
            raise UserError(
                f"--prompts: every output of {name} ends with its first token, so no step can be timed"
            )
        plain_ms, auto_ms = median_ms_per_token(plain), median_ms_per_token(auto)
        share = drafted_share(auto)
        rows.append({"prompts": name, "plain_ms": plain_ms, "auto_ms": auto_ms, "drafted_share": share})
    write_report(args, "useless_head.json", {"rows": rows}, bundle=bundle)
    print(markdown_table(HEADER, map(table_row, rows)))
    if num_different:
        print(f"{num_different} texts differ from plain decoding")
    return int(num_different > 0)


def draft_wrong_tokens(step: HostStep, vocab_size: int) -> None:
    """Make a step replace every draft token by the next one of the vocabulary, which is seldom right."""
    propose = step.proposer.propose

    def propose_wrong(last_tokens: Sequence[int], num_nodes: int, recorder: Recorder) -> list[TokenTree]:
        trees = propose(last_tokens, num_nodes, recorder)
        return [
            replace(tree, tokens=np.append(tree.tokens[:1], (tree.tokens[1:] + 1) % vocab_size))
            for tree in trees
        ]

    step.proposer.propose = propose_wrong  # type: ignore[method-assign]


def drafted_share(runs: Sequence[Run]) -> float:
    """The share of the steps that verified drafts."""
    steps = [step for run in runs for step in run.steps]
    return sum(step.num_nodes > step.num_seqs for step in steps) / len(steps)


def table_row(row: Mapping[str, Any]) -> list[str]:
    """A line of the printed table."""
    longer = row["auto_ms"] / row["plain_ms"] - 1
    times = f"{row['plain_ms']:.2f}", f"{row['auto_ms']:.2f}"
    return [row["prompts"], *times, f"{longer:+.1%}", f"{row['drafted_share']:.1%}"]


if __name__ == "__main__":
    raise SystemExit(main())

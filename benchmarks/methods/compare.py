"""The work of ``python -m benchmarks.methods``: build, measure what is missing, write tables and figures."""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.methods.heads import Head, ensure_bundle, find_heads, model_digests
from benchmarks.methods.report import acceptance_by_draft_time, acceptance_by_nodes, main_table, markdown
from benchmarks.methods.runs import (
    RUNS_NAME,
    Journal,
    Record,
    Unit,
    outcome,
    own_plain,
    plain_method,
    prompt_digest,
)
from benchmarks.methods.table import aggregate, by_category, collect, detail, plain_row, ratios, row
from benchmarks.report import require_matplotlib
from export.options import OWN_PASS, VERIFY_PASS, Options
from runtime.core.baselines import SEARCHES
from runtime.core.bundle import Bundle
from runtime.core.prompts import Prompt
from runtime.decode.budget import FixedBudget
from runtime.decode.target_model import TargetModel
from runtime.decoder import SpeculativeDecoder, encode_prompts
from runtime.profiler.arguments import write_files
from runtime.profiler.environment import machine, versions
from runtime.profiler.measure import (
    WARMUP_TOKENS,
    Setting,
    compare_outputs,
    host_step,
    run_in_turns,
)
from runtime.profiler.runs import PLAIN, TIE_TOLERANCE, Run, is_tie

# Arguments that must be equal for two runs to go into one table.
SETTINGS_KEYS = ("drafter_precision", "min_level_probability", "kept_nodes", "nodes", "max_new_tokens")
# Fields of ``Head`` that go into the report, beside its files' digests.
HEAD_KEYS = ("drafter_type", "search", "seed", "params")


class Comparison:
    """The decoders of a comparison: one plain decoder, and one a head.

    Heads whose bundles hold the same graph of the target model share one loaded target model, because the
    same engine loaded twice differs by several percent in speed, more than many heads do. Streams in the
    verify pass have a target model of their own; where they fine-tune it, it also has plain decoding of its
    own.
    """

    def __init__(
        self,
        heads: Sequence[Head],
        bundles: Mapping[str, Path],
        *,
        nodes: Sequence[int],
        max_new_tokens: int,
        num_threads: int | None,
    ):
        """bundles: verified ones, by the heads' labels."""
        first = next((head for head in heads if not head.fine_tunes), heads[0])
        self._bundle = Bundle.load(bundles[first.label], verify=False)
        self._max_new_tokens = max_new_tokens
        self._num_threads = num_threads
        self.plain = self._plain(self._bundle)
        # By method and tree size.
        self._settings = {(PLAIN, 0): Setting(PLAIN, self.plain)}
        # By the plain method with which a method is compared.
        self._bundles = {PLAIN: self._bundle}
        # By the digests of the graph and of its weights, which a fine-tuned model has of its own.
        target_models: dict[tuple[str, ...], TargetModel] = {}
        for head in heads:
            bundle = Bundle.load(bundles[head.label], verify=False)
            files = bundle.manifest.files
            graph = tuple(files[name].sha256 for name in files if name.startswith("backbone.onnx"))
            decoder = SpeculativeDecoder.from_bundle(
                bundle.path,
                search=SEARCHES[head.search],
                num_threads=num_threads,
                target_model=None if head.drafts_in_verify_pass else target_models.get(graph),
                verify=False,
            )
            if not head.drafts_in_verify_pass:
                target_models.setdefault(graph, host_step(decoder).target_model)
            if head.fine_tunes:
                name = own_plain(head.label)
                self._bundles[name] = bundle
                self._settings[name, 0] = Setting(name, self._plain(bundle))
            for count in nodes:
                name = f"{head.label}, {count} nodes"
                self._settings[head.label, count] = Setting(name, decoder, FixedBudget(count))

    def warm_up(self, prompt_ids: Sequence[int]) -> None:
        """Let every setting allocate its buffers before the measurement."""
        run_in_turns([*self._settings.values()], prompt_ids, min(self._max_new_tokens, WARMUP_TOKENS))

    def measure(self, unit: Unit, digest: str, prompt_ids: Sequence[int]) -> Record:
        """Decode one prompt in every setting."""
        turn = unit.prompt + unit.repeat
        runs = run_in_turns([*self._settings.values()], prompt_ids, self._max_new_tokens, turn=turn)
        # Runs by the plain method with which they are compared.
        groups: dict[str, list[Run]] = {}
        for run, (method, _) in zip(runs, self._settings, strict=True):
            plain = plain_method(method, self._bundles)
            groups.setdefault(plain, []).append(replace(run, setting=PLAIN) if method == plain else run)
        differences = {
            difference.setting: difference
            for plain, group in groups.items()
            for difference in compare_outputs(
                self._bundles[plain], [prompt_ids], group, num_threads=self._num_threads
            )
        }
        outcomes = [
            outcome(run, method, nodes, differences.get(run.setting))
            for run, (method, nodes) in zip(runs, self._settings, strict=True)
        ]
        return Record(unit, digest, list(runs[0].token_ids), outcomes)

    def _plain(self, bundle: Bundle) -> SpeculativeDecoder:
        return SpeculativeDecoder.from_bundle(
            bundle.path, method="plain", num_threads=self._num_threads, verify=False
        )


def compare(args: argparse.Namespace, prompts: Mapping[str, Sequence[Prompt]]) -> int:
    """Measure what is missing, write and print the report; 1 for a mismatch that is no tie."""
    require_matplotlib()
    heads = find_heads(args.heads, args.model)
    model = model_digests(args.model)
    settings = describe(args, heads, model)
    journal = Journal(args.out / RUNS_NAME, settings)
    digests = {
        Unit(name, index, repeat): prompt_digest(prompt)
        for name, rows in prompts.items()
        for repeat in range(args.repeats)
        for index, prompt in enumerate(rows)
    }
    missing = [unit for unit, digest in digests.items() if not journal.has(unit, digest)]
    if missing:
        comparison = load(args, heads, model)
        encoded = {
            name: encode_prompts(
                comparison.plain, rows, max_new_tokens=args.max_new_tokens, where=f"--prompts: {name},"
            )
            for name, rows in prompts.items()
        }
        comparison.warm_up(encoded[missing[0].prompts][missing[0].prompt])
        done = len(digests) - len(missing)
        for unit in tqdm(missing, total=len(digests), initial=done, desc="methods", unit="prompt"):
            journal.append(comparison.measure(unit, digests[unit], encoded[unit.prompts][unit.prompt]))
    report = build_report(args, heads, prompts, journal.select(list(digests)))
    report |= {"settings": settings, "command": args.command, "tie_tolerance": TIE_TOLERANCE}
    report |= {"machine": machine(args.threads), "versions": versions()}
    paths = write_files(args.out, texts(report))
    print(main_table(report))
    print("\nwrote " + ", ".join(str(path) for path in paths))
    return check_lossless(report["details"])


def describe(args: argparse.Namespace, heads: Sequence[Head], model: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings that must be equal for two runs to go into one table."""
    here = machine(args.threads)
    return {
        "model": dict(model),
        "heads": {head.label: {"search": head.search, **head.digests} for head in heads},
        **{key: getattr(args, key) for key in SETTINGS_KEYS},
        "threads": here["threads"],
        "cpu": here["cpu"],
        "versions": versions(),
    }


def load(args: argparse.Namespace, heads: Sequence[Head], model: Mapping[str, str]) -> Comparison:
    """Build the bundles that are missing and load all decoders."""
    options = Options(
        drafter_precision=args.drafter_precision, min_level_probability=args.min_level_probability
    )
    # Streams run in the target model's layers, so the precision of the heads is not theirs.
    of_streams = {
        VERIFY_PASS: Options(kept_nodes=args.kept_nodes),
        OWN_PASS: Options(stream_pass=OWN_PASS),
    }
    directory = args.bundles or args.out / "bundles"
    bundles = {
        head.label: ensure_bundle(
            head, args.model, model, directory, of_streams.get(head.stream_pass or "", options)
        )
        for head in heads
    }
    return Comparison(
        heads, bundles, nodes=args.nodes, max_new_tokens=args.max_new_tokens, num_threads=args.threads
    )


def build_report(
    args: argparse.Namespace,
    heads: Sequence[Head],
    prompts: Mapping[str, Sequence[Prompt]],
    records: Sequence[Record],
) -> dict[str, Any]:
    """Return the measured part of ``methods.json``."""
    methods = {head.label: head.method for head in heads}
    details, plain, categories = [], [], {}
    for name, path in zip(prompts, args.prompts, strict=True):
        of_file = [record for record in records if record.unit.prompts == name]
        samples = collect(of_file, name)
        without_drafts = [o for record in of_file for o in record.outcomes if not o.nodes]
        for method in dict.fromkeys(o.method for o in without_drafts):
            plain.append(plain_row(name, [o for o in without_drafts if o.method == method]))
        details += [
            detail(head, count, name, samples[head.label, count]) for head in heads for count in args.nodes
        ]
        largest = {head.label: samples[head.label, args.nodes[-1]] for head in heads}
        found = by_category(largest, methods, read_categories(path))
        if found:
            categories[name] = found
    together = aggregate(details, methods)
    return {
        "rows": [row(found) for found in details],
        "methods": together,
        "ratios": ratios(together, heads[0].method),
        "plain": plain,
        "details": details,
        "categories": categories,
        "heads": [
            {"method": head.label, **{key: getattr(head, key) for key in HEAD_KEYS}, **head.digests}
            for head in heads
        ],
    }


def texts(report: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of all files of OUT by name."""
    return {
        "methods.md": markdown(report),
        "methods.json": json.dumps(report, indent=1, allow_nan=False) + "\n",
        "beta_nodes.svg": acceptance_by_nodes(report["methods"]),
        "beta_draft.svg": acceptance_by_draft_time(report["methods"]),
    }


def read_categories(path: Path) -> list[str | None]:
    """Read the ``category`` of every prompt of a file that ``read_prompts`` accepts."""
    lines = path.read_text(encoding="utf-8-sig").split("\n")
    found = [json.loads(line).get("category") for line in lines if line.strip()]
    return [category if isinstance(category, str) else None for category in found]


def check_lossless(details: Sequence[Mapping[str, Any]]) -> int:
    """Print which outputs are wrong, if any, and return the exit status."""
    wrong = [found for found in details if found["mismatches"]]
    for found in wrong:
        first = next(difference for difference in found["differences"] if not is_tie(difference["logit_gap"]))
        print(
            f"NOT LOSSLESS: {found['method']}, {found['nodes']} nodes, {found['prompts']}: "
            f"{found['mismatches']} outputs differ from plain decoding; prompt {first['prompt'] + 1}: token "
            f"{first['position']} is {first['token']}, plain decoding has {first['plain_token']}",
            file=sys.stderr,
        )
    return 1 if wrong else 0

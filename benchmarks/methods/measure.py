"""Decoding every prompt with plain decoding and all draft heads in turn, each tree size of each."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.methods.heads import Head
from benchmarks.methods.runs import Record, Unit, outcome, own_plain, plain_method
from runtime.core.baselines import SEARCHES
from runtime.core.bundle import Bundle
from runtime.decode.budget import FixedBudget
from runtime.decode.target_model import TargetModel
from runtime.decoder import SpeculativeDecoder
from runtime.profiler.measure import WARMUP_TOKENS, Setting, compare_outputs, host_step, run_in_turns
from runtime.profiler.runs import PLAIN, Run


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

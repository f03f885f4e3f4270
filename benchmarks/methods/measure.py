"""Decoding every prompt with plain decoding and all draft heads in turn, each tree size of each."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.methods.heads import Head
from benchmarks.methods.runs import Record, Unit, outcome
from runtime.bundle import Bundle
from runtime.decoder import SpeculativeDecoder
from runtime.decoding.target_model import TargetModel
from runtime.profiler.differences import compare_outputs
from runtime.profiler.measure import WARMUP_TOKENS, time_run
from runtime.profiler.runs import PLAIN, Run


@dataclass(frozen=True)
class Setting:
    """A method with a tree size; plain decoding has none."""

    method: str
    nodes: int
    decoder: SpeculativeDecoder


class Comparison:
    """All decoders. One plain decoder serves all heads; heads of the same target model's graph share that."""

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
        self._bundle = Bundle.load(bundles[heads[0].label], verify=False)
        self._max_new_tokens = max_new_tokens
        self._num_threads = num_threads
        self.plain = SpeculativeDecoder.from_bundle(
            self._bundle.path, method="vanilla", num_threads=num_threads, verify=False
        )
        self.settings = [Setting(PLAIN, 0, self.plain)]
        # By graph: the same engine loaded twice differs by several percent in speed, more than many heads.
        target_models: dict[str, TargetModel] = {}
        for head in heads:
            bundle = Bundle.load(bundles[head.label], verify=False)
            graph = bundle.manifest.files["backbone.onnx"].sha256
            decoder = SpeculativeDecoder.from_bundle(
                bundle.path,
                transform=head.transform,
                num_threads=num_threads,
                backbone=target_models.get(graph),
                verify=False,
            )
            target_models.setdefault(graph, decoder.batch.backbone)
            self.settings += [Setting(head.label, count, decoder) for count in nodes]

    def warm_up(self, prompt_ids: Sequence[int]) -> None:
        """Let every setting allocate its buffers outside the measurement."""
        for index in range(len(self.settings)):
            self._run(index, prompt_ids, min(self._max_new_tokens, WARMUP_TOKENS))

    def measure(self, unit: Unit, digest: str, prompt_ids: Sequence[int]) -> Record:
        """One prompt in every setting, beginning with another one each time."""
        runs = {
            index: self._run(index, prompt_ids, self._max_new_tokens)
            for index in turns(len(self.settings), unit.prompt + unit.repeat)
        }
        ordered = [runs[index] for index in range(len(self.settings))]
        found = compare_outputs(self._bundle, [prompt_ids], ordered, num_threads=self._num_threads)
        differences = {difference.setting: difference for difference in found}
        return Record(
            unit=unit,
            digest=digest,
            token_ids=list(ordered[0].token_ids),
            outcomes=[
                outcome(run, setting.method, setting.nodes, differences.get(run.setting))
                for run, setting in zip(ordered, self.settings, strict=True)
            ],
        )

    def _run(self, index: int, prompt_ids: Sequence[int], max_new_tokens: int) -> Run:
        """One prompt in ``settings[index]``; 0 is plain decoding, the others have their index in the run."""
        setting = self.settings[index]
        if index:
            setting.decoder.num_nodes = setting.nodes
        return time_run(setting.decoder, index or PLAIN, 0, prompt_ids, max_new_tokens)


def turns(count: int, number: int) -> Iterator[int]:
    """The order of ``count`` settings in turn ``number``: a rotation.

    Neighbouring turns begin far apart, so that a few prompts already spread over the whole cycle.
    Example: 5 settings begin with 0, 3, 1, 4, 2, 0, ...
    """
    stride = next(s for s in range(max(1, round(count * 0.618)), count + 1) if math.gcd(s, count) == 1)
    first = number * stride % count
    return ((first + index) % count for index in range(count))

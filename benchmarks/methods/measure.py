"""Decoding every prompt with plain decoding and all draft heads in turn, each tree size of each."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.methods.heads import PLAIN, Head
from benchmarks.methods.runs import Record, Unit, outcome
from runtime.bundle import Bundle
from runtime.decoder import SpeculativeDecoder
from runtime.decoding.target_model import TargetModel
from runtime.errors import RequestError, UserError
from runtime.profiler.measure import WARMUP_TOKENS, time_run
from runtime.profiler.runs import VANILLA, Run, find_differences
from runtime.profiler.ties import logit_gaps
from runtime.text.prompts import Prompt


@dataclass(frozen=True)
class Setting:
    """A method with a tree size; plain decoding has none."""

    method: str
    nodes: int
    decoder: SpeculativeDecoder


class Comparison:
    """All decoders. One plain decoder serves all heads, and those with the same backbone graph share it."""

    def __init__(
        self,
        heads: Sequence[Head],
        bundles: Mapping[str, Path],
        *,
        nodes: Sequence[int],
        max_new_tokens: int,
        num_threads: int | None,
    ):
        """bundles: by the heads' labels. Raises UserError for one that cannot be loaded."""
        self._bundle = Bundle.load(bundles[heads[0].label], verify=False)
        self._max_new_tokens = max_new_tokens
        self._num_threads = num_threads
        plain = SpeculativeDecoder.from_bundle(
            self._bundle.path, method="vanilla", num_threads=num_threads, verify=False
        )
        self.settings = [Setting(PLAIN, 0, plain)]
        # By graph: the same engine loaded twice differs by several percent in speed, more than many heads.
        backbones: dict[str, TargetModel] = {}
        for head in heads:
            bundle = Bundle.load(bundles[head.label])
            graph = bundle.manifest.files["backbone.onnx"].sha256
            decoder = SpeculativeDecoder.from_bundle(
                bundle.path,
                transform=head.transform,
                num_threads=num_threads,
                backbone=backbones.get(graph),
                verify=False,
            )
            backbones.setdefault(graph, decoder.batch.backbone)
            self.settings += [Setting(head.label, count, decoder) for count in nodes]

    def encode(self, name: str, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Token ids of a file's prompts. Raises UserError for one that cannot be served."""
        decoder = self.settings[0].decoder
        encoded = []
        for number, prompt in enumerate(prompts, 1):
            try:
                token_ids = decoder.prompt_tokenizer.encode(prompt.text, raw=prompt.raw)
                # Checks its arguments when called; nothing runs until it is iterated.
                decoder.stream(token_ids, max_new_tokens=self._max_new_tokens)
            except RequestError as error:
                raise UserError(f"--prompts: {name}, prompt {number}: {error}") from error
            encoded.append(token_ids)
        return encoded

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
        differences = find_differences(ordered)
        gaps = logit_gaps(self._bundle, [prompt_ids], ordered, differences, num_threads=self._num_threads)
        found = {d.setting: (d, gap) for d, gap in zip(differences, gaps, strict=True)}
        return Record(
            unit=unit,
            digest=digest,
            token_ids=list(ordered[VANILLA].token_ids),
            outcomes=[
                outcome(run, setting.method, setting.nodes, *found.get(index, (None, None)))
                for index, (run, setting) in enumerate(zip(ordered, self.settings, strict=True))
            ],
        )

    def _run(self, index: int, prompt_ids: Sequence[int], max_new_tokens: int) -> Run:
        """``Run.setting`` is the setting's index, plain decoding's is ``VANILLA``; a single prompt, 0."""
        setting = self.settings[index]
        if index != VANILLA:
            setting.decoder.num_nodes = setting.nodes
        return time_run(setting.decoder, index, 0, prompt_ids, max_new_tokens)


def turns(count: int, number: int) -> Iterator[int]:
    """The order of ``count`` settings in turn ``number``: a rotation.

    Neighbouring turns begin far apart, so that a few prompts already spread over the whole cycle.
    Example: 5 settings begin with 0, 3, 1, 4, 2, 0, ...
    """
    stride = next(s for s in range(max(1, round(count * 0.618)), count + 1) if math.gcd(s, count) == 1)
    first = number * stride % count
    return ((first + index) % count for index in range(count))

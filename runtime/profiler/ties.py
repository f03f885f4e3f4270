"""Is a difference between two greedy outputs a tie? The backbone is asked again, with its logits."""

from collections.abc import Sequence

import numpy as np

from runtime.bundle import Bundle
from runtime.decoding.target_model import TargetModel
from runtime.load import load_target_model
from runtime.profiler.runs import VANILLA, Difference, Run


def tie_gap(backbone: TargetModel, prefix: Sequence[int], candidates: tuple[int, int]) -> float:
    """How far the worse of two candidate tokens is below the best logit after ``prefix``.

    When the candidates are the two best tokens, this is the gap between the two best logits; it
    is larger, never smaller, when one of them is not.
    """
    token_ids = np.asarray(prefix, dtype=np.int64)
    for start in range(0, token_ids.size, backbone.prefill_chunk_size):
        chunk = token_ids[start : start + backbone.prefill_chunk_size]
        verdict = backbone.prefill(chunk, start, logits=True)
    assert verdict.logits is not None
    logits = verdict.logits[0].astype(np.float64)
    return float(logits.max() - logits[list(candidates)].min())


def logit_gaps(
    bundle: Bundle,
    prompts: Sequence[Sequence[int]],
    runs: Sequence[Run],
    differences: Sequence[Difference],
    *,
    num_threads: int | None = None,
) -> list[float | None]:
    """``tie_gap`` at each difference; None where one of the outputs has ended, which is no tie."""
    if not differences:
        return []
    outputs = {run.prompt: run.token_ids for run in reversed(runs) if run.setting == VANILLA}
    backbone = load_target_model(bundle, max_nodes=1, features=False, num_threads=num_threads)
    gaps: list[float | None] = []
    for difference in differences:
        vanilla, speculative = difference.vanilla_token, difference.speculative_token
        if vanilla is None or speculative is None:
            gaps.append(None)
            continue
        prefix = [*prompts[difference.prompt], *outputs[difference.prompt][: difference.position]]
        gaps.append(tie_gap(backbone, prefix, (vanilla, speculative)))
    return gaps

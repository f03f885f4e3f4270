"""Scores of tokens: their log-probabilities, the best tokens, and those of a prompt."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.core.errors import RequestError
from runtime.decode.acceptance import score_tokens
from runtime.decode.batch import SCORED_CHUNK
from runtime.decode.sampling_params import MAX_TOP_LOG_PROBS, SamplingParams
from runtime.decode.sequence import Piece
from runtime.decoder import SpeculativeDecoder

NUM_TOP = 3
SCORED = SamplingParams(log_probs=True, top_log_probs=NUM_TOP)


def test_log_probabilities_and_the_best_tokens() -> None:
    logits = np.random.default_rng(0).normal(0, 3, (5, 40)).astype(np.float32)
    for row, token, score in zip(logits, range(5), score_tokens(logits, range(5), NUM_TOP), strict=True):
        probs = np.exp(row.astype(np.float64))
        assert np.exp(score.log_prob) == pytest.approx(probs[token] / probs.sum())
        assert [best for best, _ in score.top] == np.argsort(-row)[:NUM_TOP].tolist()
        assert [value for _, value in score.top] == pytest.approx(
            np.log(np.sort(probs)[::-1] / probs.sum())[:3]
        )


def test_extremes() -> None:
    (score,) = score_tokens(np.array([[1e4, 0, 0]], np.float32), [0], 2)
    assert score.log_prob == 0
    assert score.top == ((0, 0.0), (1, -1e4))  # of equal tokens, the first
    (score,) = score_tokens(np.zeros((1, 3), np.float32), [2], 0)
    assert score.top == ()


def pieces_of(decoder: SpeculativeDecoder, prompt: list[int], count: int, **options: Any) -> list[Piece]:
    """The prompt's pieces, if there are any, and the output's."""
    first, *rest = decoder.stream(prompt, max_new_tokens=count, stop_token_ids=(), **options)
    return [*first.prompt, *first.pieces, *(piece for chunk in rest for piece in chunk.pieces)]


# A fixed number of nodes, because which tokens are drafted is compared, too.
@pytest.mark.parametrize(("method", "num_nodes"), [("draft", 4), ("plain", None)])
def test_a_text_as_a_prompt_has_the_scores_that_it_was_written_with(
    tiny_bundle_dir: Path, method: str, num_nodes: int | None
) -> None:
    decoder = SpeculativeDecoder.from_bundle(
        tiny_bundle_dir, method=method, num_nodes=num_nodes, num_threads=1
    )
    prompt = decoder.prompt_tokenizer.encode("How many?", raw=True)
    count = 2 * SCORED_CHUNK
    written = pieces_of(decoder, prompt, count, sampling=SCORED)
    text = [*prompt, *(piece.token_id for piece in written)]
    read = pieces_of(decoder, text, 0, sampling=SCORED, prompt_log_probs=True)
    assert [piece.token_id for piece in read] == text
    assert "".join(piece.text for piece in read) == decoder.prompt_tokenizer.tokenizer.decode(text)
    assert (read[0].log_prob, read[0].top) == (None, ())
    for new, old in zip(read[len(prompt) :], written, strict=True):
        assert new.log_prob == pytest.approx(old.log_prob, abs=1e-4)
        assert [token for token, _ in new.top] == [token for token, _ in old.top]
        assert new.top[0][1] == pytest.approx(new.log_prob, abs=1e-4)  # it was greedy
    # A scored prompt changes nothing in what follows.
    assert (
        pieces_of(decoder, prompt, 20, sampling=SCORED, prompt_log_probs=True)[len(prompt) :] == written[:20]
    )
    (chunk,) = decoder.stream(prompt, max_new_tokens=0, prompt_log_probs=True)
    assert (chunk.pieces, chunk.finish_reason, len(chunk.prompt)) == ((), "length", len(prompt))
    half = [*prompt, decoder.prompt_tokenizer.encode("é", raw=True)[0]]
    (chunk,) = decoder.stream(half, max_new_tokens=0, prompt_log_probs=True)
    assert "".join(piece.text for piece in chunk.prompt) == "How many?\ufffd"


def test_what_cannot_be_scored(tiny_bundle_dir: Path) -> None:
    plain = SpeculativeDecoder.from_bundle(tiny_bundle_dir, method="plain", num_threads=1)
    with pytest.raises(RequestError, match="max_new_tokens: must be at least 1, got 0"):
        plain.stream([5], max_new_tokens=0)
    most = MAX_TOP_LOG_PROBS
    with pytest.raises(RequestError, match=f"top_log_probs: must be between 0 and {most}, got {most + 1}"):
        SamplingParams(top_log_probs=most + 1)
    plain.batch.runner.scores_prompts = False  # as on a device
    with pytest.raises(RequestError, match="prompt_log_probs: is not supported by graph steps and streams"):
        plain.stream([5], max_new_tokens=1, prompt_log_probs=True)

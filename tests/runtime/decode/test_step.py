"""One decode step on fakes: the text is the target model's own, whatever is drafted and padded."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from runtime.core.errors import CacheMemoryError
from runtime.core.token_tree import TokenTree
from runtime.decode.acceptance import Acceptance, TokenScore, score_tokens
from runtime.decode.budget import FixedBudget
from runtime.decode.proposers.base import NoProposer
from runtime.decode.sampling_params import GREEDY, SamplingParams
from runtime.decode.step import StepResult, step_result
from runtime.engines.kv_cache import SlabKVCache
from runtime.engines.protocol import Features
from runtime.engines.recorder import STAGES, StageRecorder, recording
from tests.fake_engines import LANGUAGE, FakeForwardPass
from tests.fakes import FakeDecoder, OracleProposer, chunks_of, known_texts, make_tree, token_ids

NEW_TOKENS = 60
PROMPTS = [[5], [7, 8, 9], list(range(40, 80)), [3] * 11]
SAMPLING = {
    "greedy": GREEDY,
    "warm": SamplingParams(temperature=1.0, seed=5),
    "penalised": SamplingParams(temperature=0.8, repetition_penalty=1.2, frequency_penalty=0.5, seed=6),
}
# Powers of two, of which the largest is smaller than the longest prompt.
BUCKETS = {"N": (2, 4, 8, 16, 32), "M": (2, 4, 8, 16, 32)}


@pytest.mark.parametrize("sampling", SAMPLING.values(), ids=SAMPLING)
@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: f"{len(prompt)} tokens")
@pytest.mark.parametrize("buckets", [None, BUCKETS], ids=["exact", "buckets"])
def test_accepted_branches_are_lossless(
    prompt: list[int], sampling: SamplingParams, buckets: dict[str, Sequence[int]] | None
) -> None:
    """Long accepted paths through scattered nodes: every commit moves positions."""
    expected = LANGUAGE.continuation(prompt, NEW_TOKENS, sampling)
    oracle = OracleProposer(known_texts([prompt + expected]), seed=len(prompt))
    decoder = FakeDecoder(oracle, buckets=buckets, num_nodes=16)
    chunks = chunks_of(decoder, prompt, NEW_TOKENS, sampling=sampling)
    assert token_ids(chunks) == expected
    assert len(chunks) < 0.6 * NEW_TOKENS
    # The proposer was told of every token that became context, in order: all but the last of the text, and
    # perhaps more than was wanted of the last step's.
    (told,) = oracle.ended
    assert told[: len(prompt) + NEW_TOKENS - 1] == (prompt + expected)[:-1]


@pytest.mark.parametrize("sampling", SAMPLING.values(), ids=SAMPLING)
@pytest.mark.parametrize("num_nodes", [0, 1, 3])
def test_few_nodes_and_none(num_nodes: int, sampling: SamplingParams) -> None:
    for prompt in PROMPTS:
        expected = LANGUAGE.continuation(prompt, 30, sampling)
        chunks = chunks_of(FakeDecoder(num_nodes=num_nodes), prompt, 30, sampling=sampling)
        assert token_ids(chunks) == expected
        if not num_nodes:
            assert [len(chunk.pieces) for chunk in chunks] == [1] * 30


def test_a_step_is_padded_to_a_bucket() -> None:
    decoder = FakeDecoder(buckets=BUCKETS)
    chunks_of(decoder, PROMPTS[1], NEW_TOKENS)
    first, *steps = decoder.engine.passes
    assert (first["N"], first["M"]) == (4, 2)
    assert {axes["N"] for axes in steps} <= set(BUCKETS["N"])
    assert any(axes["N"] == 16 for axes in steps)
    assert all(axes["N"] == axes["M"] for axes in steps)


def test_a_pass_is_as_wide_as_its_widest_tree() -> None:
    decoder = FakeDecoder(num_nodes=5)
    with recording(decoder.runner, StageRecorder()) as recorder:
        chunks_of(decoder, PROMPTS[1], NEW_TOKENS)
    _, *steps = decoder.engine.passes
    assert [axes["N"] for axes in steps] == [step.num_nodes for step in recorder.steps]
    assert max(axes["N"] for axes in steps) == 6


@pytest.mark.parametrize("chunk_size", [1, 3, 16, 41, 512])
@pytest.mark.parametrize("buckets", [None, BUCKETS], ids=["exact", "buckets"])
def test_a_prompt_in_chunks_gives_the_same(chunk_size: int, buckets: dict[str, Sequence[int]] | None) -> None:
    prompt = list(range(100, 141))
    oracle = OracleProposer()
    decoder = FakeDecoder(oracle, prefill_chunk_size=chunk_size, buckets=buckets)
    # The same chunks, not only the same tokens: the draft head has read the same context.
    assert [chunk.token_ids for chunk in chunks_of(decoder, prompt, 40)] == [
        chunk.token_ids for chunk in chunks_of(FakeDecoder(), prompt, 40)
    ]
    assert max(axes["N"] for axes in decoder.engine.passes) <= max(chunk_size, 32)


def test_the_context_grows_across_buckets_of_the_cache() -> None:
    prompt = np.random.default_rng(1).integers(2, 250, 50).tolist()
    decoder = FakeDecoder()
    assert token_ids(chunks_of(decoder, prompt, 250)) == LANGUAGE.continuation(prompt, 250)
    assert len({axes["S"] for axes in decoder.engine.passes}) > 2


def test_the_end_of_the_context() -> None:
    """The last token that fits, with trees that reach beyond it."""
    prompt = np.random.default_rng(2).integers(2, 250, 490).tolist()
    assert token_ids(chunks_of(FakeDecoder(num_nodes=40), prompt, 22)) == LANGUAGE.continuation(prompt, 22)


def test_without_memory_for_a_large_tree_nothing_is_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step fails before the draft, so that it can be repeated: the head has not moved on."""
    prompt = list(range(5, 90))
    decoder = FakeDecoder(num_nodes=60)
    batch, kv = decoder.batch, decoder.engine.kv
    batch.enter(decoder.new_sequence(prompt, max_new_tokens=200, stop_token_ids=()))
    batch.step(FixedBudget(2))
    while batch.sequences[0].length + 61 <= kv.capacity:
        batch.step(FixedBudget(2))
    drafts: list[int] = []
    propose = decoder.runner.proposer.propose

    def noted(last_tokens: Sequence[int], num_nodes: int, *args: Any) -> list[TokenTree]:
        drafts.append(num_nodes)
        return propose(last_tokens, num_nodes, *args)

    def refuse(capacity: int) -> NDArray[np.float32]:
        raise MemoryError

    monkeypatch.setattr(decoder.runner.proposer, "propose", noted)
    with monkeypatch.context() as patch:
        patch.setattr(kv, "_allocate", refuse)
        with pytest.raises(CacheMemoryError):
            batch.step(FixedBudget(60))
    assert not drafts
    batch.step(FixedBudget(60))
    assert drafts == [60]


def test_features_of_the_accepted_path_are_selected() -> None:
    blocks = [
        np.arange(12, dtype=np.float32).reshape(6, 2),
        np.arange(20, 26, dtype=np.float32).reshape(3, 2),
    ]
    chosen = Features(blocks).select([np.array([0, 2, 5]), np.array([0])]).to_host()
    assert [block.tolist() for block in chosen] == [[[0, 1], [4, 5], [10, 11]], [[20, 21]]]


def test_plain_steps_tell_the_proposer_of_the_context() -> None:
    """A draft after plain steps knows all of the text."""
    oracle = OracleProposer()
    decoder = FakeDecoder(oracle)
    batch, prompt = decoder.batch, PROMPTS[2]
    sequence = decoder.new_sequence(prompt, max_new_tokens=40, stop_token_ids=())
    batch.enter(sequence)
    for _ in range(7):
        batch.step(FixedBudget(0))
    assert oracle.contexts[0] == prompt + LANGUAGE.continuation(prompt, 7)
    assert sequence.length == len(prompt) + 7
    assert sequence.last_token == LANGUAGE.continuation(prompt, 8)[-1]


class VerifyNone(FixedBudget):
    """Drafts, and verifies nothing; keeps the results of steps."""

    def __init__(self) -> None:
        super().__init__(4)
        self.results: list[StepResult] = []

    def num_verified(self, node_log_probs: NDArray[np.float64]) -> int:
        return 0

    def learn(self, result: StepResult, ms: float | None = None) -> None:
        self.results.append(result)


def test_a_step_that_verifies_none_of_its_drafts_tells_whether_the_first_was_right() -> None:
    prompt = PROMPTS[2]
    text = LANGUAGE.continuation(prompt, 40)
    oracle = OracleProposer(known_texts([prompt + text]))
    decoder = FakeDecoder(oracle)
    firsts: list[tuple[int, float]] = []
    propose = oracle.propose

    def spy(*args: Any) -> list[TokenTree]:
        (tree,) = propose(*args)
        firsts.append((int(tree.tokens[1]), float(tree.log_probs[1])))
        return [tree]

    oracle.propose = spy  # type: ignore[method-assign, assignment]
    budget = VerifyNone()
    tokens = [
        token
        for chunk in decoder.stream(prompt, max_new_tokens=40, budget=budget)
        for token in chunk.token_ids
    ]
    assert tokens == text
    found = [result.unverified for result in budget.results]
    assert len(found) == 39
    for (token, log_prob), unverified, right in zip(firsts, found, text[1:], strict=True):
        assert unverified is not None
        assert unverified.log_probs.tolist() == [[log_prob]]
        assert unverified.are_right.tolist() == [token == right]
    assert {unverified.are_right[0] for unverified in found if unverified} == {True, False}
    decoder.batch.clear()
    decoder.batch.enter(decoder.new_sequence(prompt, max_new_tokens=4))
    plain = decoder.runner.step(decoder.batch.sequences, 0)
    assert plain.unverified is None


def test_log_probabilities_are_the_model_s_own() -> None:
    sampling = SamplingParams(temperature=0.7, seed=3, log_probs=True)
    prompt = PROMPTS[1]
    text = LANGUAGE.continuation(prompt, 30, sampling)
    decoder = FakeDecoder(OracleProposer(known_texts([prompt + text])))
    pieces = [piece for chunk in chunks_of(decoder, prompt, 30, sampling=sampling) for piece in chunk.pieces]
    assert [piece.token_id for piece in pieces] == text
    assert any(piece.drafted for piece in pieces)
    for index, piece in enumerate(pieces):
        logits = LANGUAGE.logits(LANGUAGE.state([*prompt, *text[:index]]))
        (score,) = score_tokens(logits[None], [text[index]], 0)
        assert piece.log_prob == pytest.approx(score.log_prob, abs=1e-6)


def test_logits_come_only_where_a_sequence_needs_them() -> None:
    decoder = FakeDecoder(NoProposer())
    wanted: list[tuple[str, ...]] = []
    forward_pass = decoder.engine.forward_pass

    def spy(also: tuple[str, ...] = (), /, **options: Any) -> FakeForwardPass:
        wanted.append(also)
        return forward_pass(also, **options)

    decoder.engine.forward_pass = spy  # type: ignore[method-assign]
    chunks_of(decoder, [5], 3)
    assert wanted == [()] * 3
    chunks_of(decoder, [5], 3, sampling=SAMPLING["warm"])
    assert wanted[3:] == [("logits",)] * 3


def test_the_result_of_a_step() -> None:
    """Two trees of different sizes, of which different numbers of drafts are accepted."""
    trees = [make_tree(1, [(0, 2), (0, 3), (2, 4)], [-0.1, -0.2, -0.3]), TokenTree.root(5)]
    scores = (TokenScore(-1.0), TokenScore(-2.0), TokenScore(-3.0))
    accepted = [Acceptance(np.array([0, 2, 3]), 9, scores), Acceptance(np.array([0]), 6)]
    result = step_result(trees, accepted)
    assert result.tokens.tolist() == [[3, 4, 9], [6, 0, 0]]
    assert result.counts.tolist() == [3, 1]
    assert result.scores == (scores, ())
    assert result.node_log_probs.tolist() == [[-0.1, -0.2, -0.3], [-np.inf] * 3]
    plain = step_result(trees[1:], accepted[1:])
    assert plain.node_log_probs.shape == (1, 0)
    assert plain.tokens.tolist() == [[6]]


def test_the_recorder_hears_of_every_stage() -> None:
    decoder = FakeDecoder()
    before = decoder.runner.recorder
    with recording(decoder.runner, StageRecorder()) as recorder:
        chunks = chunks_of(decoder, PROMPTS[1], 30)
    assert decoder.runner.recorder is before
    assert len(recorder.steps) == len(chunks) - 1
    for step, chunk in zip(recorder.steps[:-1], chunks[1:-1], strict=True):
        assert [stage for stage, _ in step.stages] == list(STAGES)
        assert step.num_seqs == 1
        assert step.num_accepted == len(chunk.pieces) - 1 < step.num_nodes <= 9
        times = [step.begin_ns, *(end for _, end in step.stages), step.end_ns]
        assert times == sorted(times)


# The tests above can fail: each fault changes the text, or the fakes notice it.


def commit_nothing(*args: object) -> None:
    pass


def commit_one_further(cache: SlabKVCache, starts: Sequence[int], paths: Sequence[NDArray[np.int64]]) -> None:
    for slot, (start, path) in enumerate(zip(starts, paths, strict=True)):
        kept = cache.slab[:, slot, :, start + path].copy()
        cache.slab[:, slot, :, start + 1 : start + 1 + path.size] = np.moveaxis(kept, 0, 2)


def mask_everything(mask: NDArray[np.bool_], parents: NDArray[np.int64], length: int, first: int = 0) -> None:
    mask[:] = False
    mask[: parents.size, : length + parents.size] = True


def mask_prefix_and_self(
    mask: NDArray[np.bool_], parents: NDArray[np.int64], length: int, first: int = 0
) -> None:
    mask[:] = False
    mask[: parents.size, :length] = True
    mask[np.arange(parents.size), length + np.arange(parents.size)] = True


FAULTS: dict[str, tuple[str, Callable[..., Any]]] = {
    "accepted positions stay where they are": ("runtime.engines.kv_cache.SlabKVCache.commit", commit_nothing),
    "accepted positions go one too far": ("runtime.engines.kv_cache.SlabKVCache.commit", commit_one_further),
    "nodes see their siblings": ("runtime.engines.ort.fill_tree_mask", mask_everything),
    "nodes do not see their ancestors": ("runtime.engines.ort.fill_tree_mask", mask_prefix_and_self),
    "padding sees nothing": ("runtime.engines.ort.fill_padding_mask", commit_nothing),
    "features of the first inputs": (
        "runtime.engines.protocol.Features.select",
        lambda features, paths: Features(
            [block[: path.size] for block, path in zip(features.to_host(), paths, strict=True)]
        ),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_noticed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*FAULTS[fault])
    prompt = PROMPTS[1]
    expected = LANGUAGE.continuation(prompt, NEW_TOKENS)
    decoder = FakeDecoder(OracleProposer(known_texts([prompt + expected])), buckets=BUCKETS)
    try:
        found = token_ids(chunks_of(decoder, prompt, NEW_TOKENS))
    except AssertionError:
        return
    assert found != expected

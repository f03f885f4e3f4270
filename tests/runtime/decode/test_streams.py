"""Decoding with speculative streams: the text is the target model's, and good drafts are accepted."""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from export.build_engines import build
from export.options import OWN_PASS, VERIFY_PASS, Options
from runtime.core.bundle import Bundle, EnginePlan
from runtime.core.errors import RequestError
from runtime.core.lattice import Lattice
from runtime.core.options import choose_method
from runtime.core.prefix_search import prefix_search
from runtime.core.token_tree import TokenTree
from runtime.decode.budget import AdaptiveBudget, FixedBudget
from runtime.decode.sampling_params import SamplingParams
from runtime.decode.step import HostStep
from runtime.decode.streams import StreamProposer, StreamTargetModel
from runtime.decoder import SpeculativeDecoder
from runtime.generate import main as generate
from runtime.load.host import load_target_model
from runtime.profiler.__main__ import main as profile
from tests.batch_runs import decode_together, mixed_requests, steps_together
from tests.fakes import chunks_of, token_ids
from tests.stream_heads import HEADS, NEW_TOKENS, NUM_FRAMES, prompts

KEPT = (None, 3, 2)


@pytest.fixture(scope="module", params=list(HEADS))
def bundle(request: pytest.FixtureRequest, stream_bundle_of: Callable[[str], Path]) -> Path:
    return stream_bundle_of(request.param)


@pytest.fixture(scope="module")
def plain(bundle: Path) -> SpeculativeDecoder:
    return SpeculativeDecoder.from_bundle(bundle, method="plain", num_threads=1)


def open_streams(bundle: Path, **options: Any) -> SpeculativeDecoder:
    return SpeculativeDecoder.from_bundle(
        bundle, **{"method": "draft", "num_threads": 1, "num_nodes": 8, **options}
    )


def target_model_of(decoder: SpeculativeDecoder) -> StreamTargetModel:
    runner = decoder.batch.runner
    assert isinstance(runner, HostStep)
    assert isinstance(runner.target_model, StreamTargetModel)
    return runner.target_model


def count_rows(decoder: SpeculativeDecoder) -> list[tuple[int, int]]:
    """Of every pass from now on, the rows of a lower layer and of an upper one."""
    engine = target_model_of(decoder).engine
    found: list[tuple[int, int]] = []
    forward_pass = engine.forward_pass

    def counted(*also: Any, **axes: Any) -> Any:
        found.append((axes["B"] * axes["N"], axes["B"] * (axes["K"] + axes["M"] * NUM_FRAMES)))
        return forward_pass(*also, **axes)

    engine.forward_pass = counted  # type: ignore[method-assign]
    return found


def lattice_of(decoder: SpeculativeDecoder) -> Lattice:
    """What the next tree of the only sequence is searched in."""
    runner = decoder.batch.runner
    assert isinstance(runner, HostStep)
    assert isinstance(runner.proposer, StreamProposer)
    lattice = runner.proposer._lattices[0]
    assert lattice is not None
    return lattice


@pytest.mark.parametrize("kept", KEPT)
def test_greedy_text_is_the_target_models(bundle: Path, plain: SpeculativeDecoder, kept: int | None) -> None:
    decoder = open_streams(bundle, kept_nodes=kept)
    for prompt in prompts():
        expected = token_ids(chunks_of(plain, prompt, NEW_TOKENS))
        chunks = chunks_of(decoder, prompt, NEW_TOKENS)
        assert token_ids(chunks) == expected
        # Not only roots are accepted, and where few are kept, as many as that at most.
        sizes = [len(chunk.token_ids) for chunk in chunks]
        assert max(sizes) > 2
        assert len(sizes) < 0.7 * len(expected)
        assert kept is None or max(sizes) <= kept + 1
        # A prompt that is not known by heart.
        expected = token_ids(chunks_of(plain, prompt[::-1], 12))
        assert token_ids(chunks_of(decoder, prompt[::-1], 12)) == expected


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("streaming", Options("int8")),
        ("ctc", Options("int8")),
        ("ctc", Options("int8", stream_pass=OWN_PASS)),
        ("ctc", Options("int4", stream_pass=OWN_PASS, lm_head="float")),
    ],
)
def test_greedy_text_of_quantised_models_is_the_target_models(
    name: str,
    options: Options,
    stream_bundle_of: Callable[[str], Path],
    tiny_model_dir: Path,
    copied_graphs: Callable[..., AbstractContextManager[None]],
    tmp_path: Path,
) -> None:
    """Both graphs have the target model's matrices, rounded alike, and the same smoothing of their inputs."""
    source = stream_bundle_of(name)
    with copied_graphs(backbone=source, streaming=source):
        bundle = build(tiny_model_dir, tmp_path / "int8", drafter_dir=source.parent / "head", options=options)
    graph = "streaming" if options.stream_pass == VERIFY_PASS else "drafter"
    has_second_forms = {"backbone.int8.onnx", f"{graph}.int8.onnx"} <= set(bundle.manifest.files)
    assert has_second_forms == (options.precision == "int8")
    plain = SpeculativeDecoder.from_bundle(bundle.path, method="plain", num_threads=1)
    decoder = open_streams(bundle.path)
    assert isinstance(decoder.batch.runner, HostStep)
    assert decoder.batch.runner.target_model.key_block is not None
    num_steps = num_tokens = 0
    for prompt in prompts():
        expected = token_ids(chunks_of(plain, prompt, NEW_TOKENS))
        chunks = chunks_of(decoder, prompt, NEW_TOKENS)
        assert token_ids(chunks) == expected
        num_steps += len(chunks)
        num_tokens += len(expected)
    assert num_steps < num_tokens


@pytest.mark.parametrize("kept", KEPT)
def test_sequences_that_decode_together(bundle: Path, plain: SpeculativeDecoder, kept: int | None) -> None:
    """Greedy and sampling, prompts in parts, trees of many sizes and none, sequences that move."""
    texts = [*prompts(), prompts()[0][:1], [7] * 70]
    requests = mixed_requests(texts)
    expected = [token_ids(list(plain.stream(prompt, **options))) for prompt, options in requests]
    decoder = open_streams(bundle, kept_nodes=kept, max_num_seqs=3)
    assert decode_together(decoder, requests, np.random.default_rng(0)) == expected
    left = decode_together(decoder, requests, np.random.default_rng(9), frozenset({1, 3}))
    assert [left[i] for i in (0, 2, 4, 5)] == [expected[i] for i in (0, 2, 4, 5)]


def test_drafts_are_the_same_as_alone(bundle: Path) -> None:
    """So every sequence has the lattice of its own last node, in whatever slot."""
    alone, together = (open_streams(bundle, kept_nodes=3, max_num_seqs=count) for count in (1, 3))
    single = [[chunk.token_ids for chunk in chunks_of(alone, prompt, 24)] for prompt in prompts()[:3]]
    assert max(len(tokens) for chunks in single for tokens in chunks) > 2
    assert steps_together(together, prompts()[:3], 24) == single


@pytest.mark.parametrize("kept", KEPT)
def test_lattices_are_those_of_the_text_so_far(bundle: Path, kept: int | None) -> None:
    """A tree is searched in what a pass over the whole text would have drafted."""
    decoder, fresh = open_streams(bundle, kept_nodes=kept), open_streams(bundle)
    tokens = list(prompts()[3])
    most = 0
    for chunk in decoder.stream(tokens[:], max_new_tokens=NEW_TOKENS, stop_token_ids=()):
        most = max(most, len(chunk.token_ids))
        tokens += chunk.token_ids
        if chunk.finish_reason:
            break
        # The last token is the root of the next tree.
        stream = fresh.stream(tokens[:-1], max_new_tokens=2, stop_token_ids=())
        next(stream)
        found, expected = lattice_of(decoder), lattice_of(fresh)
        assert (found.frame_tokens == expected.frame_tokens).mean() > 0.9
        np.testing.assert_allclose(found.frame_logprobs, expected.frame_logprobs, atol=1e-3)
        np.testing.assert_allclose(found.blank_logprobs, expected.blank_logprobs, atol=1e-3)
        np.testing.assert_allclose(found.transition.frames, expected.transition.frames, atol=1e-3)
        np.testing.assert_allclose(found.transition.root, expected.transition.root, atol=1e-3)
    assert most > 2


def test_trees_of_different_sizes(bundle: Path) -> None:
    """Padding of small trees takes no place of other nodes, and is never accepted."""

    def ragged(lattice: Lattice, *, root_token: int, num_nodes: int) -> TokenTree:
        return prefix_search(lattice, root_token=root_token, num_nodes=num_nodes).first(root_token % 7)

    alone, together = (
        open_streams(bundle, kept_nodes=3, max_num_seqs=count, search=ragged) for count in (1, 3)
    )
    single = [[chunk.token_ids for chunk in chunks_of(alone, prompt, 24)] for prompt in prompts()[:3]]
    assert max(len(tokens) for chunks in single for tokens in chunks) > 1
    assert steps_together(together, prompts()[:3], 24) == single


def test_sampling(bundle: Path, plain: SpeculativeDecoder) -> None:
    decoder = open_streams(bundle, kept_nodes=3)
    for seed in range(3):
        sampling = SamplingParams(temperature=0.6, top_k=20, seed=seed, log_probs=True)
        options: dict[str, Any] = {"max_new_tokens": 30, "stop_token_ids": (), "sampling": sampling}
        found, expected = (
            [piece for chunk in each.stream(prompts()[0], **options) for piece in chunk.pieces]
            for each in (decoder, plain)
        )
        assert [piece.token_id for piece in found] == [piece.token_id for piece in expected]
        for one, other in zip(found, expected, strict=True):
            assert one.log_prob == pytest.approx(other.log_prob, abs=1e-3)


def test_steps_without_drafts_are_plain_ones(bundle: Path, plain: SpeculativeDecoder) -> None:
    decoder = open_streams(bundle)
    rows = count_rows(decoder)
    options: dict[str, Any] = {"max_new_tokens": 9, "stop_token_ids": ()}
    chunks = list(decoder.stream(prompts()[1], budget=FixedBudget(0), **options))
    assert token_ids(chunks) == token_ids(list(plain.stream(prompts()[1], **options)))
    assert rows[1:] == [(1, 1 + NUM_FRAMES)] * 8


def test_pruning_saves_upper_layers(stream_bundle_of: Callable[[str], Path]) -> None:
    bundle = stream_bundle_of("streaming")
    work = {}
    for kept in (None, 3):
        decoder = open_streams(bundle, kept_nodes=kept, num_nodes=8)
        rows = count_rows(decoder)
        chunks_of(decoder, prompts()[0], NEW_TOKENS)
        places = 9 if kept is None else kept + 1
        assert set(rows[1:]) == {(9, places * (1 + NUM_FRAMES))}
        work[kept] = sum(map(sum, rows))
    # For the same text, although it takes more steps.
    assert work[3] < 0.9 * work[None]


def test_what_is_kept_by_default(stream_bundle_of: Callable[[str], Path], tmp_path: Path) -> None:
    """The bundle says it, and whoever loads it may say otherwise."""
    for path in stream_bundle_of("streaming").iterdir():
        (tmp_path / path.name).symlink_to(path)
    manifest = json.loads((tmp_path / "bundle.json").read_text(encoding="utf-8"))
    manifest["drafter"]["kept_nodes"] = 2
    (tmp_path / "bundle.json").unlink()
    (tmp_path / "bundle.json").write_text(json.dumps(manifest), encoding="utf-8")
    for wanted, found in ((None, 2), (5, 5)):
        assert target_model_of(open_streams(tmp_path, kept_nodes=wanted)).kept_nodes == found


def test_an_adaptive_budget(stream_bundle_of: Callable[[str], Path]) -> None:
    bundle = stream_bundle_of("streaming")
    decoder = open_streams(bundle, num_nodes=None)
    assert isinstance(decoder.new_budget(), AdaptiveBudget)
    plain = SpeculativeDecoder.from_bundle(bundle, method="plain", num_threads=1)
    prompt = prompts()[2]
    assert token_ids(chunks_of(decoder, prompt, 20)) == token_ids(chunks_of(plain, prompt, 20))


def test_a_subset_of_a_tree() -> None:
    tree = TokenTree(
        np.array([5, 6, 7, 8, 9]), np.array([-1, 0, 0, 2, 3]), np.array([0, 1, 1, 2, 3]), np.arange(5.0)
    )
    found = tree.subset(np.array([0, 2, 3]))
    assert found.tokens.tolist() == [5, 7, 8]
    assert found.parents.tolist() == [-1, 0, 1]
    assert found.depths.tolist() == [0, 1, 2]
    assert found.log_probs.tolist() == [0, 2, 3]
    assert tree.subset(np.arange(5)) is tree


def test_a_step_before_the_prompt(stream_bundle_of: Callable[[str], Path]) -> None:
    decoder = open_streams(stream_bundle_of("streaming"))
    decoder.batch.clear()
    sequence = decoder.new_sequence(prompts()[0], max_new_tokens=4)
    with pytest.raises(RuntimeError, match="needs a lattice"):
        decoder.batch.runner.step([sequence], 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "magic"}, "method: must be one of draft, plain, got 'magic'"),
        ({"step": "graph"}, "step: .*bundle holds streams of the verify pass, whose steps run on the host"),
        ({"step": "graph", "method": "plain"}, "step: .*holds streams of the verify pass, whose steps run"),
        ({"kept_nodes": 0}, "kept_nodes: must be between 1 and 256, got 0"),
        ({"kept_nodes": 257}, "kept_nodes: must be between 1 and 256, got 257"),
        ({"kept_nodes": 2, "method": "plain"}, "kept_nodes: is for streams that draft in the verify pass"),
    ],
)  # fmt: skip
def test_refusals(bundle: Path, options: dict[str, Any], message: str) -> None:
    drafter = Bundle.load(bundle).manifest.drafter
    assert drafter is not None
    with pytest.raises(RequestError, match=f"^{message.format(type=drafter.drafter_type)}"):
        SpeculativeDecoder.from_bundle(bundle, num_threads=1, **options)


@pytest.mark.parametrize("method", [None, "draft", "streaming", "ctc"])
def test_engines_with_streams_decode_plainly_alone(bundle: Path, method: str | None) -> None:
    manifest = Bundle.load(bundle).manifest
    plan = EnginePlan(max_context=64, max_num_seqs=1, max_nodes=8, prefill_chunk=16)
    compiled = replace(manifest, target="tensorrt-rtx", engine_plan=plan)
    with pytest.raises(RequestError, match=r"tensorrt-rtx, which is compiled and checked only; its engines"):
        choose_method(compiled, method, bundle)
    assert choose_method(compiled, "plain", bundle) == "plain"


def test_refusals_of_other_bundles(tiny_bundle_dir: Path, stream_bundle_of: Callable[[str], Path]) -> None:
    with pytest.raises(RequestError, match=r"^kept_nodes: "):
        SpeculativeDecoder.from_bundle(tiny_bundle_dir, kept_nodes=2)
    bundle = Bundle.load(stream_bundle_of("streaming"))
    shared = load_target_model(bundle, max_nodes=8, num_threads=1)
    with pytest.raises(RequestError, match=r"^target_model: "):
        SpeculativeDecoder.from_bundle(bundle.path, target_model=shared, num_threads=1)


@pytest.mark.parametrize("name", ["ctc", "streaming"])
def test_an_old_name_of_the_method(
    tiny_bundle_dir: Path, name: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """It stands for ``draft``, whatever head the bundle holds, and one line says so."""
    flags = ["--bundle", str(tiny_bundle_dir), "--threads", "1", "--prompt", "x", "--max-new-tokens", "4"]
    outputs = []
    for method in ("draft", name):
        assert generate([*flags, "--json", "--method", method]) == 0
        outputs.append(json.loads(capsys.readouterr().out)["token_ids"])
    assert outputs[0] == outputs[1]
    (message,) = (record.getMessage() for record in caplog.records)
    assert message == f"method: {name!r} is an old name of 'draft' and goes with the next release"


def test_command_lines(
    stream_bundle_of: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = ["--bundle", str(stream_bundle_of("ctc")), "--threads", "1"]
    capsys.readouterr()  # what the build printed, if this is the first use of the bundle
    flags = "--prompt x --raw --json --max-new-tokens 20 --method"
    outputs = []
    for method in (["plain"], ["draft"], ["draft", "--kept-nodes", "2"]):
        assert generate([*bundle, *flags.split(), *method]) == 0
        outputs.append(json.loads(capsys.readouterr().out)["token_ids"])
    assert outputs[0] == outputs[1] == outputs[2]
    assert generate([*bundle, *flags.split(), "plain", "--kept-nodes", "2"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    questions = tmp_path / "prompts.jsonl"
    questions.write_text('{"text": "How many?"}\n', encoding="utf-8")
    flags = f"--prompts {questions} --out {tmp_path / 'out'} --num-nodes 4 --max-new-tokens 8 --warmup 0"
    assert profile([*bundle, *flags.split(), "--method", "draft", "--kept-nodes", "2"]) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    assert report["settings"]["method"] == "draft"


def test_a_reused_prefix(bundle: Path, plain: SpeculativeDecoder) -> None:
    """Streams start from the rest of the prompt; what is kept is the target model's part alone."""
    decoder, fresh = open_streams(bundle, prefix_cache_mb=8), open_streams(bundle)
    prefixes = decoder.batch.prefixes
    assert prefixes is not None
    text = prompts()[0]
    for turn in range(3):
        text = [*text, *range(20, 40), turn]
        expected = token_ids(chunks_of(plain, text, NEW_TOKENS))
        chunks = chunks_of(decoder, text, NEW_TOKENS)
        assert token_ids(chunks) == expected
        assert [chunk.token_ids for chunk in chunks] == [
            chunk.token_ids for chunk in chunks_of(fresh, text, NEW_TOKENS)
        ]
        text += expected
    assert prefixes.num_hit_tokens > 2 * NEW_TOKENS

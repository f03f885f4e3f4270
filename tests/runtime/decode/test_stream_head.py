"""Streams in a pass of their own: the drafts are those of the verify pass, on the host and on a device."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.core.bundle import Bundle
from runtime.core.errors import RequestError
from runtime.decoder import SpeculativeDecoder
from tests.batch_runs import decode_together, mixed_requests
from tests.fakes import chunks_of, token_ids
from tests.stream_heads import HEADS, NEW_TOKENS, prompts


@pytest.fixture(scope="module", params=list(HEADS))
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def bundle(name: str, own_pass_bundle_of: Callable[[str], Path]) -> Path:
    return own_pass_bundle_of(name)


def open_bundle(bundle: Path, **options: Any) -> SpeculativeDecoder:
    return SpeculativeDecoder.from_bundle(
        bundle, **{"method": "draft", "num_threads": 1, "num_nodes": 8, **options}
    )


def test_what_the_bundle_is(bundle: Path) -> None:
    manifest = Bundle.load(bundle).manifest
    spec = manifest.drafter
    assert spec is not None
    assert (spec.family, spec.has_streams, spec.drafts_in_verify_pass) == ("parallel", True, False)
    # Of the one upper layer.
    assert [t.name for t in manifest.graphs["drafter"].inputs if "past" in t.name] == [
        "past_key_0",
        "past_value_0",
    ]
    assert max(manifest.validation["drafter"][key] for key in ("prefill", "step")) < 1e-4


def test_drafts_are_those_of_the_verify_pass(
    name: str, bundle: Path, stream_bundle_of: Callable[[str], Path]
) -> None:
    """The streams of the last accepted token are the same in both, and so is every step."""
    own, verify = open_bundle(bundle), open_bundle(stream_bundle_of(name))
    plain = open_bundle(bundle, method="plain")
    for prompt in (*prompts(), prompts()[0][::-1]):
        chunks = [chunk.token_ids for chunk in chunks_of(own, prompt, NEW_TOKENS)]
        assert chunks == [chunk.token_ids for chunk in chunks_of(verify, prompt, NEW_TOKENS)]
        assert [t for tokens in chunks for t in tokens] == token_ids(chunks_of(plain, prompt, NEW_TOKENS))
        assert prompt == prompts()[0][::-1] or max(map(len, chunks)) > 2


def test_on_a_device(own_pass_bundle_of: Callable[[str], Path]) -> None:
    bundle = own_pass_bundle_of("streaming")
    device, host = open_bundle(bundle, step="graph", num_nodes=4), open_bundle(bundle, num_nodes=4)
    for prompt in prompts():
        chunks = [chunk.token_ids for chunk in chunks_of(device, prompt, NEW_TOKENS)]
        assert chunks == [chunk.token_ids for chunk in chunks_of(host, prompt, NEW_TOKENS)]


def test_sequences_that_decode_together(bundle: Path) -> None:
    """Greedy and sampling, prompts in parts, contexts of different lengths, sequences that move."""
    plain = open_bundle(bundle, method="plain")
    requests = mixed_requests([*prompts(), prompts()[0][:1], [7] * 70])
    expected = [token_ids(list(plain.stream(prompt, **options))) for prompt, options in requests]
    decoder = open_bundle(bundle, max_num_seqs=3)
    assert decode_together(decoder, requests, np.random.default_rng(0)) == expected


def test_a_refusal(bundle: Path) -> None:
    with pytest.raises(RequestError, match=r"^kept_nodes: is for streams that draft in the verify pass"):
        open_bundle(bundle, kept_nodes=2)

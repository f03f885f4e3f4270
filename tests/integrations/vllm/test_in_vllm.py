"""The plug-in in vLLM's server: ``make vllm-test`` runs this in an environment that has vLLM.

What our runtime made of the same prompts comes from ``tests.integrations.vllm.oracle``.
"""

import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.integrations.vllm.drafts import speculative, with_head_of
from tests.integrations.vllm.servers import BLOCK_SIZE, UNBOUND, Server, serve

AT_A_TIME, NUM_ON_TWO_DEVICES = 8, 8
# Of the accepted drafts, relative to our runtime's: vLLM asks the head for N + 1 frames, our runtime for all;
# our engine's head is in int4.
TOLERANCE = 0.02
# Tokens that take longer than these seconds: the server is expected to stop sooner when nobody reads them.
ENDLESS, SOON = 3500, 3
PREFIX = "vllm:spec_decode_num_"

pytestmark = pytest.mark.skipif("VLLM_TEST_MODEL" not in os.environ, reason="make vllm-test runs this")


class Counts(NamedTuple):
    """vLLM's counters. accepted: drafts, also those that a text's end cuts off; passes: verify passes."""

    accepted: float
    passes: float


def counts(server: Server) -> Counts:
    return Counts(server.metric(f"{PREFIX}accepted_tokens_total"), server.metric(f"{PREFIX}drafts_total"))


@pytest.fixture(scope="module")
def model() -> Path:
    return Path(os.environ["VLLM_TEST_MODEL"])


@pytest.fixture(scope="module")
def draft() -> Path:
    return Path(os.environ["VLLM_TEST_DRAFT"])


@pytest.fixture(scope="module")
def oracle() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(Path(os.environ["VLLM_TEST_ORACLE"]).read_text())
    return found


def continuations(server: Server, oracle: list[dict[str, Any]]) -> list[list[int]]:
    """Of all prompts, ``AT_A_TIME`` at a time."""
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        return list(
            pool.map(lambda text: server.complete(text["prompt_ids"], len(text["token_ids"])), oracle)
        )


@pytest.fixture(scope="module")
def plain(
    model: Path, oracle: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> list[list[int]]:
    """What vLLM writes without a draft head."""
    with serve(model, tmp_path_factory.mktemp("plain") / "log") as server:
        return continuations(server, oracle)


@pytest.fixture(scope="module")
def drafting(
    model: Path, draft: Path, plain: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server with the draft head, started when the plain one has stopped."""
    with serve(model, tmp_path_factory.mktemp("draft") / "log", speculative(draft)) as server:
        yield server


@pytest.fixture(scope="module")
def one_by_one(drafting: Server, oracle: list[dict[str, Any]]) -> list[Counts]:
    """What the server counts for each prompt, asked one after another."""
    found = []
    for text in oracle:
        before = counts(drafting)
        drafting.complete(text["prompt_ids"], len(text["token_ids"]))
        found.append(Counts(*(b - a for a, b in zip(before, counts(drafting), strict=True))))
    return found


def test_greedy_text_is_plain_vllm_s(
    drafting: Server, plain: list[list[int]], oracle: list[dict[str, Any]]
) -> None:
    found = continuations(drafting, oracle)
    same = sum(a == b for a, b in zip(found, plain, strict=True))
    ours = sum(a == text["token_ids"] for a, text in zip(plain, oracle, strict=True))
    print(f"\nidentical to plain vLLM: {same} of {len(plain)}; plain vLLM to our runtime: {ours}")
    assert same == len(plain)


def test_as_many_drafts_are_accepted_as_of_our_chains(
    one_by_one: list[Counts], oracle: list[dict[str, Any]]
) -> None:
    """Of the drafts that stand in the texts: every verify pass adds its accepted drafts and one more token.

    vLLM's own counter has more, because it counts before a text's last drafts are cut off.
    """
    tokens = sum(len(text["token_ids"]) - 1 for text in oracle)  # the first comes from the prompt's pass
    passes, ours = sum(own.passes for own in one_by_one), sum(text["num_steps"] for text in oracle)
    counted = sum(own.accepted for own in one_by_one)
    print(
        f"\nverify passes: vLLM {passes:.0f}, our runtime {ours}; accepted drafts in the texts: "
        f"{tokens - passes:.0f} and {tokens - ours}; counted by vLLM: {counted:.0f}; tokens a pass: "
        f"{tokens / passes:.3f} and {tokens / ours:.3f}"
    )
    assert tokens - passes == pytest.approx(tokens - ours, rel=TOLERANCE)
    assert tokens - passes <= counted


def test_the_server_s_metrics_count_our_drafts(
    drafting: Server, draft: Path, one_by_one: list[Counts]
) -> None:
    num_drafts = speculative(draft)["num_speculative_tokens"]
    accepted, passes = counts(drafting)
    assert drafting.metric(f"{PREFIX}draft_tokens_total") == num_drafts * passes
    assert drafting.metric(f"{PREFIX}accepted_tokens_per_pos_total") == accepted
    assert all(own.passes > 0 and own.accepted <= num_drafts * own.passes for own in one_by_one)


def test_a_text_comes_in_parts(
    drafting: Server, plain: list[list[int]], oracle: list[dict[str, Any]]
) -> None:
    text = oracle[0]
    parts = drafting.stream(text["prompt_ids"], len(text["token_ids"]))
    assert [token for part in parts for token in part] == plain[0]
    assert max(map(len, parts)) > 1


def test_a_prompt_that_is_in_the_cache(
    drafting: Server, plain: list[list[int]], oracle: list[dict[str, Any]]
) -> None:
    """The head's keys and values are kept with the target model's: as many drafts are accepted.

    The prompt is the longest text up to its middle, because a cached prompt fills at least one block.
    """
    texts = [text["prompt_ids"] + tokens for text, tokens in zip(oracle, plain, strict=True)]
    index = max(range(len(texts)), key=lambda number: len(plain[number]))
    middle = len(plain[index]) // 2
    prompt, passes = texts[index][: len(texts[index]) - middle], []
    for _ in range(2):
        hits, before = drafting.metric("vllm:prefix_cache_hits_total"), counts(drafting)
        assert drafting.complete(prompt, middle) == plain[index][len(plain[index]) - middle :]
        passes.append(counts(drafting).passes - before.passes)
    assert drafting.metric("vllm:prefix_cache_hits_total") >= hits + BLOCK_SIZE
    assert passes[0] == passes[1]


def test_a_client_that_leaves_disturbs_no_other(
    drafting: Server, plain: list[list[int]], oracle: list[dict[str, Any]]
) -> None:
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        others = [
            pool.submit(drafting.complete, text["prompt_ids"], len(text["token_ids"])) for text in oracle[:6]
        ]
        for text in oracle[6:10]:
            with drafting.open(text["prompt_ids"], ENDLESS, stream=True, ignore_end=True) as answer:
                answer.readline()
        assert [other.result() for other in others] == plain[:6]
    end = time.monotonic() + SOON
    while drafting.metric("vllm:num_requests_running") and time.monotonic() < end:
        time.sleep(0.5)
    assert drafting.metric("vllm:num_requests_running") == 0
    assert drafting.complete(oracle[0]["prompt_ids"], len(oracle[0]["token_ids"])) == plain[0]


def test_two_devices_draft_what_one_does(
    model: Path,
    draft: Path,
    plain: list[list[int]],
    one_by_one: list[Counts],
    oracle: list[dict[str, Any]],
    tmp_path: Path,
) -> None:
    """Tensor parallel: two processes, each with its part of the weights of model and head."""
    sizes = json.loads((model / "config.json").read_text())
    if sizes["num_attention_heads"] % 2:
        pytest.skip(f"vLLM cannot divide {sizes['num_attention_heads']} attention heads among two devices")
    some = oracle[:NUM_ON_TWO_DEVICES]
    two = ("--tensor-parallel-size", "2")
    with serve(model, tmp_path / "log", speculative(draft), options=two, environment=UNBOUND) as server:
        found = continuations(server, some)
        counted = counts(server)
    assert found == plain[: len(some)]
    of_one = [sum(values) for values in zip(*one_by_one[: len(some)], strict=True)]
    print(f"\ntensor parallel 2: {len(some)} texts, accepted and passes {counted}, of one device {of_one}")
    assert list(counted) == of_one


def test_a_server_with_a_wrong_head_says_so_in_a_line(model: Path, draft: Path, tmp_path: Path) -> None:
    layers = json.loads((model / "config.json").read_text())["num_hidden_layers"]
    wrong = with_head_of(draft, tmp_path / "wrong", base_num_layers=layers + 1)
    message = (
        f"base_num_layers: expected the model's {layers}, got {layers + 1}; the head was made for another"
    )
    with pytest.raises(RuntimeError, match=message), serve(model, tmp_path / "log", speculative(wrong)):
        pass

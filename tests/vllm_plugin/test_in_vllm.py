"""The plug-in in vLLM itself: ``make vllm-test`` runs this in an environment that has it.

What our runtime made of the same prompts comes from ``tests.vllm_plugin.oracle``.
"""

import json
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.vllm_plugin.servers import Server, serve

AT_A_TIME = 8
# Of the tokens a step, relative to our runtime's chains: vLLM asks the head for N + 1 frames, our runtime for
# all; our engine's head is in int4.
TOLERANCE = 0.03
PREFIX = "vllm:spec_decode_num_"


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


def speculative(draft: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((draft / "vllm_draft.json").read_text())["arguments"]
    return {**found["speculative_config"], "model": str(draft)}


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


def test_greedy_text_is_plain_vllm_s(
    drafting: Server, plain: list[list[int]], oracle: list[dict[str, Any]]
) -> None:
    found = continuations(drafting, oracle)
    same = sum(a == b for a, b in zip(found, plain, strict=True))
    ours = sum(a == text["token_ids"] for a, text in zip(plain, oracle, strict=True))
    print(f"identical to plain vLLM: {same} of {len(plain)}; plain vLLM to our runtime: {ours}")
    assert same == len(plain)


def test_as_many_drafts_are_accepted_as_of_our_chains(drafting: Server, oracle: list[dict[str, Any]]) -> None:
    """By vLLM's own metrics, which count the drafts; the prompts come one after another here."""

    def counts() -> tuple[float, float]:
        return drafting.metric(f"{PREFIX}accepted_tokens_total"), drafting.metric(f"{PREFIX}drafts_total")

    before = counts()
    for text in oracle:
        drafting.complete(text["prompt_ids"], len(text["token_ids"]))
    accepted, drafts = (after - start for after, start in zip(counts(), before, strict=True))
    tokens_per_step = 1 + accepted / drafts
    ours = sum(len(text["token_ids"]) - 1 for text in oracle) / sum(text["num_steps"] for text in oracle)
    print(f"tokens a step in vLLM {tokens_per_step:.3f}, of our runtime's chains {ours:.3f}")
    assert tokens_per_step == pytest.approx(ours, rel=TOLERANCE)


def test_a_client_that_leaves_disturbs_no_other(
    drafting: Server, plain: list[list[int]], oracle: list[dict[str, Any]]
) -> None:
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        others = [
            pool.submit(drafting.complete, text["prompt_ids"], len(text["token_ids"])) for text in oracle[:6]
        ]
        for text in oracle[6:10]:
            with drafting.open(text["prompt_ids"], 512, stream=True) as answer:
                answer.readline()
        assert [other.result() for other in others] == plain[:6]


def test_a_head_of_another_model_is_one_line(model: Path, draft: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    shutil.copytree(draft, wrong)
    config = json.loads((wrong / "config.json").read_text())
    config["ctc_speculator"]["head"]["base_num_layers"] += 1
    (wrong / "config.json").write_text(json.dumps(config))
    message = r"base_num_layers: expected the model's \d+, got \d+; the head was made for another model"
    with pytest.raises(RuntimeError, match=message), serve(model, tmp_path / "log", speculative(wrong)):
        pass

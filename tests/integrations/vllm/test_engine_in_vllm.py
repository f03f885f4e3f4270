"""The plug-in in vLLM's engine, in this process: ``make vllm-test`` runs this where vLLM is installed."""

import json
import math
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.integrations.vllm.drafts import arguments, speculative, with_head_of
from tests.integrations.vllm.servers import ENVIRONMENT, UNBOUND

PROMPT = "Q: How many days are there in four weeks?\nA:"
LENGTH, NUM_TEXTS, LEAST_COUNT = 3, 1500, 5
TEMPERATURE = 0.9
MEDUSA = Path(__file__).parents[3] / "demo/heads/medusa/config.json"
OTHER = "the head was made for another model, 'backbone'"

pytestmark = pytest.mark.skipif("VLLM_TEST_MODEL" not in os.environ, reason="make vllm-test runs this")


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    """vLLM reads these when it is imported and when an engine starts."""
    own = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**ENVIRONMENT, **UNBOUND, **own}.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def draft() -> Path:
    return Path(os.environ["VLLM_TEST_DRAFT"])


def engine(speculative_config: dict[str, Any], **options: Any) -> Any:
    from vllm import LLM

    return LLM(
        model=os.environ["VLLM_TEST_MODEL"],
        dtype="float32",
        enforce_eager=True,
        distributed_executor_backend="uni",
        disable_log_stats=False,
        speculative_config=speculative_config,
        **options,
    )


def test_the_arguments_of_triton_s_backend(draft: Path) -> None:
    """The backend makes ``AsyncEngineArgs`` of model.json, which check the names; the engine's configuration
    checks the values, and reads both models' configurations."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    (written,) = (draft / "triton").glob("*/1/model.json")
    values = json.loads(written.read_text(encoding="utf-8"))
    assert values == arguments(draft)
    config = AsyncEngineArgs(**values).create_engine_config()
    assert config.speculative_config.method == "dflash"
    assert config.speculative_config.use_local_argmax_reduction
    assert config.speculative_config.draft_model_config.hf_config.architectures == ["DFlashCTCForCausalLM"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"base_num_layers": 7},
            f": base_num_layers: expected the model's 6, got 7; {OTHER}",
        ),
        (
            {"vocab_size": 5000},
            f": vocab_size: expected the model's 4096, got 5000; {OTHER}",
        ),
        (
            {"hidden_size": 256},
            f": hidden_size: expected the model's 512, got 256; {OTHER}",
        ),
        (
            {"frame_start": "anchor", **json.loads(MEDUSA.read_text(encoding="utf-8"))},
            "/config.json: ctc_speculator: drafter_type: expected ctc or block, got 'medusa'",
        ),
    ],
)
def test_a_wrong_head_is_one_line(
    draft: Path, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    wrong = with_head_of(draft, tmp_path / "wrong", **settings)
    with pytest.raises(ValueError, match="expected") as caught:
        engine(speculative(wrong))
    assert str(caught.value) == f"{wrong}{message}"


def test_a_head_s_own_directory_is_one_line_of_vllm_s() -> None:
    with pytest.raises(ValueError, match=r"Unrecognized model in .*/demo/heads/medusa\. "):
        engine({**speculative(Path(os.environ["VLLM_TEST_DRAFT"])), "model": str(MEDUSA.parent)})


def expand(
    values: Tensor, ends: Tensor, num_tokens: int, replace_from: float = 0, replace_to: float = 0
) -> Tensor:
    """Each sequence's value for each of its tokens; ends: of the sequences, [B]."""
    replaced = torch.where(values == replace_from, replace_to, values).to(values.dtype)
    return replaced.repeat_interleave(ends.diff(prepend=ends.new_zeros(1)), output_size=num_tokens)


def test_sampled_texts_have_the_model_s_distribution(draft: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chi-square over the continuations of ``LENGTH`` tokens that are frequent enough, and all others.

    vLLM's build for CPUs writes expanded temperatures into a copy, so that function is replaced here.
    """
    from transformers import AutoModelForCausalLM
    from vllm import SamplingParams
    from vllm.v1.sample import rejection_sampler

    monkeypatch.setattr(rejection_sampler, "expand_batch_to_tokens", expand)
    model = engine(speculative(draft), max_num_seqs=64, seed=1)
    prompt = model.get_tokenizer().encode(PROMPT)
    settings = SamplingParams(temperature=TEMPERATURE, max_tokens=LENGTH, n=NUM_TEXTS, ignore_eos=True)
    (answer,) = model.generate([{"prompt_token_ids": prompt}], settings, use_tqdm=False)
    values = {metric.name: getattr(metric, "value", 0) for metric in model.get_metrics()}
    accepted = values["vllm:spec_decode_num_accepted_tokens"] / values["vllm:spec_decode_num_drafts"]

    target = AutoModelForCausalLM.from_pretrained(os.environ["VLLM_TEST_MODEL"], dtype=torch.float32)
    expected = frequent(target, prompt)
    drawn = Counter(tuple(text.token_ids) for text in answer.outputs)
    found = [drawn[text] for text in expected]
    counts = [*expected.values(), NUM_TEXTS - sum(expected.values())]
    p = chi_square_p([*found, NUM_TEXTS - sum(found)], counts)
    print(
        f"\n{NUM_TEXTS} sampled texts, {len(counts)} cells, {counts[-1]:.0f} expected in the last: p of "
        f"chi-square {p:.2f}, {accepted:.2f} accepted drafts a pass"
    )
    assert p > 0.01
    assert accepted > 0.2


@torch.no_grad()
def frequent(model: Any, prompt: list[int]) -> dict[tuple[int, ...], float]:
    """The continuations that are expected at least ``LEAST_COUNT`` times, and how often."""
    texts = torch.empty(1, 0, dtype=torch.int64)
    counts = torch.tensor([NUM_TEXTS], dtype=torch.float64)
    for _ in range(LENGTH):
        ids = torch.cat((torch.tensor([prompt]).repeat(len(texts), 1), texts), 1)
        longer = counts.unsqueeze(1) * (model(ids).logits[:, -1].double() / TEMPERATURE).softmax(-1)
        row, token = (longer >= LEAST_COUNT).nonzero(as_tuple=True)
        texts, counts = torch.cat((texts[row], token.unsqueeze(1)), 1), longer[row, token]
    return dict(zip(map(tuple, texts.tolist()), counts.tolist(), strict=True))


def chi_square_p(found: list[int], expected: list[float]) -> float:
    """The probability of counts at least this far from the expected (Wilson and Hilferty's approximation)."""
    freedom = len(found) - 1
    statistic = sum((drawn - wanted) ** 2 / wanted for drawn, wanted in zip(found, expected, strict=True))
    spread = 2 / (9 * freedom)
    return 1 - NormalDist().cdf(((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread))


def test_the_chi_square_check_can_fail() -> None:
    """The 99 % quantile for 35 degrees of freedom is 57.34."""
    shift = math.sqrt(57.34 * 1000 / 2)
    found = [round(1000 + shift), round(1000 - shift), *[1000] * 34]
    assert chi_square_p(found, [1000.0] * 36) == pytest.approx(0.01, abs=0.001)

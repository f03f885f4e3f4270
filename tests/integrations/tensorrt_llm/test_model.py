"""The draft model in TensorRT-LLM drafts our runtime's chains, on stand-ins for the engine."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from drafters.parallel import ParallelDrafter
from export.draft_directory import draft_weights
from integrations.draft_directory import DraftError
from integrations.tensorrt_llm.model import DFlashCTCForCausalLM
from tests.integrations import demo_texts
from tests.integrations.chains import is_drafted, runtime_chain
from tests.integrations.tensorrt_llm.fake_tensorrt_llm import Worker, configurations, target_model
from tests.integrations.transformers.models import VOCAB_SIZE, make_head, make_model

NUM_DRAFTS, TOP_K = 3, 6
HEADS: dict[str, dict[str, Any]] = {
    "ctc": {},
    # More frames than a block of the engine has rows.
    "ctc-fused": {"frame_start": "fused", "transition": "mlp", "num_layers": 2, "num_frames": 7},
    "ctc-some-tokens": {"frame_start": "fused", "transition": "mlp", "draft_vocab_size": 40},
    "ctc-markov": {"transition": "markov"},
    "block": {"drafter_type": "block", "frame_start": "fused"},
    # As many frames as drafts.
    "block-markov": {"drafter_type": "block", "transition": "markov", "num_layers": 2, "num_frames": 3},
}


def load(head: ParallelDrafter, *, num_drafts: int = NUM_DRAFTS, top_k: int = TOP_K) -> DFlashCTCForCausalLM:
    """The draft model, as the engine builds and fills it."""
    target = target_model(head)
    model = DFlashCTCForCausalLM(*configurations(head, top_k=top_k, num_drafts=num_drafts))
    model.logits_processor = target.logits_processor  # type: ignore[method-assign, assignment]
    model.load_weights(draft_weights(head, torch.float32), weight_mapper=None)
    model.load_weights_from_target_model(target)
    return model


def compare(
    head: ParallelDrafter,
    texts: list[Tensor],
    anchors: list[Tensor],
    *,
    prompts: list[int],
    num_drafts: int,
    top_k: int,
    random: torch.Generator,
) -> int:
    """Decode texts together, with drafts that are rejected in between; the number of chains that were equal.

    texts: features [A, F*H] of every sequence; anchors: [A], the token after each of their positions
    prompts: positions that are read first, in two parts
    """
    model = load(head, num_drafts=num_drafts, top_k=top_k)
    # As in the engine, there is room for rejected drafts behind the longest text.
    size = max(len(text) for text in texts) + num_drafts
    worker = Worker(model, num_slots=len(texts) + 1, max_context=size, num_drafts=num_drafts)
    # The slots of the arena are in another order than the sequences, and one stays unused.
    slots = torch.arange(len(texts), 0, -1)
    for slot, text, length in zip(slots.tolist(), texts, prompts, strict=True):
        worker.read_prompt(slot, text[: length // 2])
        worker.read_prompt(slot, text[length // 2 : length])
    lengths, compared = torch.tensor(prompts), 0
    ends = torch.tensor([len(text) for text in texts])
    # The first step has no drafts of the head, so one token is accepted.
    accepted = torch.ones_like(lengths)
    while bool((lengths + accepted <= ends).all()):
        rows = torch.randn(len(texts), num_drafts + 1, head.config.feature_size, generator=random)
        for index, (text, start, count) in enumerate(zip(texts, lengths, accepted, strict=True)):
            rows[index, :count] = text[start : start + count]
        lengths = lengths + accepted
        roots = torch.stack([sequence[end - 1] for sequence, end in zip(anchors, lengths, strict=True)])
        drafts = worker.step(slots, rows, accepted, roots)
        for index, text in enumerate(texts):
            chain = runtime_chain(
                head,
                text[: lengths[index]],
                int(roots[index]),
                frames=head.config.num_frames,
                num_drafts=num_drafts,
                top_k=top_k,
            )
            assert is_drafted(drafts[index].tolist(), chain)
            compared += 1
        # The longest chains are rare, as they are in texts.
        most = torch.randint(1, num_drafts + 2, (2, len(texts)), generator=random)
        accepted = most.amin(0)
    return compared


@torch.no_grad()
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
@pytest.mark.parametrize("name", HEADS)
def test_chains_of_random_heads(name: str, model_type: str, batch: int) -> None:
    head = make_head(make_model(model_type), **HEADS[name])
    assert isinstance(head, ParallelDrafter)
    random = torch.Generator().manual_seed(batch)
    texts = [torch.randn(30 - index, head.config.feature_size, generator=random) for index in range(batch)]
    anchors = [torch.randint(VOCAB_SIZE, (len(text),), generator=random) for text in texts]
    prompts = [6, 3, 9, 4][:batch]
    assert compare(
        head, texts, anchors, prompts=prompts, num_drafts=NUM_DRAFTS, top_k=TOP_K, random=random
    ) >= (5 * batch)


@torch.no_grad()
@pytest.mark.parametrize("name", [*demo_texts.HEADS, "ctc-paper"])
def test_chains_of_the_demo_s_heads_on_real_texts(name: str) -> None:
    """At least 200 contexts of each head, of 4 texts that are decoded together and of one alone."""
    head, texts, anchors = demo_texts.demo_texts(name, count=5, length=185)
    random = torch.Generator().manual_seed(0)
    settings: dict[str, Any] = {"num_drafts": 8, "top_k": 16, "random": random}
    compared = compare(head, texts[:4], anchors[:4], prompts=[5, 12, 8, 20], **settings)
    compared += compare(head, texts[4:], anchors[4:], prompts=[7], **settings)
    assert compared >= 200


@torch.no_grad()
@pytest.mark.parametrize("name", ["ctc-some-tokens", "block-markov"])
def test_a_pass_has_fixed_shapes(name: str) -> None:
    """Nothing of a step reads a value on the host, which a CUDA graph could not capture.

    It is traced with tensors that have shapes and no values.
    """
    head = make_head(make_model("llama"), **HEADS[name])
    assert isinstance(head, ParallelDrafter)
    model = load(head)
    worker = Worker(model, num_slots=2, max_context=9, num_drafts=NUM_DRAFTS)

    def step(features: Tensor, accepted: Tensor, anchors: Tensor) -> Tensor:
        return worker.step(torch.tensor([1, 0]), features, accepted, anchors)

    features = torch.zeros(2, NUM_DRAFTS + 1, head.config.feature_size)
    traced = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(
        features, torch.ones(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    )
    assert not [node for node in traced.graph.nodes if "_local_scalar_dense" in str(node.target)]


def test_the_weights_are_checked() -> None:
    head = make_head(make_model("llama"), frame_start="fused")
    assert isinstance(head, ParallelDrafter)
    model = DFlashCTCForCausalLM(*configurations(head, top_k=TOP_K, num_drafts=NUM_DRAFTS))
    weights = draft_weights(head, torch.float32)
    with pytest.raises(DraftError, match="expected a head's weights, got 'other' among them"):
        model.load_weights({"other": torch.zeros(1), **weights})
    del weights["start.fuse.weight"]
    with pytest.raises(DraftError, match=r"expected the weight 'start.fuse.weight', got none"):
        model.load_weights(weights)
    with pytest.raises(DraftError, match=r"^draft: load_format: expected auto, because the head has no"):
        model.load_weights_from_target_model(target_model(head))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_drafts": 9}, "^draft: max_draft_len: expected 1 to 4, the head's frames, got 9$"),
        ({"attention_backend": "TRTLLM"}, "^draft: attention_backend: expected VANILLA, .*, got 'TRTLLM'$"),
        ({"pp_size": 2}, "^draft: pipeline_parallel_size: expected 1, .*, got 2$"),
    ],
)
def test_a_refusal_is_one_line(changes: dict[str, Any], message: str) -> None:
    head = make_head(make_model("llama"))
    with pytest.raises(DraftError, match=message):
        DFlashCTCForCausalLM(*configurations(head, **{"top_k": TOP_K, "num_drafts": NUM_DRAFTS, **changes}))


def test_heads_of_other_models_and_other_directories_are_refused() -> None:
    head = make_head(make_model("llama"))
    model_config, draft_config = configurations(head, top_k=TOP_K, num_drafts=NUM_DRAFTS)
    model_config.pretrained_config.num_hidden_layers = 7
    with pytest.raises(DraftError, match=r"^draft: base_num_layers: expected the model's 7, got 2; the head"):
        DFlashCTCForCausalLM(model_config, draft_config)
    del draft_config.pretrained_config.ctc_speculator
    with pytest.raises(DraftError, match=r"^draft/config.json: expected the key 'ctc_speculator'"):
        DFlashCTCForCausalLM(model_config, draft_config)


def test_logits_that_are_split_among_devices_are_refused() -> None:
    head = make_head(make_model("llama"))
    assert isinstance(head, ParallelDrafter)
    model = load(head)
    model.lm_head.weight.data = model.lm_head.weight.data[: VOCAB_SIZE // 2]
    with pytest.raises(DraftError, match=r"LM head: expected logits of all 60 tokens on .*, got 30"):
        model._token_logits(torch.zeros(1, head.config.hidden_size))

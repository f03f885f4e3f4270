"""The draft model drafts the chain of the head that it was made of, on stand-ins for vLLM's layers."""

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from drafters.parallel import ParallelDrafter
from export.draft_directory import draft_weights
from integrations.draft_directory import DraftError
from tests.integrations.chains import is_drafted, runtime_chain
from tests.integrations.transformers.models import VOCAB_SIZE, make_head, make_model
from tests.integrations.vllm import fake_vllm

NUM_DRAFTS, BLOCK_SIZE, TOP_K = 3, 4, 6
TABLE = torch.tensor([[7, 2, 5, 11, 13], [3, 1, 9, 4, 12]])
HEADS: dict[str, dict[str, Any]] = {
    "ctc": {},
    "ctc-fused": {"frame_start": "fused", "transition": "mlp", "num_layers": 2},
    "ctc-some-tokens": {"frame_start": "fused", "transition": "mlp", "draft_vocab_size": 40},
    "ctc-markov": {"transition": "markov"},
    "block": {"drafter_type": "block", "frame_start": "fused"},
    "block-markov": {"drafter_type": "block", "transition": "markov", "num_layers": 2},
}


def vllm_config(head: ParallelDrafter, **changes: Any) -> Any:
    config = head.config
    target = SimpleNamespace(
        get_vocab_size=lambda: config.vocab_size,
        get_hidden_size=lambda: config.hidden_size,
        get_total_num_hidden_layers=lambda: config.base_num_layers,
    )
    hf_config = SimpleNamespace(ctc_speculator={"head": config.to_dict(), "top_k": TOP_K, "shape": "chain"})
    speculative = SimpleNamespace(
        draft_model_config=SimpleNamespace(hf_config=hf_config, model="draft"),
        target_model_config=target,
        num_speculative_tokens=NUM_DRAFTS,
        use_local_argmax_reduction=True,
    )
    vars(speculative).update(changes)
    return SimpleNamespace(
        model_config=target,
        speculative_config=speculative,
        parallel_config=SimpleNamespace(pipeline_parallel_size=1),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=32, max_num_seqs=2),
        cache_config=SimpleNamespace(block_size=BLOCK_SIZE, num_slots=14 * BLOCK_SIZE),
    )


def load(head: ParallelDrafter, monkeypatch: pytest.MonkeyPatch) -> Any:
    module = fake_vllm.load(monkeypatch)
    model = module.DFlashCTCForCausalLM(vllm_config=vllm_config(head))
    loaded = model.load_weights(draft_weights(head, torch.float32).items())
    assert loaded == {name for name, _ in model.named_parameters()}
    # As vLLM shares the target model's.
    model.model.embed_tokens.weight.data = head.embed_tokens
    model.lm_head.weight.data = head.lm_head
    return model


@torch.no_grad()
@pytest.mark.parametrize("name", HEADS)
def test_chains_step_by_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sequences grow by different numbers; rejected rows come with the accepted ones, as in vLLM."""
    head = make_head(make_model("llama"), **HEADS[name])
    assert isinstance(head, ParallelDrafter)
    model = load(head, monkeypatch)
    # Of the module that the model was loaded from.
    slots_before = importlib.import_module("integrations.vllm.model").slots_before
    frames = NUM_DRAFTS + 1
    random = torch.Generator().manual_seed(1)
    texts: list[Tensor] = [torch.empty(0, head.config.feature_size)] * 2
    for counts, rejected in (((6, 3), (0, 0)), ((3, 2), (2, 0)), ((1, 4), (0, 3))):
        states, positions, slots = [], [], []
        for index, (count, lost) in enumerate(zip(counts, rejected, strict=True)):
            rows = torch.randn(count, head.config.feature_size, generator=random)
            where = torch.arange(len(texts[index]), len(texts[index]) + count)
            states.append(rows)
            positions.append(where)
            slots.append(slots_before(where + 1, TABLE[index].expand(count, -1), BLOCK_SIZE))
            texts[index] = torch.cat((texts[index], rows[: count - lost]))
        combined = model.combine_hidden_states(torch.cat(states))
        model.precompute_and_store_context_kv(combined, torch.cat(positions), torch.cat(slots))
        anchors = torch.randint(VOCAB_SIZE, (2,), generator=random)
        lengths = torch.tensor([len(text) for text in texts])
        input_ids = torch.zeros(2, frames, dtype=torch.int64)
        input_ids[:, 0] = anchors
        queries = lengths.unsqueeze(1) + torch.arange(frames)
        query_slots = [
            slots_before(row + 1, TABLE[index].expand(frames, -1), BLOCK_SIZE)
            for index, row in enumerate(queries)
        ]
        metadata = fake_vllm.Metadata(TABLE, lengths + frames, torch.cat(query_slots))
        names = model.get_draft_kv_cache_layer_names()
        monkeypatch.setattr(fake_vllm.CONTEXT, "attn_metadata", dict.fromkeys(names, metadata))
        hidden = model(input_ids.flatten(), queries.flatten())
        is_mask = (torch.arange(2 * frames) % frames) > 0
        drafts = model.get_top_tokens(hidden[is_mask]).view(2, NUM_DRAFTS).tolist()
        for index, text in enumerate(texts):
            chain = runtime_chain(
                head, text, int(anchors[index]), frames=frames, num_drafts=NUM_DRAFTS, top_k=TOP_K
            )
            assert is_drafted(drafts[index], chain)


def test_passes_that_measure_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without slots nothing is written, and the rows need not be whole sequences."""
    head = make_head(make_model("llama"), frame_start="fused")
    assert isinstance(head, ParallelDrafter)
    model = load(head, monkeypatch)
    rows = torch.zeros(5, head.config.hidden_size)
    model.precompute_and_store_context_kv(rows, torch.arange(5))
    assert (model.model.last_context.slots == -1).all()
    monkeypatch.setattr(fake_vllm.Attention, "forward", lambda self, query, key, value: query)
    found = model(torch.zeros(6, dtype=torch.int64), torch.arange(6))
    assert found.shape == (6, 1)


def test_a_chain_without_drafts_has_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """All frames are surely blanks. The engine embeds the drafts, whatever they are."""
    head = make_head(make_model("llama"))
    assert isinstance(head, ParallelDrafter)
    model = load(head, monkeypatch)
    model.model.blank.bias.data.fill_(1e4)
    monkeypatch.setattr(fake_vllm.Attention, "forward", lambda self, query, key, value: query)
    found = model(torch.zeros(8, dtype=torch.int64), torch.arange(8))
    assert found.min() >= 0


def test_weights_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    head = make_head(make_model("llama"), frame_start="fused")
    assert isinstance(head, ParallelDrafter)
    model = load(head, monkeypatch)
    weights = draft_weights(head, torch.float32)
    with pytest.raises(DraftError, match=r"expected a head's weights, got 'other' among them"):
        model.load_weights([("other", torch.zeros(1))])
    del weights["start.fuse.weight"]
    with pytest.raises(DraftError, match=r"expected the weight 'start.fuse.weight', got none"):
        model.load_weights(weights.items())


def test_a_refusal_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    head = make_head(make_model("llama"))
    assert isinstance(head, ParallelDrafter)
    module = fake_vllm.load(monkeypatch)
    with pytest.raises(DraftError, match=r"^draft: num_speculative_tokens: expected 1 to .*, got 99$"):
        module.DFlashCTCForCausalLM(vllm_config=vllm_config(head, num_speculative_tokens=99))

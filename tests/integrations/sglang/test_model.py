"""The draft model and the hooks in SGLang draft our runtime's chains, on stand-ins for the engine."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from drafters.parallel import ParallelDrafter
from export.draft_directory import draft_weights
from integrations.draft_directory import DraftError
from integrations.sglang import hooks
from integrations.sglang.plugin import VERSIONS, register
from tests.integrations import demo_texts
from tests.integrations.chains import is_drafted, runtime_chain
from tests.integrations.sglang import fake_sglang
from tests.integrations.transformers.models import VOCAB_SIZE, make_head, make_model

BLOCK_SIZE, TOP_K = 4, 6
HEADS: dict[str, dict[str, Any]] = {
    "ctc": {},
    "ctc-fused": {"frame_start": "fused", "transition": "mlp", "num_layers": 2, "num_frames": 7},
    "ctc-some-tokens": {"frame_start": "fused", "transition": "mlp", "draft_vocab_size": 40},
    "block": {"drafter_type": "block", "frame_start": "fused"},
    "block-markov": {"drafter_type": "block", "transition": "markov", "num_layers": 2},
}


def load(head: ParallelDrafter, monkeypatch: pytest.MonkeyPatch, top_k: int = TOP_K) -> Any:
    """The draft model, as SGLang builds it after it has loaded the plug-in."""
    found = fake_sglang.install(monkeypatch)
    register()
    config = SimpleNamespace(ctc_speculator={"head": head.config.to_dict(), "top_k": top_k, "shape": "chain"})
    model = found.models["DFlashCTCForCausalLM"](config)
    model.load_weights(draft_weights(head, torch.float32).items())
    return model


class Requests:
    """Requests in the engine, by their places, and what the worker has read of them.

    sources: of every place the features [A, F*H] of a text and the tokens [A] after them
    """

    def __init__(
        self, head: ParallelDrafter, worker: Any, sources: dict[int, tuple[Tensor, Tensor]], top_k: int
    ):
        self.head, self.worker, self.sources, self.top_k = head, worker, sources, top_k
        self.random = torch.Generator().manual_seed(1)
        self.lengths = dict.fromkeys(sources, 0)

    def prompt(self, parts: dict[int, int]) -> None:
        """Read the next part of some prompts, of these lengths."""
        starts = [self.lengths[place] for place in parts]
        rows = [
            self.sources[place][0][start : start + length]
            for (place, length), start in zip(parts.items(), starts, strict=True)
        ]
        batch = SimpleNamespace(
            req_pool_indices=torch.tensor(list(parts)),
            seq_lens=torch.tensor(starts),
            extend_lens=torch.tensor(list(parts.values())),
            features=torch.cat(rows),
        )
        assert self.worker.forward_batch_generation(batch) is None
        for place, length in parts.items():
            self.lengths[place] += length

    def step(self, accepted: dict[int, int]) -> None:
        """Draft for some requests, compare, and go on by these numbers of tokens; other rows are noise."""
        block = self.worker.block_size
        lengths = [self.lengths[place] for place in accepted]
        anchors = torch.stack([self.sources[p][1][n - 1] for p, n in zip(accepted, lengths, strict=True)])
        rows = torch.randn(len(lengths), block, self.head.config.feature_size, generator=self.random)
        for index, (place, count) in enumerate(accepted.items()):
            rows[index, :count] = self.sources[place][0][lengths[index] : lengths[index] + count]
        batch = SimpleNamespace(
            req_pool_indices=torch.tensor(list(accepted)),
            seq_lens=torch.tensor(lengths),
            extend_lens=None,
            features=rows,
            anchors=anchors,
            accepted=torch.tensor(list(accepted.values())),
        )
        drafts = self.worker.forward_batch_generation(batch).tolist()
        for index, (place, count) in enumerate(accepted.items()):
            chain = runtime_chain(
                self.head,
                self.sources[place][0][: lengths[index]],
                int(anchors[index]),
                frames=block,
                num_drafts=block - 1,
                top_k=self.top_k,
            )
            assert is_drafted(drafts[index], chain)
            self.lengths[place] += count


@torch.no_grad()
@pytest.mark.parametrize("uses_graphs", [True, False])
@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
@pytest.mark.parametrize("name", HEADS)
def test_chains(name: str, model_type: str, uses_graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in parts and alone between steps, batches of 1 to 4, drafts that are rejected."""
    head = make_head(make_model(model_type), **HEADS[name])
    assert isinstance(head, ParallelDrafter)
    model = load(head, monkeypatch)
    worker = fake_sglang.worker_class()(model, head, BLOCK_SIZE, uses_graphs=uses_graphs)
    worker.init_cuda_graphs()
    random = torch.Generator().manual_seed(2)
    sources = {
        place: (
            torch.randn(20, head.config.feature_size, generator=random),
            torch.randint(VOCAB_SIZE, (20,), generator=random),
        )
        for place in (4, 1, 0, 3)
    }
    requests = Requests(head, worker, sources, TOP_K)
    requests.prompt({4: 5, 1: 3})
    requests.step({4: 2, 1: 1})
    requests.prompt({0: 2})  # a prompt's first part, which is no end of a context
    requests.step({1: 4})
    requests.prompt({0: 4, 3: 1})
    requests.step({3: 1, 4: 3, 0: 1, 1: 2})
    requests.step({4: 1, 0: 4, 1: 1, 3: 2})


@torch.no_grad()
@pytest.mark.parametrize("name", demo_texts.HEADS)
def test_chains_of_the_demo_s_heads_on_real_texts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """200 contexts of 4 texts that are decoded together."""
    head, texts, following = demo_texts.demo_texts(name, count=4, length=120)
    model = load(head, monkeypatch, top_k=16)
    worker = fake_sglang.worker_class()(model, head, min(9, head.config.num_frames), uses_graphs=True)
    worker.req_to_token = torch.randperm(600).view(4, 150)
    for layer in model.layers:
        layer.attn.pool = layer.attn.pool.new_zeros(600, *layer.attn.pool.shape[1:])
    worker.init_cuda_graphs()
    requests = Requests(head, worker, dict(enumerate(zip(texts, following, strict=True))), 16)
    requests.prompt({0: 3, 1: 9, 2: 1, 3: 5})
    random = torch.Generator().manual_seed(0)
    for _ in range(50):
        counts = torch.randint(1, 10, (3, 4), generator=random).amin(0)
        requests.step(dict(enumerate(counts.clamp(max=2).tolist())))


@torch.no_grad()
def test_other_draft_models_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    head = make_head(make_model("llama"))
    fake_sglang.install(monkeypatch)
    register()
    other = SimpleNamespace(
        set_block_size=lambda size: None,
        candidate_selector=None,
        lilicorr=None,
        supports_fused_context_kv=False,
        project_target_hidden=lambda features: features,
        layers=[],
    )
    worker = fake_sglang.worker_class()(other, head, BLOCK_SIZE, uses_graphs=True)
    worker.init_cuda_graphs()
    assert worker._draft_sampler == "the engine's"
    none = torch.zeros(0, 1)
    assert worker._greedy_sample_from_vocab_parallel_head(hidden_states=none, lm_head=None) == "the engine's"
    batch = SimpleNamespace(
        req_pool_indices=torch.tensor([0]),
        seq_lens=torch.tensor([0]),
        extend_lens=torch.tensor([2]),
        features=torch.zeros(2, 4),
    )
    worker.forward_batch_generation(batch)


@pytest.mark.parametrize(("wanted", "expected"), [([0, 2], [0, 2]), ([2], [2]), ([0, 1], [0, 1])])
def test_the_last_layer_is_handed_over(
    wanted: list[int], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a decoder with three layers. Without the hooks, there is nothing behind the last one."""
    fake_sglang.install(monkeypatch)
    register()
    outputs = [torch.full((2, 3), float(index)) for index in range(3)]
    model = fake_sglang.target_class()(outputs)
    model.set_dflash_layers_to_capture(wanted)
    hidden, found = model.model.forward()
    assert torch.equal(hidden, -outputs[2])
    assert [row[0, 0].item() for row in found] == expected
    assert not hooks._found


def test_a_pass_before_the_target_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes that measure memory have no drafts, and one without rows returns none."""
    head = make_head(make_model("llama"), frame_start="fused")
    assert isinstance(head, ParallelDrafter)
    model = load(head, monkeypatch)
    monkeypatch.setattr(fake_sglang.RadixAttention, "forward", lambda self, query, *rest: query)
    model.set_block_size(BLOCK_SIZE)
    ids = torch.zeros(8, dtype=torch.int64)
    batch = SimpleNamespace(req_pool_indices=torch.zeros(2, dtype=torch.int64))
    found = model(ids, ids, batch, input_embeds=torch.zeros(8, head.config.hidden_size))
    assert found.hidden_states.shape == (8, 1)
    assert model(ids[:0], ids[:0], batch, input_embeds=torch.zeros(0, 64)).hidden_states.shape == (0, 1)


def test_refusals_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    head = make_head(make_model("llama"))
    assert isinstance(head, ParallelDrafter)
    model = load(head, monkeypatch)
    worker = fake_sglang.worker_class()(model, head, BLOCK_SIZE, uses_graphs=True)
    with pytest.raises(DraftError, match=r"^draft model: speculative_num_draft_tokens: expected 2 to 4, the"):
        model.set_block_size(5)
    runner = worker.model_runner
    runner.model.lm_head.shard_indices.num_added_elements = 3
    with pytest.raises(DraftError, match=r"^draft model: lm_head: expected no added tokens, got 3$"):
        worker.init_cuda_graphs()
    runner.model.lm_head = SimpleNamespace(weight=torch.zeros(4, dtype=torch.int8))
    with pytest.raises(DraftError, match=r"^draft model: lm_head: .* got one that is quantised$"):
        worker.init_cuda_graphs()
    runner.model_config.num_hidden_layers = 7
    with pytest.raises(DraftError, match=r"^draft model: base_num_layers: expected the model's 7, got 2; "):
        worker.init_cuda_graphs()
    monkeypatch.setattr(fake_sglang.PARALLEL, "attn_dp_enabled", True)
    with pytest.raises(DraftError, match=r"^draft model: enable_dp_attention: expected false"):
        worker.init_cuda_graphs()


def test_another_version_registers_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = fake_sglang.install(monkeypatch, version="0.5.22")
    register()
    assert not found.hooks
    assert not found.models
    (message,) = caplog.messages
    assert message.startswith("ctc-speculator: expected SGLang 0.5.23 (read, never run), got 0.5.22; ")


@pytest.mark.parametrize("version", ["0.5.23", "0.5.23.post1"])
def test_versions_that_are_supported(version: str) -> None:
    assert VERSIONS.problem(version) is None


@pytest.mark.parametrize("version", ["0.5.230", "0.5.24", "0.6.0", None])
def test_versions_that_are_not(version: str | None) -> None:
    assert VERSIONS.problem(version) is not None

"""The draft graph for TensorRT Edge-LLM drafts our runtime's chains, beside an engine written in numpy."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drafters.attention import AttentionFrames
from export.build_engines import main
from export.graphs import dflash
from export.graphs.dflash import DFlashGraph, draft_contract
from tests.conftest import Once
from tests.integrations.edge_llm.engine import Arrays, Graph, attend, check_chains, write_pages
from tests.integrations.edge_llm.standard import check_compiles, onnx_runtime, write_standard
from tests.integrations.transformers.models import make_head, make_model

FRAMES, TOP_K, MAX_LENGTH = 3, 6, 150
# Prompts' lengths; 126 and the tokens behind it lie on two pages.
LENGTHS = (126, 1, 40, 7)
# Tokens by which the texts grow in the steps; the other drafts are rejected.
ACCEPTED = ((3, 1, 2, 4), (1, 4, 1, 2))
HEADS: dict[str, dict[str, Any]] = {
    "ctc": {},
    # Frames begin alike and are sure of themselves.
    "ctc-repeats": {"num_frames": 7, "transition": "markov"},
    # Most frames are blanks.
    "ctc-blanks": {"num_frames": 7},
    "ctc-fused": {"frame_start": "fused", "transition": "mlp", "num_layers": 2, "num_frames": 7},
    "ctc-some-tokens": {"frame_start": "fused", "transition": "mlp", "draft_vocab_size": 40},
    "block": {"drafter_type": "block", "frame_start": "fused"},
    "block-markov": {"drafter_type": "block", "transition": "markov", "num_layers": 2},
}
Make = Callable[..., Any]


@torch.no_grad()
def attention_head(name: str) -> AttentionFrames:
    head = make_head(make_model("llama"), **HEADS[name])
    assert isinstance(head, AttentionFrames)
    if name == "ctc-repeats":
        head.frame_queries.copy_(head.frame_queries[:1].expand_as(head.frame_queries))
        head.norm.weight.mul_(10)
    if name == "ctc-blanks":
        assert isinstance(head.blank, nn.Linear)
        nn.init.constant_(head.blank.bias, 4.0)
    return head


def eager(head: AttentionFrames, num_sequences: int, monkeypatch: pytest.MonkeyPatch) -> Graph:
    """The module of a head's graph in float32, with the engine's operators in numpy."""
    config = head.config

    def update(key: Tensor, value: Tensor, pool: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        names = ("rope_cos_sin", "positions", "token_to_sequence")
        delta = [inputs[f"dflash_delta_{name}"] for name in names]
        tensors = (key, value, pool, *delta, inputs["kv_page_table"])
        return torch.from_numpy(write_pages(*(tensor.numpy() for tensor in tensors)))

    def attend_pages(qkv: Tensor, pool: Tensor, inputs: dict[str, Tensor], _: Any) -> tuple[Tensor, ...]:
        names = ["query_lengths", "rope_rotary_cos_sin", "past_lengths", "kv_page_table"]
        names += ["packed_attention_mask", "query_start_offsets"]
        tensors = (qkv, pool, *(inputs[name] for name in names))
        found = attend(
            *(tensor.numpy() for tensor in tensors),
            num_q_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_size=config.head_dim,
            scale=config.head_dim**-0.5,
        )
        return tuple(map(torch.from_numpy, found))

    monkeypatch.setattr(dflash, "update_pages", update)
    monkeypatch.setattr(dflash, "attend_pages", attend_pages)
    module = DFlashGraph(head, TOP_K, torch.float32)
    contract = draft_contract(config)
    names = [tensor.name for tensor in contract.inputs]
    caches = [name for name in names if name.startswith("past_key_values_")]
    outputs = [tensor.name for tensor in contract.outputs]

    def compute(inputs: Arrays) -> Arrays:
        tensors = {name: torch.from_numpy(inputs[name]) for name in names}
        found = module({n: tensors[n] for n in names if n not in caches}, [tensors[n] for n in caches])
        return {name: tensor.numpy() for name, tensor in zip(outputs, found, strict=True)}

    dtypes = {t.name: "int32" if t.dtype == "int32" else "float32" for t in contract.inputs}
    pool = (config.num_kv_heads, config.head_dim)
    return Graph(compute, dtypes, pool, num_sequences, MAX_LENGTH, config.rope_theta)


def check_random_texts(graph: Graph, head: AttentionFrames, *, block: int | None = None) -> None:
    """Prompts of different lengths in one batch, then steps of which some drafts are rejected."""
    random = torch.Generator().manual_seed(3)
    size = graph.num_sequences
    features = torch.randn(size, MAX_LENGTH, head.config.feature_size, generator=random)
    texts = torch.randint(head.config.vocab_size, (size, MAX_LENGTH), generator=random)
    grown = [step[:size] for step in ACCEPTED]
    check_chains(graph, head, features, texts, LENGTHS[:size], grown, top_k=TOP_K, block=block)


@torch.no_grad()
@pytest.mark.parametrize("num_sequences", [1, 4])
@pytest.mark.parametrize("name", HEADS)
def test_chains(name: str, num_sequences: int, monkeypatch: pytest.MonkeyPatch) -> None:
    head = attention_head(name)
    check_random_texts(eager(head, num_sequences, monkeypatch), head)


@torch.no_grad()
@pytest.mark.parametrize("name", ["ctc-blanks", "block-markov"])
def test_blocks_of_fewer_tokens_than_frames(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    head = attention_head(name)
    check_random_texts(eager(head, 4, monkeypatch), head, block=3)


@pytest.fixture(scope="session")
def draft(make_tiny_head: Make, tiny_model_dir: Path, once: Once) -> tuple[AttentionFrames, Path]:
    """A head, and the directory that is written of it."""
    head = make_tiny_head(frame_start="fused", transition="mlp", num_frames=FRAMES)

    def write(directory: Path) -> None:
        head.save_pretrained(directory / "head")
        command = ["--model", str(tiny_model_dir), "--drafter", str(directory / "head")]
        options = ["--target", "edge-llm", "--top-k", str(TOP_K), "--out", str(directory / "draft")]
        assert main([*command, *options]) == 0

    return head, once("edge-llm-draft", write) / "draft"


@torch.no_grad()
@pytest.mark.parametrize("num_sequences", [1, 4])
def test_the_file_s_chains(draft: tuple[AttentionFrames, Path], num_sequences: int) -> None:
    head, directory = draft
    graph = Graph.load(directory / "model.onnx", num_sequences, MAX_LENGTH, head.config.rope_theta)
    check_random_texts(graph, head)


@torch.no_grad()
def test_the_file_compiles_without_plug_ins(draft: tuple[AttentionFrames, Path], tmp_path: Path) -> None:
    """The plug-ins' nodes are replaced by standard operators here; with these, the file drafts the same."""
    head, directory = draft
    path = write_standard(directory / "model.onnx", tmp_path / "model.onnx")
    check_random_texts(onnx_runtime(path, 4, MAX_LENGTH, head.config.rope_theta), head)
    pytest.importorskip("tensorrt_rtx_bindings", exc_type=ImportError)
    check_compiles(path, head.config, max_length=256)

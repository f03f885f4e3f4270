"""Random models of every supported family, each exported once per session."""

import re
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from runtime.core.bundle import MANIFEST_NAME, Bundle, BundleManifest, GraphSpec
from runtime.core.token_tree import TokenTree
from runtime.decode.step import HostStep
from runtime.decoder import SpeculativeDecoder
from runtime.engines.recorder import NullRecorder
from tests.conftest import Once

if TYPE_CHECKING:
    from export.verify.runner import GraphRunner

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 1,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
GEMMA3_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
}
HALF_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
# Shorter than the prompt of the checks.
WINDOW = {"sliding_window": 8}
# This one also ends inside a tree, where the slot of a key is not its position.
SHORT_WINDOW = {"sliding_window": 2}
# For a model whose layers are all alike and whose wiring another model shows: a layer takes seconds to trace.
ONE_LAYER = {"num_hidden_layers": 1}


@dataclass(frozen=True)
class Case:
    """A model configuration and what its graph is expected to hold.

    rotated_layers: layers with a rotary embedding, None for all
    rotations: rotary embeddings of a layer: 1 if the heads of Q and K are rotated together, which norms of
        each, one matrix of Q, K and V, or heads far wider than the hidden state prevent
    rotary_bases: rotary embeddings of different frequencies
    routers: layers that choose among experts
    """

    name: str
    model_type: str
    settings: dict[str, Any] = field(default_factory=dict)
    attention: str = "invariant"
    norms_per_layer: int = 2
    rotated_layers: int | None = None
    rotations: int = 1
    rotary_bases: int = 1
    routers: int = 0

    @property
    def tied(self) -> bool:
        return bool(self.settings.get("tie_word_embeddings", False))


CASES = {
    case.name: case
    for case in (
        Case("llama", "llama"),
        Case(
            "llama-linear-tied",
            "llama",
            {"rope_parameters": LINEAR_ROPE, "tie_word_embeddings": True, **ONE_LAYER},
        ),
        Case(
            "llama3-primitive", "llama", {"rope_parameters": LLAMA3_ROPE, **ONE_LAYER}, attention="primitive"
        ),
        Case("mistral", "mistral", {**SHORT_WINDOW, **ONE_LAYER}, attention="fused"),
        # The second of two layers has a window.
        Case(
            "qwen2-tied",
            "qwen2",
            {"use_sliding_window": True, "max_window_layers": 1, "tie_word_embeddings": True, **WINDOW},
        ),
        # Query and key norms, and heads wider than hidden_size / heads.
        Case(
            "qwen3-tied",
            "qwen3",
            {"head_dim": 32, "tie_word_embeddings": True, **ONE_LAYER},
            attention="grouped",
            norms_per_layer=4,
            rotations=2,
        ),
        Case("olmo2", "olmo2", ONE_LAYER, norms_per_layer=4, rotations=2),
        Case("phi3", "phi3", {"sliding_window": None, **ONE_LAYER}, rotations=2),
        # Only half of each head is rotated.
        Case(
            "phi3-half-primitive",
            "phi3",
            {"rope_parameters": HALF_ROPE, **WINDOW, **ONE_LAYER},
            attention="primitive",
            rotations=2,
        ),
        # A window in every other layer, the first included. The soft caps are low enough to bend every score.
        Case(
            "gemma2-tied",
            "gemma2",
            {
                "head_dim": 32,
                "query_pre_attn_scalar": 24,
                "attn_logit_softcapping": 2.0,
                "final_logit_softcapping": 3.0,
                "tie_word_embeddings": True,
                **WINDOW,
            },
            attention="primitive",
            norms_per_layer=4,
        ),
        Case(
            "gemma2-invariant",
            "gemma2",
            {"attn_logit_softcapping": 2.0, **WINDOW, **ONE_LAYER},
            norms_per_layer=4,
            rotations=2,
        ),
        # Layers with a window have a rotary base of their own.
        Case(
            "gemma3",
            "gemma3_text",
            {
                "head_dim": 32,
                "query_pre_attn_scalar": 24,
                "rope_parameters": GEMMA3_ROPE,
                "layer_types": ["sliding_attention", "full_attention"],
                **WINDOW,
            },
            norms_per_layer=6,
            rotary_bases=2,
            rotations=2,
        ),
        Case("smollm3", "smollm3", {"no_rope_layers": [1, 0]}, rotated_layers=1),
        Case(
            "granite",
            "granite",
            {
                "embedding_multiplier": 3.0,
                "attention_multiplier": 0.4,
                "residual_multiplier": 0.7,
                "logits_scaling": 5.0,
                **ONE_LAYER,
            },
        ),
        Case("mixtral", "mixtral", {"num_local_experts": 4, **WINDOW, **ONE_LAYER}, routers=1),
        # A layer without experts, then one with them, whose routing weights do not add up to one.
        Case(
            "qwen3-moe",
            "qwen3_moe",
            {
                "head_dim": 32,
                "num_experts": 8,
                "num_experts_per_tok": 3,
                "moe_intermediate_size": 32,
                "mlp_only_layers": [0],
            },
            norms_per_layer=4,
            routers=1,
            rotations=2,
        ),
    )
}


@pytest.fixture(scope="session")
def make_model(
    tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, dict[str, Any]], Path]:
    """Write a random model of a type and settings, with the tiny tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    def make(model_type: str, settings: dict[str, Any]) -> Path:
        directory = tmp_path_factory.mktemp(model_type) / "model"
        values = {**SIZES, "vocab_size": 258, "tie_word_embeddings": False, **settings}
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **values)).save_pretrained(
            directory
        )
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(tiny_model_dir / name, directory)
        return directory

    return make


@pytest.fixture(scope="session")
def assert_interface() -> Callable[[Path, GraphSpec], None]:
    """Check that a stored graph has the inputs and outputs of a contract, with the contract's axis names."""

    def check(path: Path, contract: GraphSpec) -> None:
        graph = onnx.load(path, load_external_data=False).graph
        for values, tensors in ((graph.input, contract.inputs), (graph.output, contract.outputs)):
            assert [value.name for value in values] == [tensor.name for tensor in tensors]
            for value, tensor in zip(values, tensors, strict=True):
                kind = value.type.tensor_type
                shape = tuple(axis.dim_param or axis.dim_value for axis in kind.shape.dim)
                assert (value.name, shape) == (tensor.name, tensor.shape)
                assert onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type) == np.dtype(tensor.dtype)
        # Inside the graph, axes may also be sums of named ones.
        known = {size for tensor in contract.inputs for size in tensor.shape if isinstance(size, str)}
        known |= {size for tensor in contract.outputs for size in tensor.shape if isinstance(size, str)}
        for value in graph.value_info:
            for axis in value.type.tensor_type.shape.dim:
                assert set(re.findall(r"[A-Za-z]\w*", axis.dim_param)) <= known | {"Min"}, value.name

    return check


@pytest.fixture(scope="session")
def open_graph() -> Callable[[Path, str], "GraphRunner"]:
    """``open_graph(bundle, "backbone")``: a fresh runner of one of a bundle's graphs, changed or not."""
    from export.quantisation.precision import Precision
    from export.verify.runner import GraphRunner, onnx_runner

    def open_one(bundle: Path, name: str) -> GraphRunner:
        manifest = BundleManifest.from_json((bundle / MANIFEST_NAME).read_text(encoding="utf-8"))
        return onnx_runner(bundle / f"{name}.onnx", manifest.graphs[name], Precision("float32"))

    return open_one


@dataclass(frozen=True)
class Exported:
    case: Case
    model_dir: Path
    drafter_dir: Path | None
    bundle: Bundle


@pytest.fixture(scope="session", params=list(CASES.values()), ids=list(CASES))
def exported(
    request: pytest.FixtureRequest,
    make_model: Callable[[str, dict[str, Any]], Path],
    tiny_model_dir: Path,
    tiny_drafter_dir: Path,
    tiny_bundle_dir: Path,
    copied_graphs: Callable[..., AbstractContextManager[None]],
    once: Once,
) -> Exported:
    """Each supported family as a bundle, without a draft head unless it is the tiny model's."""
    from export.build_engines import build
    from export.options import Options

    case: Case = request.param
    if case.name == "llama":
        return Exported(case, tiny_model_dir, tiny_drafter_dir, Bundle.load(tiny_bundle_dir))
    # A soft cap makes fused attention primitive without being asked to.
    capped = "attn_logit_softcapping" in case.settings and case.attention == "primitive"
    options = Options(attention="fused" if capped else case.attention)

    def make(parent: Path) -> None:
        make_model(case.model_type, case.settings).rename(parent / "model")
        with copied_graphs():
            build(parent / "model", parent / "bundle", options=options)

    parent = once(f"family-{case.name}", make)
    return Exported(case, parent / "model", None, Bundle.load(parent / "bundle"))


@pytest.fixture(scope="session")
def first_tree() -> Callable[[SpeculativeDecoder, NDArray[np.int64], int], TokenTree]:
    """The draft after a prompt that is read in chunks of the given size."""

    def draft(decoder: SpeculativeDecoder, prompt: NDArray[np.int64], size: int) -> TokenTree:
        runner = decoder.batch.runner
        assert isinstance(runner, HostStep)
        decoder.batch.clear()
        for start in range(0, prompt.size, size):
            chunk = prompt[start : start + size]
            output = runner.target_model.prefill(chunk, start)
            runner.proposer.append_context([0], [chunk], output.features)
        (tree,) = runner.proposer.propose([int(output.next_tokens[0, 0])], 12, NullRecorder())
        return tree

    return draft

"""Graphs of speculative streams through layers with and without a sliding window."""

from pathlib import Path

import numpy as np
import pytest

from export.errors import ExportError
from export.forms import GraphForm
from export.heads import prepare_drafter
from export.options import STREAM_PASSES, Options
from export.pipeline import write_graph
from export.quantisation.precision import Precision
from export.verify.runner import onnx_runner
from runtime.core.bundle import ModelSpec
from tests.drafters.test_streaming import HIDDEN, LAYERS, VOCAB_SIZE, make_head, make_model

CONTEXT = 48


@pytest.mark.parametrize("stream_pass", STREAM_PASSES)
def test_every_layer_has_its_own_window(stream_pass: str, tmp_path: Path) -> None:
    """A window of 8 in one upper layer and none in the other; texts are longer, and trees reach over it."""
    model = make_model("gemma2-tied", sliding_window=8)
    types = model.config.layer_types[1:]
    assert set(types) == {"full_attention", "sliding_attention"}
    head = make_head(model)
    spec = ModelSpec(
        name="gemma2",
        architecture="Gemma2ForCausalLM",
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN,
        num_layers=LAYERS,
        num_kv_heads=model.config.num_key_value_heads,
        head_dim=model.config.head_dim,
        max_position_embeddings=CONTEXT,
        feature_size=HIDDEN,
        eos_token_ids=(),
        bos_token_id=None,
        prompt_prefix="",
        prompt_suffix="",
    )
    prepared = prepare_drafter(head, Options(stream_pass=stream_pass), spec)
    form = GraphForm(Precision("float32"), "float32")
    graph, _ = write_graph(
        prepared.module, prepared.contract, tmp_path / "graph.onnx", form, lambda message: None
    )
    features = np.random.default_rng(0).standard_normal((24, HIDDEN)).astype(np.float32)

    def largest_difference() -> float:
        differences = prepared.check(features)(onnx_runner(graph.path, graph.contract, graph.precision))
        return max(value for name, value in differences.items() if name != "equal_argmax")

    assert largest_difference() < 1e-4
    # The window is a part of what was compared.
    model.config.sliding_window = 1000
    for layer in model.get_decoder().layers:
        layer.self_attn.sliding_window = 1000
    with pytest.raises(ExportError, match=r"differs? from PyTorch"):
        largest_difference()

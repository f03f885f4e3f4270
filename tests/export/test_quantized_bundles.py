"""Bundles of quantised graphs: they equal PyTorch with rounded weights, and decode losslessly."""

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from export.build_engines import build, main
from export.errors import ExportError
from export.options import Options
from export.quantisation import choose_smoothing, weights
from runtime.core.bundle import Bundle, GraphSpec
from runtime.decoder import SpeculativeDecoder
from runtime.engines.ort import session_options
from tests.checkpoint_files import write_gguf
from tests.conftest import Once

TEXT = "What is the sum of 12 and 30?"
# Products of a layer whose attention is invariant: scores, their weights' sum, values.
ATTENTION_PRODUCTS = 3


def kinds(path: Path) -> Counter[str]:
    graph = onnx.load(path, load_external_data=False).graph
    assert {node.domain for node in graph.node} <= {"", "ai.onnx"}
    return Counter(node.op_type for node in graph.node)


def decode(bundle: Path, method: str) -> tuple[list[int], int]:
    """The text, and in how many steps it was written."""
    decoder = SpeculativeDecoder.from_bundle(bundle, method=method, num_threads=1, num_nodes=8)
    prompt = decoder.prompt_tokenizer.encode(TEXT)
    chunks = [c.token_ids for c in decoder.stream(prompt, max_new_tokens=24, stop_token_ids=())]
    return [token for chunk in chunks for token in chunk], len(chunks)


@pytest.mark.parametrize(
    ("name", "precision", "width", "lm_heads"),
    # The draft LM head of 120 tokens is one product with the transition's 128 columns.
    [("ctc-mlp", "int4", 248, 1), ("ctc-mlp", "int8", 248, 1), ("medusa", "int4", 258, 4)],
)
def test_a_rounded_head_drafts_the_same_text(
    name: str,
    precision: str,
    width: int,
    lm_heads: int,
    trained_heads_dir: Path,
    make_tiny_bundle: Callable[..., Path],
    assert_interface: Callable[[Path, GraphSpec], None],
) -> None:
    exact = make_tiny_bundle(trained_heads_dir / name)
    rounded = make_tiny_bundle(trained_heads_dir / name, Options(drafter_precision=precision))
    manifest = Bundle.load(rounded).manifest
    assert manifest.drafter is not None
    assert (manifest.precision, manifest.drafter.precision, manifest.quality) == ("fp32", precision, None)
    assert_interface(rounded / "drafter.onnx", manifest.graphs["drafter"])
    assert kinds(exact / "drafter.onnx")["DequantizeLinear"] == 0
    graph = onnx.load(rounded / "drafter.onnx", load_external_data=False).graph
    stored = {tensor.name: tensor for tensor in graph.initializer}
    codes = [stored[node.input[0]] for node in graph.node if node.op_type == "DequantizeLinear"]
    kind = onnx.TensorProto.INT4 if precision == "int4" else onnx.TensorProto.INT8
    assert {tensor.data_type for tensor in codes} == {kind}
    columns = Counter(tensor.dims[1] for tensor in codes)
    assert columns[width] == lm_heads
    assert 1 not in columns  # the blank's logit
    # A file that is written again keeps the permissions of the others.
    assert len({path.stat().st_mode for path in rounded.iterdir()}) == 1

    text, plain_steps = decode(exact, "plain")
    assert decode(exact, "draft")[0] == text
    rounded_text, steps = decode(rounded, "draft")
    assert rounded_text == text
    assert steps < 0.75 * plain_steps


@pytest.mark.parametrize("precision", ["int4", "int8"])
def test_a_rounded_target_model(
    precision: str,
    trained_heads_dir: Path,
    make_tiny_bundle: Callable[..., Path],
    assert_interface: Callable[[Path, GraphSpec], None],
) -> None:
    """The build has compared both files with PyTorch; speculation gives plain decoding's text."""
    options = Options(precision, drafter_precision=precision, quantize_embedding=True)
    bundle = make_tiny_bundle(trained_heads_dir / "ctc", options)
    manifest = Bundle.load(bundle).manifest
    assert manifest.precision == precision
    for name in ("backbone", "drafter"):
        assert kinds(bundle / f"{name}.onnx")["DequantizeLinear"] > 5
        assert_interface(bundle / f"{name}.onnx", manifest.graphs[name])
    found = kinds(bundle / "backbone.onnx")
    assert found["MatMul"] == found["DequantizeLinear"] + ATTENTION_PRODUCTS * manifest.model.num_layers
    quality = manifest.quality
    assert quality is not None
    assert (quality["text"], quality["num_tokens"]) == ("quality_text.txt", 511)
    assert 0.5 < quality["perplexity"] / quality["perplexity_fp32"] < 2
    # Random weights have no favourite token, so int4 changes most of them.
    assert (0.85 if precision == "int8" else 0.1) < quality["same_greedy"] < 1
    assert decode(bundle, "plain")[0] == decode(bundle, "draft")[0]


def test_inputs_that_would_lose_too_much_are_rotated(
    tiny_model_dir: Path,
    tiny_drafter_dir: Path,
    tiny_bundle_dir: Path,
    copied_graphs: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some inputs stay as they are, and the others are rotated."""
    monkeypatch.setitem(choose_smoothing.MOST_NOISE, "int8", 5e-4)
    with copied_graphs(backbone=tiny_bundle_dir, drafter=tiny_bundle_dir):
        build(tiny_model_dir, tmp_path / "bundle", drafter_dir=tiny_drafter_dir, options=Options("int8"))
    graph = onnx.load(tmp_path / "bundle" / "backbone.int8.onnx", load_external_data=False).graph
    assert "DequantizeLinear" not in {node.op_type for node in graph.node}
    num_rounded = sum(node.op_type == "QuantizeLinear" for node in graph.node)
    assert 1 <= sum("hadamard" in node.input for node in graph.node) < num_rounded
    tokens = decode(tmp_path / "bundle", "plain")[0]
    assert decode(tmp_path / "bundle", "draft")[0] == tokens
    # Sums of whole numbers are the same with unsigned weights, which processors without VNNI read.
    monkeypatch.setattr("runtime.engines.ort.adds_in_32_bits", lambda: False)
    assert decode(tmp_path / "bundle", "draft")[0] == tokens


@pytest.mark.parametrize("name", ["backbone", "drafter"])
def test_how_the_runtime_computes_products(
    name: str, trained_heads_dir: Path, make_tiny_bundle: Callable[..., Path], tmp_path: Path
) -> None:
    """In float32 for a target model; with integers for a draft head, for every quantised weight."""
    options = Options("int4", drafter_precision="int4", quantize_embedding=True)
    path = make_tiny_bundle(trained_heads_dir / "ctc", options) / f"{name}.onnx"
    session = session_options(1, int8_products=name == "drafter")
    session.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    ort.InferenceSession(path, session)
    graph = onnx.load(tmp_path / "optimized.onnx", load_external_data=False).graph
    found = Counter(node.op_type for node in graph.node)
    assert found["DequantizeLinear"] == 0
    levels = [a.i for node in graph.node for a in node.attribute if a.name == "accuracy_level"]
    assert levels == ([] if name == "backbone" else [4] * kinds(path)["DequantizeLinear"])


def test_a_corrupt_scale_leaves_no_bundle(
    tiny_model_dir: Path,
    tiny_bundle_dir: Path,
    tiny_drafter_dir: Path,
    copied_graphs: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """PyTorch gets the weights that were meant, and the file has others."""
    insert = weights._dequantize

    def corrupt(graph: ir.Graph, *arguments: Any) -> Any:
        result: Any = insert(graph, *arguments)
        scales = result.producer().inputs[1]
        scales.const_value = ir.tensor(scales.const_value.numpy() * np.float32(1.01), name=scales.name)
        return result

    monkeypatch.setattr(weights, "_dequantize", corrupt)
    with (
        copied_graphs(backbone=tiny_bundle_dir, drafter=tiny_bundle_dir),
        pytest.raises(ExportError, match="prefill logits: the graph differs from PyTorch by"),
    ):
        build(tiny_model_dir, tmp_path / "bundle", drafter_dir=tiny_drafter_dir, options=Options("int8"))
    assert list(tmp_path.iterdir()) == []


def test_a_kept_lm_head(
    tiny_model_dir: Path,
    tiny_drafter_dir: Path,
    tiny_bundle_dir: Path,
    copied_graphs: Callable[..., Any],
    tmp_path: Path,
) -> None:
    with copied_graphs(backbone=tiny_bundle_dir, drafter=tiny_bundle_dir):
        options = Options("int8", lm_head="float")
        build(tiny_model_dir, tmp_path / "bundle", drafter_dir=tiny_drafter_dir, options=options)
    found = kinds(tmp_path / "bundle" / "backbone.onnx")
    assert found["MatMul"] == found["DequantizeLinear"] + 1 + ATTENTION_PRODUCTS * 2


@pytest.fixture(scope="module")
def tied(
    make_model: Callable[[str, dict[str, Any]], Path],
    make_tiny_head: Callable[..., Any],
    copied_graphs: Callable[..., Any],
    once: Once,
) -> Path:
    """A model whose matrices have partial blocks, a head for it, and their bundle in float32."""

    def make(parent: Path) -> None:
        settings = {"tie_word_embeddings": True, "num_hidden_layers": 1, "intermediate_size": 80}
        make_model("llama", settings).rename(parent / "model")
        make_tiny_head(base_num_layers=1, target_layer_ids=(0,)).save_pretrained(parent / "head")
        with copied_graphs():
            build(parent / "model", parent / "bundle", drafter_dir=parent / "head")

    return once("tied-model", make)


@pytest.mark.parametrize(
    ("quantize_table", "lm_head", "kind", "num_blocks"),
    [(False, None, onnx.TensorProto.INT8, 1), (True, "same", onnx.TensorProto.INT4, 2)],
)
def test_a_tied_model(
    quantize_table: bool,
    lm_head: str | None,
    kind: int,
    num_blocks: int,
    tied: Path,
    copied_graphs: Callable[..., Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The LM head is a quantised copy, in int8 unless told, and the embedding, which a draft
    head reads too, stays as asked for.

    Partial blocks stay as they are, which the build says.
    """
    options = Options("int4", drafter_precision="int8", quantize_embedding=quantize_table, lm_head=lm_head)
    with copied_graphs(backbone=tied / "bundle", drafter=tied / "bundle"):
        build(tied / "model", tmp_path / "bundle", drafter_dir=tied / "head", options=options)
    assert "1 kept: no multiple of 32 rows" in capsys.readouterr().err
    graph = onnx.load(tmp_path / "bundle" / "backbone.onnx", load_external_data=False).graph
    tables = {tuple(t.dims): t.data_type for t in graph.initializer if 258 in t.dims}
    assert tables.pop((64, 258)) == kind
    assert tables.pop((num_blocks, 258)) == onnx.TensorProto.FLOAT
    assert tables.pop((258, 64)) == (onnx.TensorProto.INT8 if quantize_table else onnx.TensorProto.FLOAT)
    assert decode(tmp_path / "bundle", "plain")[0] == decode(tmp_path / "bundle", "draft")[0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "--quality-text: .* cannot be read as UTF-8 text: .*No such file"),
        (b"\xff\xfe", "--quality-text: .* cannot be read as UTF-8 text: "),
        (b"x", r"--quality-text: text\.txt must have at least two tokens, got 1"),
    ],
)
@pytest.mark.parametrize("flag", ["--quality-text", "--calibration-text"])
def test_bad_texts(
    flag: str,
    content: bytes | None,
    message: str,
    tiny_model_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = tmp_path / "text.txt"
    if content is not None:
        text.write_bytes(content)
    arguments = ["--model", tiny_model_dir, "--out", tmp_path / "out", "--precision", "int8"]
    assert main([*map(str, arguments), flag, str(text)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert re.search(message.replace("--quality-text", flag), lines[-1])
    assert any("loading" in line for line in lines) == (content == b"x")
    assert not (tmp_path / "out").exists()


def test_quality_is_of_the_text(
    tiny_model_dir: Path,
    tiny_drafter_dir: Path,
    tiny_bundle_dir: Path,
    copied_graphs: Callable[..., Any],
    tmp_path: Path,
) -> None:
    (tmp_path / "text.txt").write_text("Twelve words.", encoding="utf-8")
    options = Options("int8", quality_text=tmp_path / "text.txt")
    with copied_graphs(backbone=tiny_bundle_dir, drafter=tiny_bundle_dir):
        bundle = build(tiny_model_dir, tmp_path / "bundle", drafter_dir=tiny_drafter_dir, options=options)
    quality = bundle.manifest.quality
    assert quality is not None
    assert (quality["text"], quality["num_tokens"]) == ("text.txt", 12)


def test_blocks_are_not_balanced_on_a_text(
    tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("Twelve words.", encoding="utf-8")
    command = ["--model", str(tiny_model_dir), "--out", str(tmp_path / "bundle"), "--precision", "int8"]
    command += ["--int8-scales", "blocks", "--calibration-text", str(tmp_path / "text.txt")]
    assert main(command) == 2
    assert "--calibration-text: is for --int8-scales columns" in capsys.readouterr().err
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize(("kind", "precision"), [("Q8_0", "int8"), ("Q4_0", "int4")])
def test_codes_are_not_rounded_by_a_text(
    tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, precision: str
) -> None:
    (tmp_path / "text.txt").write_text("Twelve words.", encoding="utf-8")
    write_gguf(tiny_model_dir, tmp_path / "x.gguf", kind)
    command = ["--model", str(tmp_path / "x.gguf"), "--out", str(tmp_path / "bundle")]
    command += ["--precision", precision]
    assert main([*command, "--calibration-text", str(tmp_path / "text.txt")]) == 2
    assert "--calibration-text: is for float weights, and this model has codes" in capsys.readouterr().err

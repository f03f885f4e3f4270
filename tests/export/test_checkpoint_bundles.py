"""Bundles of quantised checkpoints: what a form can hold is kept exactly, and the build says what is not."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.numpy_helper
import pytest
import torch
from numpy.typing import NDArray

from drafters.checkpoints.loading import load_config, load_model
from drafters.checkpoints.stored import Codes, StoredTensor
from drafters.target_models import weights_digest
from export.build_engines import build
from export.options import Options
from export.quantisation.precision import WeightForm
from export.quantisation.quality import warning
from export.quantisation.stored import StoredWeights
from export.quantisation.weights import digest
from runtime.core.bundle import Bundle
from runtime.decoder import SpeculativeDecoder
from tests.checkpoint_files import GPTQ, gptq, write_gguf, write_quantized
from tests.conftest import Once

TEXT = "What is the sum of 12 and 30?"
NUM_MATRICES = 8  # of a layer, and the LM head
Copied = Callable[..., AbstractContextManager[None]]


@pytest.fixture(scope="module")
def one_layer(make_model: Callable[[str, dict[str, Any]], Path], once: Once) -> Path:
    """A model whose layers would all be alike, and a layer takes seconds to trace."""

    def write(parent: Path) -> None:
        settings = {"num_hidden_layers": 1, "initializer_range": 0.3}
        make_model("llama", settings).rename(parent / "model")

    return once("one-layer", write) / "model"


@pytest.fixture(scope="module")
def file_of(one_layer: Path, copied_graphs: Copied, once: Once) -> Callable[[str], tuple[Path, Path]]:
    """The model as a GGUF file of a form, and a bundle of it whose graph need not be traced again."""

    def write(form: str, parent: Path) -> None:
        write_gguf(one_layer, parent / "tiny.gguf", form)
        with copied_graphs():
            build(parent / "tiny.gguf", parent / "bundle")

    def get(form: str) -> tuple[Path, Path]:
        parent = once(f"gguf-{form}", lambda parent: write(form, parent))
        return parent / "tiny.gguf", parent / "bundle"

    return get


def graph_matrices(path: Path) -> list[NDArray[np.float32]]:
    """The matrices [K, N] of a graph's DequantizeLinear nodes, computed as the standard says."""
    graph = onnx.load(path).graph
    stored = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    found = []
    for node in graph.node:
        if node.op_type != "DequantizeLinear":
            continue
        codes, scales = (stored[name].astype(np.float32) for name in node.input)
        (block,) = (attribute.i for attribute in node.attribute if attribute.name == "block_size")
        found.append(codes * np.repeat(scales, block, axis=0))
    return found


def plain_text(bundle: Path, count: int = 16) -> tuple[list[int], list[int]]:
    """A prompt and its greedy continuation."""
    decoder = SpeculativeDecoder.from_bundle(bundle, method="plain", num_threads=1)
    prompt = decoder.prompt_tokenizer.encode(TEXT)
    chunks = [chunk.token_ids for chunk in decoder.stream(prompt, max_new_tokens=count, stop_token_ids=())]
    return [int(token) for token in prompt], [token for chunk in chunks for token in chunk]


@torch.no_grad()
def greedy(model: Any, prompt: list[int], count: int = 16) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize(
    ("form", "precision"), [("Q8_0", "int8"), ("Q4_0", "int4"), ("Q4_0", "int8"), ("gptq", "int4")]
)
def test_what_is_kept_exactly(
    form: str,
    precision: str,
    one_layer: Path,
    file_of: Callable[[str], tuple[Path, Path]],
    copied_graphs: Copied,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Every column of the graph's matrices is bit for bit a row of the file's, and the text is PyTorch's."""
    traced: dict[str, Path] = {}
    if form == "gptq":
        path = tmp_path / "tiny"
        write_quantized(one_layer, path, GPTQ | {"group_size": 64}, functools.partial(gptq, group=64))
    else:
        path, traced["backbone"] = file_of(form)
    options = Options(precision, lm_head="float" if form == "gptq" else None, float_products=True)
    with copied_graphs(**traced):
        bundle = build(path, tmp_path / "bundle", options=options)
    model = load_model(path, load_config(path), dtype=torch.float32)
    matrices = graph_matrices(bundle.path / "backbone.onnx")
    # Products with the same rows are one, so columns are compared. A product with a code of zero may have
    # either sign of zero, which adding zero takes away.
    kept = [weight.numpy() for name, weight in model.state_dict().items() if weight.ndim == 2]
    known = {digest(row[None] + 0) for weight in kept for row in weight}
    columns = [digest(column[None] + 0) for matrix in matrices for column in matrix.T]
    assert len(columns) == sum(len(weight) for weight in kept) - len(kept[0]) * (1 + (form == "gptq"))
    assert set(columns) <= known
    prompt, text = plain_text(bundle.path)
    assert text == greedy(model, prompt)
    manifest = bundle.manifest
    assert manifest.model.name == "tiny"
    assert manifest.quality is not None
    assert manifest.quality["same_greedy"] == 1
    assert manifest.quality["perplexity"] == manifest.quality["perplexity_fp32"]
    error = capsys.readouterr().err
    kind = "GPTQ int4" if form == "gptq" else form
    assert (
        f"quantised tensors of the checkpoint: {NUM_MATRICES - (form == 'gptq')} of {kind} kept exactly in "
        f"{precision}" in error
    )
    # The embedding is looked up in a table of floats.
    assert ("1 of" in error and "dequantised to float" in error) == (form != "gptq")


def test_what_is_dequantised(
    one_layer: Path,
    file_of: Callable[[str], tuple[Path, Path]],
    copied_graphs: Copied,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Minima have no place in int8, and floats hold everything."""
    write_gguf(one_layer, tmp_path / "x.gguf", "Q4_1")
    build(tmp_path / "x.gguf", tmp_path / "bundle", options=Options("int8"))
    assert f"checkpoint: {NUM_MATRICES + 1} of Q4_1 dequantised to float" in capsys.readouterr().err
    path, bundle = file_of("Q8_0")
    capsys.readouterr()
    with copied_graphs(backbone=bundle):
        build(path, tmp_path / "bundle")
    assert f"checkpoint: {NUM_MATRICES + 1} of Q8_0 dequantised to float" in capsys.readouterr().err


def stored(codes: Any, scales: Any, kind: str = "x") -> StoredTensor:
    return StoredTensor(kind, lambda: Codes(torch.tensor(codes), torch.tensor(scales, dtype=torch.float32)))


def test_which_forms_hold_which_codes() -> None:
    """Whole groups, codes in the range, and scales that the activations' type holds."""
    random = np.random.default_rng(0)
    codes = random.integers(-8, 8, (6, 64)).astype(np.int8)
    codes[0, 0] = -8
    scales = random.uniform(1, 2, (6, 2)).astype(np.float16).astype(np.float32) * [1, -1]
    scales[3, 1] = 0
    tensor = stored(codes, scales)
    matrix = tensor.dequantized().numpy().T

    def holds(form: WeightForm, scale_dtype: str = "float32", given: StoredTensor = tensor) -> bool:
        weights = given.dequantized().numpy().T
        found = StoredWeights([given]).find(weights, form, scale_dtype)
        if found is not None:
            np.testing.assert_array_equal(found.dequantized(), weights)
            assert (found.scales != 0).all()
        return found is not None

    assert all(holds(WeightForm(dtype, 32)) for dtype in ("int4", "int8"))
    assert holds(WeightForm("int4", 16))
    assert not holds(WeightForm("int4", 64))
    wide = stored(random.integers(-8, 8, (6, 256)).astype(np.int8), random.uniform(1, 2, (6, 2)))
    assert holds(WeightForm("int4", 128), given=wide)
    assert not holds(WeightForm("int8", None))
    assert not holds(WeightForm("fp8", 32))
    assert holds(WeightForm("int4", 32), "float16")
    assert not holds(WeightForm("int4", 32), "bfloat16")
    wide = stored(codes * 8, scales[:, :1])
    assert holds(WeightForm("int8", None), given=wide)
    assert holds(WeightForm("int8", 32), given=wide)
    assert not holds(WeightForm("int4", 32), given=wide)
    # Rows of several tensors in another order, one row of which no file has.
    both = StoredWeights([tensor, wide])
    joined = np.concatenate((wide.dequantized().numpy(), matrix.T))[::-1].T
    found = both.find(joined, WeightForm("int8", 32), "float32")
    assert found is not None
    np.testing.assert_array_equal(found.dequantized(), joined)
    assert both.report(WeightForm("int8", 32)).endswith("2 of x kept exactly in int8")
    assert both.find(joined + np.float32(1), WeightForm("int8", 32), "float32") is None


def test_a_head_of_the_converted_directory_fits_the_file(
    file_of: Callable[[str], tuple[Path, Path]],
    make_tiny_head: Callable[..., Any],
    copied_graphs: Copied,
    tmp_path: Path,
) -> None:
    path, traced = file_of("Q8_0")
    model = load_model(path, dtype=torch.float32)
    model.save_pretrained(tmp_path / "directory")
    directory_digest = weights_digest(load_model(tmp_path / "directory", dtype=torch.float32))
    head = make_tiny_head(base_weights=directory_digest, base_num_layers=1, target_layer_ids=(0,))
    head.save_pretrained(tmp_path / "head")
    with copied_graphs(backbone=traced):
        bundle = build(path, tmp_path / "bundle", drafter_dir=tmp_path / "head", options=Options("int8"))
    assert Bundle.load(bundle.path).manifest.drafter is not None


def test_a_warning_says_what_helps() -> None:
    assert warning(0.9, "int4") is None
    text = warning(0.8999, "int4")
    assert text is not None
    assert text.startswith("warning: the model in int4 prefers the same token as the float model at 90.0% of")
    assert "less than 90%; what helps: --precision int8; --lm-head float; --calibration-text" in text
    other = warning(0.5, "int8")
    assert other is not None
    assert "--precision int8" not in other

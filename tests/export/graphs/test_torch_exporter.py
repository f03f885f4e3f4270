"""The exporter to ONNX without needless work: composites, promoted types, the table of forms, rules."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from onnxscript.rewriter import RewriteRule
from torch import Tensor, nn
from torch.export import ExportedProgram

from export.graphs.torch_exporter import make_registry
from export.graphs.trace import trace
from runtime.core.bundle import GraphSpec, TensorSpec

CONTRACT = GraphSpec(
    (TensorSpec("rows", ("B", "N", 12), "float32"), TensorSpec("marks", ("B", "N"), "bool")),
    (TensorSpec("result", ("B", "N", 12), "float32"),),
)


class Graph(nn.Module):
    """A module of the contract that computes a function."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]):
        super().__init__()
        self.function = function

    def forward(self, tensors: dict[str, Tensor], caches: list[Tensor]) -> Tensor:
        return self.function(tensors["rows"], tensors["marks"])


def written_into(rows: Tensor, marks: Tensor) -> Tensor:
    copy = rows.clone()
    copy[:, :, :3] += 1
    return copy


def calls_of(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> list[Any]:
    """The objects whose method is called from now on, a call each."""
    calls: list[Any] = []
    real = getattr(owner, name)

    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        calls.append(self)
        return real(self, *arguments, **options)

    monkeypatch.setattr(owner, name, call)
    return calls


@pytest.fixture
def retraced(monkeypatch: pytest.MonkeyPatch) -> list[ExportedProgram]:
    """The programs that PyTorch traced a second time."""
    return calls_of(monkeypatch, ExportedProgram, "run_decompositions")


def check(function: Callable[[Tensor, Tensor], Tensor], path: Path) -> ir.Model:
    """The graph of a function, which computes what PyTorch does, with other sizes than the trace's."""
    module = Graph(function)
    model = trace(module, CONTRACT)
    ir.save(model, path)
    session = ort.InferenceSession(path)
    for batch, nodes in ((1, 1), (3, 5)):
        rows = torch.arange(batch * nodes * 12, dtype=torch.float32).reshape(batch, nodes, 12) / 7
        marks = rows[..., 0] > 3
        (found,) = session.run(None, {"rows": rows.numpy(), "marks": marks.numpy()})
        np.testing.assert_allclose(found, module({"rows": rows, "marks": marks}, []).numpy(), rtol=1e-6)
    return model


@pytest.mark.parametrize(
    "function",
    [
        lambda rows, marks: rows.to(torch.float32) + 1,
        lambda rows, marks: rows.to(torch.int64).to(torch.float32),
        lambda rows, marks: rows.to(torch.float32),
        lambda rows, marks: rows.transpose(0, 1).reshape(rows.shape[1], -1).reshape(rows.shape),
        lambda rows, marks: rows.unflatten(-1, (3, 4)).transpose(2, 3).flatten(2),
        lambda rows, marks: rows.flatten(0, 1).unflatten(0, rows.shape[:2]) * 2,
        lambda rows, marks: (rows.transpose(0, 1).flatten() * 2).unflatten(0, (-1, 12)).reshape(rows.shape),
        lambda rows, marks: torch.cat(rows.chunk(3, -1)[::-1], -1),
        lambda rows, marks: rows.chunk(1, -1)[0] * 2,
        lambda rows, marks: 1 - rows,
        lambda rows, marks: torch.where(((rows > 2) & marks[..., None]) | (rows < 1), rows, 0.0),
        lambda rows, marks: torch.where((rows > 2) ^ marks[..., None], rows, 0.0),
    ],
)
def test_composites_are_replaced_in_place(
    function: Callable[[Tensor, Tensor], Tensor], retraced: list[ExportedProgram], tmp_path: Path
) -> None:
    model = check(function, tmp_path / "graph.onnx")
    assert not retraced
    # A copy that a view needs in PyTorch is none in a graph.
    assert "Identity" not in {node.op_type for node in model.graph} or len(list(model.graph)) == 1


@pytest.mark.parametrize(
    "function",
    [
        lambda rows, marks: rows * marks[..., None],
        lambda rows, marks: rows.long() / 3 + rows,
        lambda rows, marks: torch.where(marks[..., None], rows, 1) - rows.long(),
        lambda rows, marks: 2 - rows.long() * 1.5,
    ],
)
def test_types_are_promoted(
    function: Callable[[Tensor, Tensor], Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nodes that no promotion concerns are not run again."""
    ran = calls_of(monkeypatch, torch.fx.Interpreter, "call_function")
    model = check(function, tmp_path / "graph.onnx")
    assert 0 < len(ran) <= 2 * sum(node.op_type == "Cast" for node in model.graph)


@pytest.mark.parametrize("function", [written_into, lambda rows, marks: torch.rsub(rows, 1.0, alpha=2)])
def test_other_programs_are_traced_again(
    function: Callable[[Tensor, Tensor], Tensor], retraced: list[ExportedProgram], tmp_path: Path
) -> None:
    """What writes into a tensor, and what has no ONNX form until it is decomposed."""
    before = make_registry.cache_info()
    check(function, tmp_path / "graph.onnx")
    assert len(retraced) == 1
    after = make_registry.cache_info()
    assert after.hits + after.misses > before.hits + before.misses
    assert after.misses == 1


def test_rules_simplify_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is tried on its kind of node, and the graph is the one in which all are tried on all nodes."""

    def function(rows: Tensor, marks: Tensor) -> Tensor:
        turned = rows.transpose(1, 2).transpose(1, 2).unsqueeze(0).squeeze(0)
        return torch.where(marks[..., None], turned * 1, turned + 0).reshape(-1).reshape(rows.shape)

    tried = calls_of(monkeypatch, RewriteRule, "try_rewrite")
    found = check(function, tmp_path / "graph.onnx")
    few = len(tried)
    monkeypatch.setattr("export.graphs.torch_exporter._kinds", lambda rule: None)
    expected = check(function, tmp_path / "expected.onnx")
    assert [node.op_type for node in found.graph] == [node.op_type for node in expected.graph]
    assert 0 < few < (len(tried) - few) / 4

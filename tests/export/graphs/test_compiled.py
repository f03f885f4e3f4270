"""The compiled operators against numpy and against the standard operators in whose place they stand."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from export.graphs.compiled import ATTENTION, PRODUCT, ROTARY_ATTENTION
from runtime.engines.operators import DOMAIN, operator_library
from runtime.engines.ort import session_options
from tests.export.quantisation.test_quantization import matrix

pytestmark = pytest.mark.skipif(
    operator_library() is None, reason="this machine does not compile the operators"
)

FLOAT, BOOL, INT64 = TensorProto.FLOAT, TensorProto.BOOL, TensorProto.INT64
Arrays = dict[str, NDArray[Any]]
DEPTH, WIDTH = 128, 37


def session_of(
    operator: str,
    inputs: Mapping[str, int],
    outputs: list[str],
    constants: Arrays,
    names: list[str],
    **attributes: Any,
) -> ort.InferenceSession:
    """A session of one operator, whose inputs are ``names`` in order; an empty name is a missing input."""
    node = helper.make_node(operator, names, outputs, domain=DOMAIN, **attributes)
    graph = helper.make_graph(
        [node],
        "operator",
        [helper.make_tensor_value_info(name, dtype, None) for name, dtype in inputs.items()],
        [helper.make_tensor_value_info(name, FLOAT, None) for name in outputs],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    opsets = [helper.make_opsetid("", 24), helper.make_opsetid(DOMAIN, 1)]
    options = session_options(2, int8_products=True)
    options.register_custom_ops_library(str(operator_library()))
    model = helper.make_model(graph, opset_imports=opsets, ir_version=11)
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


# ---- Products ----


class Weights:
    """Random weights [DEPTH, WIDTH] and a product with them."""

    def __init__(self, bits: int, block: int, *switches: str):
        random = np.random.default_rng(bits)
        self.bits, self.block, self.switches = bits, block, switches
        self.norm = random.uniform(0.5, 2, DEPTH).astype(np.float32)
        self.scales = random.uniform(0.01, 0.1, (DEPTH // block, WIDTH)).astype(np.float32)
        if "halves" in switches:
            self.scales = self.scales.astype(np.float16).astype(np.float32)
        if bits == 32:
            self.values = random.standard_normal((DEPTH, WIDTH)).astype(np.float32)
            codes = self.values.T if "transposed" in switches else self.values
            content = np.ascontiguousarray(codes).view(np.uint8).ravel()
        else:
            most = 2 ** (bits - 1)
            codes = random.integers(-most, most, (DEPTH, WIDTH)).astype(np.int8)
            self.values = (codes * np.repeat(self.scales, block, axis=0)).astype(np.float32)
            content = codes.view(np.uint8).ravel()
            if bits == 4:
                content = np.bitwise_or(content[::2] & 15, content[1::2] << 4).astype(np.uint8)
        names = ["rows", "codes", "scales" if bits < 32 else "", "norm" if "normed" in switches else "", ""]
        inputs = {"rows": FLOAT}
        if "added" in switches:
            names[4] = "others"
            inputs["others"] = FLOAT
        flags = dict.fromkeys(("transposed", "normed", "gated", "rotated", "added"), 0)
        flags |= {switch: 1 for switch in switches if switch in flags}
        self.session = session_of(
            PRODUCT,
            inputs,
            ["result"],
            {"codes": content, "scales": self.scales, "norm": self.norm},
            names,
            bits=bits,
            depth=DEPTH,
            width=WIDTH,
            epsilon=1e-5,
            **flags,
        )

    def run(self, rows: NDArray[np.float32], others: NDArray[np.float32]) -> NDArray[np.float32]:
        feeds = {"rows": rows} | ({"others": others} if "added" in self.switches else {})
        result: NDArray[np.float32] = self.session.run(None, feeds)[0]
        return result

    def expected(self, rows: NDArray[np.float32], others: NDArray[np.float32]) -> NDArray[np.float64]:
        x = rows.astype(np.float64)
        if "normed" in self.switches:
            x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * self.norm
        if "gated" in self.switches:
            gate, up = np.split(x, 2, axis=-1)
            x = gate / (1 + np.exp(-gate)) * up
        if "rotated" in self.switches:
            part = np.array([[1.0]])
            while part.shape[0] < 64:
                part = np.kron(part, [[1, 1], [1, -1]])
            x = (x.reshape(*x.shape[:-1], -1, 64) @ part / 8).reshape(x.shape)
        if self.bits < 32:
            blocks = x.reshape(*x.shape[:-1], -1, self.block)
            step = np.abs(blocks).max(-1, keepdims=True) / 127
            x = (np.rint(np.divide(blocks, step, out=np.zeros_like(blocks), where=step > 0)) * step).reshape(
                x.shape
            )
        result = x @ self.values
        return result + others if "added" in self.switches else result


@pytest.mark.parametrize(("bits", "block"), [(8, DEPTH), (8, 64), (4, 32), (4, 64), (32, DEPTH)])
@pytest.mark.parametrize(
    "switches",
    [
        (),
        ("halves",),
        ("normed",),
        ("gated",),
        ("rotated",),
        ("added",),
        ("normed", "rotated"),
        ("gated", "rotated", "added"),
    ],
    ids=" ".join,
)
def test_products_are_those_of_numpy_and_do_not_depend_on_other_rows(
    bits: int, block: int, switches: tuple[str, ...]
) -> None:
    weights, count = Weights(bits, block, *switches), 70
    rows = matrix(count, DEPTH * (2 if "gated" in switches else 1), 1)
    rows[3] = 0
    others = matrix(count, WIDTH, 2)
    expected, found = weights.expected(rows, others), weights.run(rows, others)
    # A code may differ by one where a number lies half-way between two.
    error = np.abs(found - expected).max(-1) / np.abs(expected).max()
    assert np.median(error) < 1e-5
    assert error.max() < (1e-5 if bits == 32 else 1e-2)
    assert np.isfinite(found).all()
    for size in range(1, 40):
        np.testing.assert_array_equal(weights.run(rows[:size], others[:size]), found[:size])
    several = weights.run(rows.reshape(2, 35, -1), others.reshape(2, 35, -1))
    np.testing.assert_array_equal(several.reshape(count, -1), found)


def test_weights_of_a_gemm_are_transposed() -> None:
    weights, rows = Weights(32, DEPTH, "transposed"), matrix(5, DEPTH, 1)
    np.testing.assert_allclose(weights.run(rows, rows), weights.expected(rows, rows), rtol=0, atol=1e-4)


def test_a_product_of_no_rows_is_empty() -> None:
    empty = np.zeros((0, DEPTH), np.float32)
    assert Weights(8, DEPTH).run(empty, empty).shape == (0, WIDTH)


def test_rows_of_another_length_are_refused() -> None:
    with pytest.raises(Exception, match="expected rows that fit the columns"):
        Weights(8, DEPTH).run(matrix(2, DEPTH + 32, 1), matrix(2, WIDTH, 2))


# ---- Attention ----


def attention(
    *, heads: int, kv_heads: int, softcap: float = 0.0, rotary: bool = False, scale: float = 0.3
) -> ort.InferenceSession:
    first = ["heads", "cosines", "sines"] if rotary else ["query", "key", "value"]
    names = [*first, "mask", "write_index", "past_key", "past_value"]
    return session_of(
        ROTARY_ATTENTION if rotary else ATTENTION,
        {name: {"mask": BOOL, "write_index": INT64}.get(name, FLOAT) for name in names},
        ["result", "present_key", "present_value"],
        {},
        names,
        num_heads=heads,
        num_kv_heads=kv_heads,
        scale=scale,
        softcap=softcap,
    )


def by_hand(given: Arrays, softcap: float, scale: float = 0.3) -> NDArray[np.float64]:
    query, mask = given["query"].astype(np.float64), given["mask"]
    batch, heads, count, size = query.shape
    keys, values = (given[f"past_{name}"].astype(np.float64).copy() for name in ("key", "value"))
    for index, start in enumerate(given["write_index"]):
        new = slice(start, start + given["key"].shape[2])
        keys[index, :, new], values[index, :, new] = given["key"][index], given["value"][index]
    groups = heads // keys.shape[1]
    scores = query @ np.repeat(keys, groups, 1).swapaxes(2, 3) * scale
    if softcap:
        scores = np.tanh(scores / softcap) * softcap
    weights = np.where(mask, np.exp(scores - scores.max(-1, keepdims=True)), 0)
    result = weights / weights.sum(-1, keepdims=True) @ np.repeat(values, groups, 1)
    return result.swapaxes(1, 2).reshape(batch, count, heads * size)


def inputs_of(
    starts: list[int],
    count: int,
    capacity: int,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    size: int = 32,
    seed: int = 0,
) -> Arrays:
    """A chain of rows behind texts of these lengths."""
    random, batch = np.random.default_rng(seed), len(starts)

    def numbers(*shape: int) -> NDArray[np.float32]:
        return random.standard_normal(shape).astype(np.float32)

    mask = np.zeros((batch, 1, count, capacity), np.bool_)
    for index, start in enumerate(starts):
        mask[index, 0, :, :start] = True
        mask[index, 0, :, start : start + count] = np.tri(count, dtype=np.bool_)
    return {
        "query": numbers(batch, heads, count, size),
        "key": numbers(batch, kv_heads, count, size),
        "value": numbers(batch, kv_heads, count, size),
        "mask": mask,
        "write_index": np.array(starts),
        "past_key": numbers(batch, kv_heads, capacity, size),
        "past_value": numbers(batch, kv_heads, capacity, size),
    }


@pytest.mark.parametrize("size", [16, 48, 64, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2)])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_attention_is_that_of_numpy(size: int, heads: int, kv_heads: int, softcap: float) -> None:
    session = attention(heads=heads, kv_heads=kv_heads, softcap=softcap)
    for starts, count, capacity in (([0], 1, 8), ([5, 90], 3, 100), ([200], 40, 333)):
        given = inputs_of(starts, count, capacity, heads=heads, kv_heads=kv_heads, size=size)
        # A window, which hides the beginning.
        given["mask"][..., : min(starts) // 2] = False
        result, keys, values = session.run(None, given)
        np.testing.assert_allclose(result, by_hand(given, softcap), rtol=0, atol=2e-5)
        for index, start in enumerate(starts):
            new = slice(start, start + count)
            np.testing.assert_array_equal(keys[index, :, new], given["key"][index])
            np.testing.assert_array_equal(values[index, :, :start], given["past_value"][index, :, :start])


def test_attention_of_the_last_rows_whose_keys_are_written() -> None:
    """As in a draft head, which writes the context's keys in the pass of its frames."""
    given = inputs_of([5, 90], 7, 100)
    given |= {"query": given["query"][:, :, 4:], "mask": given["mask"][:, :, 4:]}
    result, keys, values = attention(heads=4, kv_heads=2).run(None, given)
    np.testing.assert_allclose(result, by_hand(given, 0.0), rtol=0, atol=2e-5)
    for index, start in enumerate((5, 90)):
        np.testing.assert_array_equal(keys[index, :, start : start + 7], given["key"][index])
        np.testing.assert_array_equal(values[index, :, start : start + 7], given["value"][index])


def test_a_path_has_the_same_bits_wherever_its_keys_lie() -> None:
    """The nodes of random trees, one by one, and together in a batch with a longer text."""
    session, random = attention(heads=4, kv_heads=2), np.random.default_rng(0)
    for length in (1, 15, 16, 60, 255, 300):
        count, capacity = 12, 400
        given = inputs_of([length, length + 40], count, capacity, seed=length)
        parents = [-1, *(int(random.integers(node)) for node in range(1, count))]
        for node, parent in enumerate(parents):
            row = given["mask"][0, 0, node]
            row[length:] = given["mask"][0, 0, parent, length:] if parent >= 0 else False
            row[length + node] = True
        together = session.run(None, given)[0]
        for node in range(count):
            path = [at for at in range(count) if given["mask"][0, 0, node, length + at]]
            cache = {name: given[f"past_{name}"][:1].copy() for name in ("key", "value")}
            for place, at in enumerate(path[:-1]):
                for name, array in cache.items():
                    array[0, :, length + place] = given[name][0, :, at]
            mask = np.zeros((1, 1, 1, capacity), np.bool_)
            mask[..., : length + len(path)] = True
            alone = session.run(
                None,
                {
                    **{name: given[name][:1, :, node : node + 1] for name in ("query", "key", "value")},
                    "mask": mask,
                    "write_index": np.array([length + len(path) - 1]),
                    **{f"past_{name}": array for name, array in cache.items()},
                },
            )[0]
            np.testing.assert_array_equal(alone[0, 0], together[0, node], err_msg=f"{length}, {node}")


def test_rotated_heads_are_those_of_the_standard_operator() -> None:
    heads, kv_heads, size, count, start = 4, 2, 32, 5, 20
    given = inputs_of([start], count, 64, heads=heads, kv_heads=kv_heads, size=size)
    random = np.random.default_rng(1)
    packed = random.standard_normal((1, count, (heads + 2 * kv_heads) * size)).astype(np.float32)
    angles = np.arange(start, start + count)[None, :, None] * random.uniform(0, 1, size // 2)
    cosines, sines = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    parts = packed.reshape(1, count, -1, size).swapaxes(1, 2)
    halves = np.split(parts, 2, axis=-1)
    turned = np.concatenate(
        [halves[0] * cosines - halves[1] * sines, halves[0] * sines + halves[1] * cosines], axis=-1
    )
    given |= {"query": turned[:, :heads], "key": turned[:, heads:-kv_heads], "value": parts[:, -kv_heads:]}
    cache = {name: given[name] for name in ("mask", "write_index", "past_key", "past_value")}
    session = attention(heads=heads, kv_heads=kv_heads, rotary=True)
    result, keys, _ = session.run(None, {"heads": packed, "cosines": cosines, "sines": sines, **cache})
    np.testing.assert_allclose(result, by_hand(given, 0.0), rtol=0, atol=2e-5)
    np.testing.assert_allclose(keys[:, :, start : start + count], given["key"], rtol=0, atol=1e-6)


def test_rows_that_do_not_fit_into_the_cache_are_refused() -> None:
    with pytest.raises(Exception, match="write_index: the rows of a pass must fit into the cache"):
        attention(heads=4, kv_heads=2).run(None, inputs_of([30], 1, 31) | {"write_index": np.array([31])})
    given = inputs_of([28], 3, 31)
    given |= {
        "query": given["query"][:, :, 2:],
        "mask": given["mask"][:, :, 2:],
        "write_index": np.array([29]),
    }
    with pytest.raises(Exception, match="write_index: the rows of a pass must fit into the cache"):
        attention(heads=4, kv_heads=2).run(None, given)
    with pytest.raises(Exception, match="attention: the shapes of keys and values do not fit"):
        attention(heads=4, kv_heads=2).run(None, given | {"value": given["value"][:, :, 1:]})


def test_a_form_of_two_operators_a_layer_has_no_others(tiny_bundle_dir: Path) -> None:
    graph = onnx.load(tiny_bundle_dir / "backbone.compiled.onnx", load_external_data=False).graph
    found = {node.op_type for node in graph.node if node.domain == DOMAIN}
    assert found == {ROTARY_ATTENTION, PRODUCT}
    assert not {node.op_type for node in graph.node} & {"TensorScatter", "RotaryEmbedding", "Split", "Exp"}
    graph = onnx.load(tiny_bundle_dir / "drafter.compiled.onnx", load_external_data=False).graph
    assert {node.op_type for node in graph.node if node.domain == DOMAIN} == {ATTENTION, PRODUCT}
    assert not {node.op_type for node in graph.node} & {"TensorScatter", "Attention"}

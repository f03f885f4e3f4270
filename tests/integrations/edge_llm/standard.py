"""Edge-LLM's two operators as ONNX functions of standard operators, for a compiler that lacks its plug-ins.

Blocks have at most 31 tokens here: their masks lie in the first word.
"""

# mypy: ignore-errors

from pathlib import Path

import onnx
import onnx.inliner
import onnxruntime
from onnxscript import opset23 as op
from onnxscript import script
from onnxscript.values import Opset

from drafters.config import DrafterConfig
from export.graphs.dflash import PAGE_SIZE, draft_contract
from export.graphs.trace import OPSET
from export.trt.compiler import compile_engine, load_library
from tests.integrations.edge_llm.engine import Graph

PLUGINS = Opset("trt_edgellm", 1)
WORD = 31


@script(PLUGINS, default_opset=op)
def rotated(heads, cos_sin):
    """heads [N, H, D], cos_sin [N, D] -> float32 [N, H, D]."""
    cos, sin = op.Split(op.Unsqueeze(cos_sin, [1]), num_outputs=2, axis=-1)
    first, second = op.Split(op.Cast(heads, to=1), num_outputs=2, axis=-1)
    return op.Concat(first * cos - second * sin, second * cos + first * sin, axis=-1)


@script(PLUGINS, default_opset=op)
def written(tokens, pool, positions, owners, table, kind):
    """pool [2, N, S, H, D] with tokens [A, H, D] as keys (kind 0) or values (1); owner -1 writes nothing."""
    size = op.Shape(pool, start=3)
    rows = op.Reshape(pool, op.Concat([-1], size, axis=0))
    spare = op.Expand(op.CastLike(0.0, pool), op.Concat([1], size, axis=0))
    owner = op.Max(op.Cast(owners, to=7), [0])
    position = op.Max(op.Cast(positions, to=7), [0])
    page_size = op.Shape(pool, start=2, end=3)
    index = op.Concat(
        op.Unsqueeze(owner, [1]),
        op.Expand(op.Reshape(kind, [1, 1]), op.Shape(op.Unsqueeze(owner, [1]))),
        op.Unsqueeze(position / page_size, [1]),
        axis=1,
    )
    page = op.Cast(op.GatherND(table, index), to=7)
    place = page * page_size + op.Mod(position, page_size)
    end = op.Shape(rows, start=0, end=1)
    place = op.Where(owners >= op.CastLike(0, owners), place, end)
    changed = op.ScatterND(
        op.Concat(rows, spare, axis=0), op.Unsqueeze(place, [1]), op.CastLike(tokens, pool)
    )
    return op.Reshape(op.Slice(changed, [0], end, [0]), op.Shape(pool))


@script(PLUGINS, default_opset=op)
def DFlashTargetKVCacheUpdate(keys, values, pool, cos_sin, positions, owners, table):
    pool = written(rotated(keys, cos_sin), pool, positions, owners, table, op.Constant(value_int=0))
    return written(values, pool, positions, owners, table, op.Constant(value_int=1))


@script(PLUGINS, default_opset=op)
def AttentionPlugin(
    qkv,
    pool,
    query_lengths,
    cos_sin,
    past,
    table,
    mask,
    positions,
    offsets,
    lengths,
    phase,
    count,
    num_q_heads: int,
    num_kv_heads: int,
    head_size: int,
    attention_scale: float,
):
    num_q = op.Reshape(op.Constant(value_int=num_q_heads), [1])
    num_kv = op.Reshape(op.Constant(value_int=num_kv_heads), [1])
    size = op.Reshape(op.Constant(value_int=head_size), [1])
    heads = op.Reshape(qkv, op.Concat([0, -1], size, axis=0))
    query, key, value = op.Split(heads, op.Concat(num_q, num_kv, num_kv, axis=0), axis=1)

    # Which sequence a token is of, and where in it.
    total = op.Shape(qkv, start=0, end=1)
    token = op.Range(op.Constant(value_int=0), op.Squeeze(total), op.Constant(value_int=1))
    ends = op.Cast(op.Slice(offsets, [1], [1000], [0]), to=7)
    owner = op.ReduceSum(op.Cast(op.Unsqueeze(token, [1]) >= ends, to=7), [1], keepdims=0)
    owner = op.Min(owner, op.Shape(ends) - 1)
    before = op.Gather(op.Cast(past, to=7), owner)
    position = before + token - op.Gather(op.Cast(offsets, to=7), owner)

    pool = written(rotated(key, cos_sin), pool, position, owner, table, op.Constant(value_int=0))
    pool = written(value, pool, position, owner, table, op.Constant(value_int=1))

    # All keys and values of the sequence of every token: [N, KH, S, D].
    pages = op.Reshape(pool, op.Concat([-1], op.Shape(pool, start=2), axis=0))
    own_pages = op.Gather(table, owner)  # [N, 2, M]
    shape = op.Concat(total, [-1], num_kv, size, axis=0)
    keys = op.Reshape(op.Gather(pages, op.Gather(own_pages, op.Constant(value_int=0), axis=1)), shape)
    values = op.Reshape(op.Gather(pages, op.Gather(own_pages, op.Constant(value_int=1), axis=1)), shape)
    keys = op.Transpose(op.Cast(keys, to=1), perm=[0, 2, 3, 1])
    values = op.Transpose(op.Cast(values, to=1), perm=[0, 2, 1, 3])

    # What lies before the block is seen, and of the block what the mask's bits say.
    seen = op.Shape(keys, start=3, end=4)
    places = op.Range(op.Constant(value_int=0), op.Squeeze(seen), op.Constant(value_int=1))
    distance = op.Unsqueeze(places, [0]) - op.Unsqueeze(before, [1])  # [N, S]
    word = op.Cast(op.Slice(mask, [0], [1], [1]), to=7)
    bit = op.Range(op.Constant(value_int=0), op.Constant(value_int=31), op.Constant(value_int=1))
    power = op.Cast(op.Pow(op.Constant(value_float=2.0), op.Cast(bit, to=1)), to=7)
    bits = op.Mod(word / power, [2])
    own_bit = op.GatherElements(bits, op.Clip(distance, 0, 30), axis=1)
    in_block = op.And(distance < 31, op.Equal(own_bit, 1))
    allowed = op.Or(distance < 0, in_block)

    grouped = op.Concat(total, num_kv, [-1], size, axis=0)
    scores = op.MatMul(op.Reshape(rotated(query, cos_sin), grouped), keys)
    scores = scores * op.Constant(value_float=attention_scale)
    scores = op.Where(op.Unsqueeze(allowed, [1, 2]), scores, op.Constant(value_float=-1e30))
    attended = op.MatMul(op.Softmax(scores, axis=-1), values)
    flat = op.Reshape(attended, op.Concat(total, num_q, size, axis=0))
    return op.CastLike(flat, qkv), pool


def write_standard(source: Path, path: Path) -> Path:
    """Write a draft graph with the plug-ins' nodes replaced."""
    model = onnx.load(source)
    for function in (rotated, written, DFlashTargetKVCacheUpdate, AttentionPlugin):
        proto = function.to_function_proto()
        # The library has no newer operators; these are the same in the graph's opset.
        next(opset for opset in proto.opset_import if not opset.domain).version = OPSET
        model.functions.append(proto)
    onnx.save(onnx.inliner.inline_local_functions(model), path)
    return path


def onnx_runtime(path: Path, num_sequences: int, max_length: int, rope_theta: float) -> Graph:
    """A graph of standard operators, run by ONNX Runtime."""
    graph = Graph.load(path, num_sequences, max_length, rope_theta)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(path, options)
    names = [value.name for value in session.get_outputs()]
    graph.compute = lambda inputs: dict(zip(names, session.run(names, inputs), strict=True))
    return graph


def check_compiles(path: Path, config: DrafterConfig, *, max_length: int) -> None:
    """NVIDIA's compiler takes the graph, with the profile that Edge-LLM's builder sets for 4 sequences."""
    sequences, pages = 4, max_length // PAGE_SIZE
    tokens = sequences * config.num_frames
    profile = {
        "physical_tokens": (1, tokens, tokens),
        "num_sequences": (1, sequences, sequences),
        "num_sequences + 1": (2, sequences + 1, sequences + 1),
        "delta_tokens": (1, sequences * max_length // 2, sequences * max_length),
        "num_pages": (sequences * pages,) * 3,
        "max_pages_per_seq": (pages,) * 3,
        "execution_phase_extent": (4, 4, 4),
        "packed_mask_width": (1, 1, 1),
    }
    library = load_library("tensorrt-rtx")
    assert compile_engine(library, path, draft_contract(config), (profile,), capabilities=("sm89",)).plan

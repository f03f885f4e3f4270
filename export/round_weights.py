"""Round a draft head's weights to fewer bits.

A head only proposes tokens, so a rounded head costs acceptance and never changes the text. The matrices
become ONNX Runtime's ``MatMulNBits``: blocks of 32 weights with one scale each, computed with int8
activations. Tables that are only looked up (embedding, transition) stay unchanged.
"""

import logging
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from export.options import DRAFTER_BITS

BLOCK_SIZE = 32
# MatMulNBits' accuracy level for int8 activations, which selects the fast kernels.
INT8_ACTIVATIONS = 4


def round_weights(path: Path, precision: str) -> int:
    """Rewrite a graph and its data file; returns how many products were rewritten.

    precision: a key of ``DRAFTER_BITS``
    """
    model = onnx.load(path)
    columns = {tensor.name: tensor.dims[-1] for tensor in model.graph.initializer if len(tensor.dims) == 2}
    # Rounding a matrix of one column (the blank's logit) saves nothing and costs the most accuracy.
    narrow = [n.name for n in model.graph.node if n.op_type == "MatMul" and columns.get(n.input[1]) == 1]
    quantizer = _quantizer_class()(
        model,
        bits=DRAFTER_BITS[precision],
        block_size=BLOCK_SIZE,
        is_symmetric=True,
        accuracy_level=INT8_ACTIVATIONS,
        nodes_to_exclude=narrow,
    )
    quantizer.process()
    rewritten = ir.from_proto(quantizer.model.model)
    ir.save(rewritten, path, external_data=f"{path.name}.data")
    return sum(node.op_type == "MatMulNBits" for node in rewritten.graph)


def _quantizer_class() -> Any:
    """ONNX Runtime's quantiser.

    Importing its module makes the root logger print everything, unless the root logger has a handler.
    """
    root, quiet = logging.getLogger(), logging.NullHandler()
    root.addHandler(quiet)
    try:
        from onnxruntime.quantization import matmul_nbits_quantizer
    finally:
        root.removeHandler(quiet)
    logging.getLogger(matmul_nbits_quantizer.__name__).setLevel(logging.WARNING)
    return matmul_nbits_quantizer.MatMulNBitsQuantizer

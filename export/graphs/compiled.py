"""The compiled form of a graph: its operators are compiled on the machine that runs it.

A layer is 5 operators of ``runtime.engines.operators`` there, and 35 or more standard ones otherwise, each of
which takes a time of its own besides its arithmetic. These operators are of no standard. So the form is a
file beside the portable one, and both read the same file of weights.
"""

from pathlib import Path

import onnx_ir as ir

from export.graphs.joined_attention import join_attention, join_standard_attention
from export.graphs.joined_products import join_products


def write_compiled_form(path: Path, result: Path, *, is_drafter: bool, joins_products: bool) -> bool:
    """Write the compiled form of a graph; returns whether there is one.

    There is none if the products that are to be joined, or a target model's attention, are not found.
    """
    model = ir.load(path)
    if is_drafter:
        join_standard_attention(model)
    elif not join_attention(model):
        return False
    if joins_products and not join_products(model):
        return False
    ir.save(model, result)
    return True

"""A rounded draft head: fewer bits, the same text."""

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

from export.options import DRAFTER_BITS, Options
from runtime.bundle import Bundle, GraphSpec
from runtime.decoder import SpeculativeDecoder


def weights(bundle: Path) -> dict[int, list[int]]:
    """The bits of every MatMulNBits, by its number of columns."""
    graph = onnx.load(bundle / "drafter.onnx", load_external_data=False).graph
    found: dict[int, list[int]] = {}
    for node in graph.node:
        if node.op_type == "MatMulNBits":
            values = {attribute.name: attribute.i for attribute in node.attribute}
            found.setdefault(values["N"], []).append(values["bits"])
    return found


@pytest.mark.parametrize(
    ("name", "precision", "lm_heads"), [("ctc-mlp", "int4", 1), ("ctc-mlp", "int8", 1), ("medusa", "int4", 4)]
)
def test_a_rounded_head_drafts_the_same_text(
    name: str,
    precision: str,
    lm_heads: int,
    trained_heads_dir: Path,
    make_tiny_bundle: Callable[..., Path],
    assert_interface: Callable[[Path, GraphSpec], None],
) -> None:
    exact = make_tiny_bundle(trained_heads_dir / name)
    rounded = make_tiny_bundle(trained_heads_dir / name, Options(drafter_precision=precision))
    manifest = Bundle.load(rounded).manifest
    assert manifest.drafter is not None
    assert manifest.drafter.precision == precision
    assert set(manifest.validation["drafter"]) == {"prefill", "step"}
    assert_interface(rounded / "drafter.onnx", manifest.graphs["drafter"])
    found = weights(rounded)
    assert found[manifest.model.vocab_size] == lm_heads * [DRAFTER_BITS[precision]]
    assert 1 not in found  # the blank's logit
    assert not weights(exact)
    # A file that is written again keeps the permissions of the others.
    assert len({path.stat().st_mode for path in rounded.iterdir()}) == 1

    texts, steps = [], []
    for bundle, method in ((exact, "plain"), (exact, "draft"), (rounded, "draft")):
        decoder = SpeculativeDecoder.from_bundle(bundle, method=method, num_threads=1)
        prompt = decoder.prompt_tokenizer.encode("What is the sum of 12 and 30?")
        chunks = list(decoder.stream(prompt, max_new_tokens=24, stop_token_ids=()))
        texts.append([token for chunk in chunks for token in chunk.token_ids])
        steps.append(len(chunks))
    assert texts[0] == texts[1] == texts[2]
    assert steps[2] < 0.75 * steps[0]

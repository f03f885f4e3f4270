"""The built graphs against PyTorch's answers, through ONNX Runtime."""

from pathlib import Path

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from export.errors import ExportError
from export.reference import TREE_PARENTS, BackboneReference, FrameReference, ancestors
from runtime.bundle import GraphSpec

# Largest difference accepted, relative to the largest reference value: float32 sums in another
# order differ by a few 1e-6, a wrong mask or position by far more than 1e-3.
TOLERANCE = 1e-4
CAPACITY = 64


class GraphRunner:
    """A graph with a small cache, one sequence, run without any of the runtime's machinery."""

    def __init__(self, path: Path, spec: GraphSpec):
        options = ort.SessionOptions()
        # Errors only: without bound buffers every TensorScatter warns that it copies.
        options.log_severity_level = 3
        # Packed weights would double the memory of a check that runs a handful of passes.
        options.add_session_config_entry("session.disable_prepacking", "1")
        self._session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        sizes = {"B": 1, "S": CAPACITY}
        self._cache = {
            t.name: np.zeros([sizes[n] if isinstance(n, str) else n for n in t.shape], np.float32)
            for t in spec.inputs
            if t.name.startswith("past_")
        }

    def run(self, **inputs: NDArray[np.generic]) -> dict[str, NDArray[np.generic]]:
        """All outputs; the cache moves on."""
        names = [output.name for output in self._session.get_outputs()]
        outputs = dict(zip(names, self._session.run(None, {**inputs, **self._cache}), strict=True))
        for name in self._cache:
            self._cache[name] = outputs.pop(name.replace("past_", "present_"))
        return outputs

    def keep(self, start: int, path: NDArray[np.int64]) -> None:
        """Pack the cache rows ``start + path`` together."""
        for array in self._cache.values():
            array[:, :, start : start + path.size] = array[:, :, start + path]


def check_backbone(path: Path, spec: GraphSpec, reference: BackboneReference) -> dict[str, float]:
    """Largest absolute differences of logits and features: ``prefill`` and ``tree``."""
    graph = GraphRunner(path, spec)
    count = reference.prompt.size
    mask = np.zeros((1, 1, count, CAPACITY), np.bool_)
    mask[0, 0, :, :count] = np.tri(count, dtype=np.bool_)
    outputs = graph.run(
        input_ids=reference.prompt[None],
        position_ids=np.arange(count)[None],
        attn_mask=mask,
        write_index=np.array([0]),
        logit_indices=np.array([[count - 1]]),
    )
    prefill = max(
        difference("prefill logits", outputs["logits"][0, 0], reference.prefill_logits),
        difference("prefill features", outputs["features"][0], reference.prefill_features),
    )
    tree = 0.0
    depths = np.array([len(ancestors(node)) - 1 for node in range(TREE_PARENTS.size)])
    start = count
    for tokens, logits, features in zip(
        reference.trees, reference.tree_logits, reference.tree_features, strict=True
    ):
        mask = np.zeros((1, 1, tokens.size, CAPACITY), np.bool_)
        mask[..., :start] = True
        for node in range(tokens.size):
            mask[0, 0, node, [start + ancestor for ancestor in ancestors(node)]] = True
        outputs = graph.run(
            input_ids=tokens[None],
            position_ids=start + depths[None],
            attn_mask=mask,
            write_index=np.array([start]),
            logit_indices=np.arange(tokens.size)[None],
        )
        if not np.array_equal(outputs["next_tokens"], outputs["logits"].argmax(-1)):
            raise ExportError("backbone graph: next_tokens is not the argmax of logits")
        tree = max(
            tree,
            difference("tree logits", outputs["logits"][0], logits),
            difference("tree features", outputs["features"][0], features),
        )
        graph.keep(start, reference.path)
        start += reference.path.size
    return {"prefill": prefill, "tree": tree}


def check_parallel(path: Path, spec: GraphSpec, reference: FrameReference) -> dict[str, float]:
    """Largest absolute difference of a frame head's lattice: ``prefill`` and ``step``."""
    graph = GraphRunner(path, spec)
    wanted = {tensor.name for tensor in spec.inputs}
    found = {}
    portions = ((0, reference.split), (reference.split, reference.features.shape[0]))
    for name, (start, end), anchor, lattice in zip(
        ("prefill", "step"), portions, reference.anchors, reference.lattices, strict=True
    ):
        num_frames = lattice["frame_tokens"].shape[0]
        mask = np.zeros((1, 1, num_frames, CAPACITY), np.bool_)
        mask[..., : end + num_frames] = True
        inputs: dict[str, NDArray[np.generic]] = {
            "features": reference.features[None, start:end],
            "context_position_ids": np.arange(start, end)[None],
            "anchor_ids": np.array([[anchor]]),
            "frame_position_ids": np.arange(end, end + num_frames)[None],
            "attn_mask": mask,
            "write_index": np.array([start]),
        }
        outputs = graph.run(**{key: value for key, value in inputs.items() if key in wanted})
        # Labels of equal probability may change places; their probabilities tell the rest.
        same = outputs["frame_tokens"][0] == lattice["frame_tokens"]
        if same.size - same.sum() > same.size // 20:
            raise ExportError(f"drafter {name} frame_tokens: {same.size - same.sum()} differ from PyTorch's")
        found[name] = max(
            difference(f"drafter {name} {key}", _of_labels(outputs[key][0], same), _of_labels(expected, same))
            for key, expected in lattice.items()
            if key != "frame_tokens"
        )
    return found


def _of_labels(array: NDArray[np.generic], same: NDArray[np.bool_]) -> NDArray[np.generic]:
    """Rows of labels [T, K, r] only where both sides have the label; anything else as it is.

    The blank's rows, where there are [T, K + 1, r], are always there.
    """
    if array.ndim < 3:
        return array
    blanks = np.ones((same.shape[0], array.shape[1] - same.shape[1]), np.bool_)
    kept: NDArray[np.generic] = array[np.concatenate((same, blanks), axis=1)]
    return kept


def difference(what: str, found: NDArray[np.generic], expected: NDArray[np.generic]) -> float:
    """The largest absolute difference; raises ExportError where it is more than rounding."""
    difference = float(np.abs(np.subtract(found, expected, dtype=np.float64)).max())
    limit = TOLERANCE * max(1.0, float(np.abs(expected).max()))
    if not difference <= limit:  # NaN fails too
        raise ExportError(f"{what}: the graph differs from PyTorch by {difference:.2e}, accepted {limit:.0e}")
    return difference

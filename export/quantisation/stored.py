"""Keep the codes and scales of a quantised checkpoint in a graph, in place of rounding its weights again.

A graph's matrix is found by its rows' content. So it does not matter where a loader has put them: the rows of
queries and keys change their order between llama.cpp and Transformers, and experts are joined. A matrix is
kept if the form that is asked for gives exactly its weights: its groups are whole blocks, and its codes and
scales fit.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from drafters.checkpoints.stored import Codes, StoredTensor
from export.quantisation.precision import NUMPY_TYPES, WeightForm
from export.quantisation.weights import CODES, SCALE_OF_ZEROS, Array, QuantizedMatrix

# The least and the largest code of forms with whole numbers. Rounding never gives the least one of int8.
CODE_RANGE = {"int4": (-8, 7), "int8": (-128, 127)}


# The numbers of a stored tensor and of its row.
Place = tuple[int, int]


class StoredWeights:
    """The quantised tensors of a checkpoint, and which of them graphs have kept."""

    def __init__(self, tensors: Sequence[StoredTensor]):
        self._tensors = tensors
        self._kept: set[int] = set()

    def find(self, matrix: NDArray[np.float32], form: WeightForm, scale_dtype: str) -> QuantizedMatrix | None:
        """The matrix [K, N] in a form, if that gives exactly its weights; otherwise None.

        scale_dtype: the type of the graph's activations
        """
        rows = np.ascontiguousarray(matrix.T)
        places = self._find_rows(rows)
        if places is None:
            return None
        codes = np.empty(rows.shape, CODES[form.dtype])
        scales: Array | None = None
        numbers = np.array([number for number, _ in places])
        for number in dict.fromkeys(numbers.tolist()):
            here = numbers == number
            stored = self._tensors[number].read()
            chosen = torch.tensor([row for of, row in places if of == number])
            fitted = _fit(stored, chosen, form, scale_dtype) if isinstance(stored, Codes) else None
            if fitted is None:
                return None
            if scales is None:
                scales = np.empty((len(rows), fitted[1].shape[1]), fitted[1].dtype)
            codes[here], scales[here] = fitted
        assert scales is not None
        found = QuantizedMatrix(codes.T, scales.T if form.block_size else scales[:, 0])
        if not np.array_equal(found.dequantized(), matrix):
            return None
        self._kept.update(numbers.tolist())
        return found

    def report(self, form: WeightForm | None) -> str:
        """How many tensors of which form have been kept or dequantised, in one line.

        form: that of the target model's matrices; None if they are floats
        """
        kept = Counter(self._tensors[number].kind for number in sorted(self._kept))
        others = Counter(tensor.kind for tensor in self._tensors)
        others.subtract(kept)
        parts = [f"{count} of {kind} kept exactly in {form.dtype}" for kind, count in kept.items() if form]
        parts += [f"{count} of {kind} dequantised to float" for kind, count in others.items() if count]
        return f"quantised tensors of the checkpoint: {', '.join(parts)}"

    def _find_rows(self, rows: NDArray[np.float32]) -> list[Place] | None:
        found = []
        for row in rows:
            place = self._places.get(_row_digest(row))
            if place is None:
                return None
            found.append(place)
        return found

    @cached_property
    def _places(self) -> dict[bytes, Place]:
        """Every row's place by its digest. Where rows are equal, one that has codes comes first."""
        places: dict[bytes, Place] = {}
        without: dict[bytes, Place] = {}
        for number, tensor in enumerate(self._tensors):
            stored = tensor.read()
            if isinstance(stored, Codes):
                wanted, weights = places, stored.dequantized()
            else:
                wanted, weights = without, stored
            for row, values in enumerate(weights.numpy()):
                wanted.setdefault(_row_digest(values), (number, row))
        return without | places


def _row_digest(row: NDArray[np.float32]) -> bytes:
    return hashlib.sha256(np.ascontiguousarray(row).data).digest()[:16]


def _fit(
    stored: Codes, chosen: torch.Tensor, form: WeightForm, scale_dtype: str
) -> tuple[Array, Array] | None:
    """Codes [N, K] and scales [N, K / block] of the chosen rows in a form; None if they do not fit."""
    width, num_groups = stored.codes.shape[1], stored.scales.shape[1]
    block, group = form.block_size or width, width // num_groups
    if width % block or group % block:
        return None
    codes = stored.codes[chosen]
    if codes.is_floating_point() != (form.dtype == "fp8"):
        return None
    if form.dtype == "fp8":
        fitted: Array = codes.view(torch.uint8).numpy().view(CODES["fp8"])
    else:
        least, largest = CODE_RANGE[form.dtype]
        if codes.min() < least or codes.max() > largest:
            return None
        fitted = codes.numpy().astype(CODES[form.dtype])
    given = stored.scales[chosen].repeat_interleave(group // block, 1).numpy()
    dtype = NUMPY_TYPES[scale_dtype]
    scales = given.astype(dtype)
    if not np.array_equal(scales.astype(np.float32), given):
        return None
    # A block of zeros may have no scale, which an engine need not take.
    empty = scales == 0
    if empty.any():
        scales[empty] = SCALE_OF_ZEROS
        fitted = np.where(np.repeat(empty, block, 1), np.zeros(1, fitted.dtype), fitted)
    return fitted, scales

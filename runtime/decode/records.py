"""Numbers under names, for compiled functions.

A step calls few compiled functions with few arguments, because after a pass the processor's caches are full
of a model's weights, and every function and every array that is touched has to come from memory.
"""

from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

# A record within a compiled function. Fields are taken by index, which works without a compiler too.
Record = Any


def record_type(constants: type) -> np.dtype[np.void]:
    """The type of a record with the floats of a dataclass."""
    return np.dtype([(field.name, np.float64) for field in fields(constants) if field.type is float])


def as_record(constants: Any) -> NDArray[np.void]:
    """The floats of a dataclass's instance as an array of one record."""
    kind = record_type(type(constants))
    return np.array([tuple(getattr(constants, name) for name in kind.names or ())], kind)

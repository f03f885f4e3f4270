"""What users import from the package: all of it is there, and nothing is loaded before it is asked for."""

import subprocess
import sys
from pathlib import Path

import pytest

import ctc_speculator
from runtime.core import errors
from runtime.decode.sampling_params import SamplingParams
from runtime.decoder import SpeculativeDecoder

ROOT = Path(__file__).resolve().parents[2]
LOADED = """
import sys, ctc_speculator
print(any(name.startswith("runtime") for name in sys.modules))
from ctc_speculator import SamplingParams
print("numba" in sys.modules)
from ctc_speculator import SpeculativeDecoder
print("numba" in sys.modules)
"""


def test_the_names() -> None:
    assert ctc_speculator.SpeculativeDecoder is SpeculativeDecoder
    assert ctc_speculator.SamplingParams is SamplingParams
    for name in ctc_speculator.__all__:
        assert getattr(ctc_speculator, name).__name__ == name
    # As docs/api.md says: the docstrings name these errors.
    assert {name for name in vars(errors) if name.endswith("Error")} <= {*ctc_speculator.__all__}
    with pytest.raises(AttributeError, match="'ctc_speculator' has no attribute 'Decoder'"):
        getattr(ctc_speculator, "Decoder")  # noqa: B009


def test_a_name_is_loaded_when_it_is_asked_for() -> None:
    command = [sys.executable, "-c", LOADED]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["False", "False", "True"]

"""Triton loads this class, which is in ``triton_repo.triton.backend``."""

from triton_repo.triton.backend import TritonPythonModel

__all__ = ["TritonPythonModel"]

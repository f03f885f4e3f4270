"""Triton loads this class, which is in ``triton_repo.backend``."""

from triton_repo.backend import TritonPythonModel

__all__ = ["TritonPythonModel"]

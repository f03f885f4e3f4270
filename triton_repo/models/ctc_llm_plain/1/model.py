"""What tritonserver loads; all of it is in ``triton_repo.backend``."""

from triton_repo.backend import TritonPythonModel

__all__ = ["TritonPythonModel"]

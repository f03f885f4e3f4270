"""The errors a user can cause, each with one clear message."""

from collections.abc import Collection
from typing import Self


class UserError(ValueError):
    """Something given to the program cannot be used; command lines print it and exit with 2.

    field: the option, the input or the part of a request that is wrong; None where the error is of no single
        one. The text of the error begins with it.
    """

    def __init__(self, problem: str, *, field: str | None = None):
        """problem: the message after the field's name"""
        super().__init__(problem if field is None else f"{field}: {problem}")
        self.problem = problem
        self.field = field

    @classmethod
    def of_text(cls, text: str, fields: Collection[str]) -> Self:
        """The error that another process has sent as text. Only a name among ``fields`` is taken for one."""
        name, colon, problem = text.partition(": ")
        return cls(problem, field=name) if colon and name in fields else cls(text)


class BundleError(UserError):
    """An engine bundle is damaged, incomplete or made for another version."""


class RequestError(UserError):
    """A prompt or a generation option cannot be served."""


class CacheMemoryError(MemoryError):
    """The host has no memory for a longer key/value cache, which stays as it was, so shorter texts go on."""


class DeviceError(RuntimeError):
    """A device or its driver failed, or lacks the memory that an engine needs."""


class DeviceMemoryError(DeviceError):
    """A device lacks memory. What it holds already is intact, and it can go on."""

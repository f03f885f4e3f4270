"""Which versions of an engine the draft heads are made for."""

import importlib.metadata
from dataclasses import dataclass


@dataclass(frozen=True)
class Versions:
    """The versions of an engine whose interface a plug-in fits.

    engine: its name in messages; distributions: that may hold it
    supported: the first numbers of its versions; known: the version that was tested or read, in words
    """

    engine: str
    distributions: tuple[str, ...]
    supported: tuple[str, ...]
    known: str

    def installed(self) -> str | None:
        """The installed version, None where no distribution of the engine is found."""
        for name in self.distributions:
            try:
                return importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
        return None

    def problem(self, version: str | None) -> str | None:
        """Why draft heads cannot be used with a version of the engine, or None."""
        if version is not None and any(f"{version}.".startswith(f"{known}.") for known in self.supported):
            return None
        return (
            f"ctc-speculator: expected {self.engine} {' or '.join(self.supported)} ({self.known}), got "
            f"{version or 'an unknown version'}; its draft heads are not registered"
        )

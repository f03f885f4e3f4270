"""What all plug-ins read and check: a draft directory, and the version of the engine.

``export.draft_directory`` writes the directory: our settings are one key of ``config.json``, whose other keys
an engine reads.
"""

import importlib.metadata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor

from drafters.config import DrafterConfig, DrafterConfigError


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


# The architecture in config.json. vLLM's method dflash expects its beginning.
ARCHITECTURE = "DFlashCTCForCausalLM"
# The key of our settings in config.json.
KEY = "ctc_speculator"
DRAFTER_TYPES = ("ctc", "block")
# The shapes of drafts: all branches of a search, or its best path alone. The names are the runtime's.
SHAPES = TREE, CHAIN = ("tree", "chain")


class DraftError(ValueError):
    """A draft directory that cannot be used; the message is one line that names the field."""


@dataclass(frozen=True)
class DraftSettings:
    """head: the head's configuration; top_k: labels of a frame that the search reads

    shape: of the drafts, where an engine verifies trees; the others draft chains whatever it is
    """

    head: DrafterConfig
    top_k: int
    shape: str

    @classmethod
    def read(cls, config: Any, directory: str) -> Self:
        """config: an object with an engine's view of the directory's config.json.

        Raises DraftError for a directory of another program, or with a head that has no chains here.
        """
        file = f"{directory}/config.json"
        values = getattr(config, KEY, None)
        if not isinstance(values, dict) or set(values) != {"head", "top_k", "shape"}:
            raise DraftError(
                f"{file}: expected the key {KEY!r} that export/build_engines.py --target ENGINE writes"
            )
        try:
            head = DrafterConfig.from_dict(values["head"])
        except (DrafterConfigError, TypeError) as error:
            raise DraftError(f"{file}: {KEY}: {error}") from error
        problem = head_problem(head)
        if problem:
            raise DraftError(f"{file}: {KEY}: {problem}")
        shape = values["shape"]
        if shape not in SHAPES:
            raise DraftError(f"{file}: {KEY}: shape: expected {' or '.join(SHAPES)}, got {shape!r}")
        top_k = values["top_k"]
        if type(top_k) is not int or not 1 <= top_k <= head.label_count:
            raise DraftError(f"{file}: {KEY}: top_k: expected 1 to {head.label_count}, got {top_k!r}")
        return cls(head, top_k, shape)


def head_problem(head: DrafterConfig) -> str | None:
    """Why a head cannot draft in another engine, or None."""
    if head.trunk_type.borrows_layers:
        return (
            f"trunk: expected a head with passes of its own, got {head.trunk!r}, which runs through layers "
            "of the target model"
        )
    if head.trunk_type.has_mask_token:
        return (
            f"trunk: expected 'attention', got {head.trunk!r}, whose form is DSpark's, which engines load "
            "without a plug-in"
        )
    if head.drafter_type not in DRAFTER_TYPES:
        return f"drafter_type: expected {' or '.join(DRAFTER_TYPES)}, got {head.drafter_type!r}"
    if not head.trunk_type.attends:
        return f"trunk: expected 'attention', which reads the whole context, got {head.trunk!r}"
    return None


def model_problem(head: DrafterConfig, *, vocab_size: int, hidden_size: int, num_layers: int) -> str | None:
    """Why a head cannot draft for a target model of these sizes, or None."""
    for name, expected, got in (
        ("vocab_size", vocab_size, head.vocab_size),
        ("hidden_size", hidden_size, head.hidden_size),
        ("base_num_layers", num_layers, head.base_num_layers),
    ):
        if expected != got:
            made_for = f"another model{f', {head.base_model!r}' if head.base_model else ''}"
            return f"{name}: expected the model's {expected}, got {got}; the head was made for {made_for}"
    return None


def checked_weights(
    weights: Iterable[tuple[str, Tensor]], expected: Iterable[str]
) -> Iterator[tuple[str, Tensor]]:
    """The weights of a directory, one after another.

    expected: names that all have to come. Raises DraftError for one that is missing, or that is not expected.
    """
    missing = set(expected)
    for name, tensor in weights:
        if name not in missing:
            raise DraftError(f"model.safetensors: expected a head's weights, got {name!r} among them")
        missing.remove(name)
        yield name, tensor
    if missing:
        raise DraftError(f"model.safetensors: expected the weight {min(missing)!r}, got none")

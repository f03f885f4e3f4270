"""The arguments of the kernels, as the structures in ``source`` declare them, and of a launch.

``c_void_p`` is an address on the device, or None for a tensor that a kernel does without.
"""

import ctypes
from ctypes import c_int, c_void_p
from dataclasses import dataclass
from typing import Protocol

MAX_CACHES, MAX_LEVELS = 256, 32


def _pointers(*names: str) -> list[tuple[str, type]]:
    return [(name, c_void_p) for name in names]


def _numbers(*names: str) -> list[tuple[str, type]]:
    return [(name, c_int) for name in names]


# Outputs of a search, in the order of the structure TreeOutputs.
TREE_OUTPUTS = (
    "input_ids",
    "position_ids",
    "attn_mask",
    "parents",
    "depths",
    "ancestors",
    "node_log_probs",
)
# The tensors of a transition, each the name of an argument too.
TRANSITION = ("transition_frames", "transition_anchor", "transition_previous", "transition_following")


class PrepareArguments(ctypes.Structure):
    _fields_ = (
        *_pointers("lengths", "counts", "query_indices", "context_position_ids", "frame_position_ids"),
        *_pointers("attn_mask", "write_index"),
        *_numbers("num_places", "num_frames", "num_rows", "capacity"),
    )


class SearchArguments(ctypes.Structure):
    _fields_ = (
        *_pointers("frame_tokens", "frame_logprobs", "blank_logprobs", *TRANSITION, "anchor_ids", "lengths"),
        *_pointers(*TREE_OUTPUTS),
        *_numbers("num_frames", "num_labels", "size", "num_kept"),
        *_numbers("transition_size", "num_following", "merges_repeats", "capacity"),
    )


class LevelArguments(ctypes.Structure):
    _fields_ = _pointers("tokens", "log_probs", "scores", "chosen")


class LevelsArguments(ctypes.Structure):
    _fields_ = (
        *_pointers("anchor_ids", "lengths", *TREE_OUTPUTS),
        *_numbers("num_levels", "width", "beam_width", "size", "capacity", "reserved"),
        ("levels", LevelArguments * MAX_LEVELS),
    )


class AcceptArguments(ctypes.Structure):
    _fields_ = (
        *_pointers("input_ids", "parents", "choices", "node_log_probs"),
        *_pointers("path", "new_counts", "new_tokens", "new_log_probs"),
        *_numbers("num_nodes", "num_places"),
    )


class DrawArguments(ctypes.Structure):
    _fields_ = (
        *_pointers("logits", "uniforms", "depths", "temperature", "top_p", "min_p", "top_k"),
        *_pointers("choices", "log_probs"),
        *_numbers("num_nodes", "num_places", "vocab_size", "reserved"),
    )


class CommitArguments(ctypes.Structure):
    _fields_ = (
        *_pointers("path", "lengths", "features", "path_features"),
        *_numbers("num_places", "num_nodes", "num_heads", "capacity"),
        *_numbers("row_bytes", "feature_bytes", "num_caches", "reserved"),
        ("caches", c_void_p * MAX_CACHES),
    )


# The kernels of the module, by name, each with the structure that it takes.
KERNELS: dict[str, type[ctypes.Structure]] = {
    "prepare": PrepareArguments,
    "search": SearchArguments,
    "search_levels": LevelsArguments,
    "accept": AcceptArguments,
    "draw": DrawArguments,
    "commit": CommitArguments,
}


@dataclass(frozen=True)
class KernelLaunch:
    """One launch of a kernel.

    grid: blocks in x, y and z
    threads: of a block
    shared_bytes: memory that the threads of a block share
    """

    kernel: str
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    arguments: ctypes.Structure


class Launcher(Protocol):
    """What runs kernels.

    max_shared_bytes: memory that the threads of a block can share
    """

    max_shared_bytes: int

    def launch(self, launch: KernelLaunch) -> None:
        """Put a launch on the device's stream."""

"""The engine bundle: the directory that export writes and the runtime reads.

    bundle.json             this module's ``BundleManifest``
    backbone.onnx, backbone.onnx.data    of the targets onnxruntime and torch
    backbone.int8.onnx, backbone.uint8.onnx  second forms of its graph, with products in int8, on the same
                            data: for processors with VNNI, and for others
    drafter.onnx, drafter.onnx.data      absent in a bundle that decodes plainly
    streaming.onnx, streaming.onnx.data  in its place: the target model with speculative streams
    search_8.onnx, accept.onnx, ...      graphs of steps on a device, if the bundle was exported with them
    backbone.engine, drafter.engine, ... of the targets tensorrt-rtx and tensorrt, in place of all of them
    tokenizer.json, generation_config.json
    chat_template.jinja, special_tokens_map.json  of a model with a chat template, as Transformers writes them

``bundle.json`` has the sha256 of every other file: one that is missing, cut short or changed is refused.

Positions of a slot in a key/value cache are counted here too: those of the longest text, and those that
passes write behind it. The exporter fixes the capacities of compiled engines, the runtime chooses all others.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from runtime.core.errors import BundleError

SCHEMA_VERSION = 5
MANIFEST_NAME = "bundle.json"
# How a draft head proposes.
PARALLEL, AUTOREGRESSIVE, STREAMING = "parallel", "autoregressive", "streaming"
# How a bundle decodes: with its draft head, or without.
METHODS = DRAFT, PLAIN = ("draft", "plain")
# Draft nodes that a step verifies at most.
MAX_NUM_NODES = 256
# The target whose ONNX files run by PyTorch.
TORCH = "torch"
# The largest ``top_k`` of tokens that a graph draws: compilers sort a limited number of values.
MAX_GRAPH_TOP_K = 1024
# What runs a step: the host between two engines, or graphs on a device.
STEPS = HOST_STEP, GRAPH_STEP = ("host", "graph")
TOKENIZER_NAME = "tokenizer.json"
CHAT_TEMPLATE_NAME, SPECIAL_TOKENS_NAME = "chat_template.jinja", "special_tokens_map.json"


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of ``bundle.json``. The fields of a class and their types are the schema."""


class TensorSpec(Record, frozen=True):
    """One graph input or output: symbolic axes are strings, as in ``("B", "N", 512)``."""

    name: str
    shape: tuple[int | str, ...]
    dtype: str


class GraphSpec(Record, frozen=True):
    """The tensors of one engine, in graph order."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


class ModelSpec(Record, frozen=True):
    """What the runtime has to know of the target model."""

    name: str
    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    feature_size: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    # The chat template around one user message; empty strings where the model has none.
    prompt_prefix: str
    prompt_suffix: str


class DrafterSpec(Record, frozen=True):
    """What the runtime has to know of the draft head."""

    drafter_type: str
    family: str  # PARALLEL (one pass), AUTOREGRESSIVE (a pass a level) or STREAMING (in the verify pass)
    num_frames: int
    top_k: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    merges_repeats: bool  # whether a label repeated in the next frame merges with it, as in CTC
    # (a, b): a node of prefix probability psi is accepted with probability sigmoid(a logit(psi) + b).
    calibration: tuple[float, float] | None
    # Of an autoregressive head: nodes of a level that are expanded at most, the probability that a level must
    # have, and whether every depth has a head of its own (Hydra) or one head serves all (EAGLE).
    beam_width: int = 0
    min_level_probability: float = 0.0
    heads_per_depth: bool = False
    precision: str = "fp32"  # of the head's matrices
    has_streams: bool = False  # whether it drafts with speculative streams, in either kind of pass
    # Of streams in the verify pass: drafts of a tree that pass the upper layers by default; None for all.
    kept_nodes: int | None = None

    @property
    def drafts_in_verify_pass(self) -> bool:
        """Whether the verify pass makes the drafts too; the graph ``streaming`` replaces ``drafter``."""
        return self.family == STREAMING


# The least, the best and the largest size of every open axis that a compiled engine accepts.
EngineProfile = dict[str, tuple[int, int, int]]


class EnginePlan(Record, frozen=True):
    """The shapes that compiled engines accept, and the memory that they need.

    library: the compiler's name and version, which the runtime's has to match
    capabilities: the GPUs they were compiled for, such as sm89
    prefill_chunk: tokens of a prompt that one pass reads at most
    profiles: by graph; each graph has the same number of them
    memory: bytes by graph and part: weights, cache, activations
    """

    max_context: int
    max_num_seqs: int
    max_nodes: int
    prefill_chunk: int
    library: str = ""
    capabilities: tuple[str, ...] = ()
    profiles: dict[str, tuple[EngineProfile, ...]] = {}
    memory: dict[str, dict[str, int]] = {}


class FileRecord(Record, frozen=True):
    sha256: str
    size: int


class BundleManifest(Record, frozen=True):
    """The contents of ``bundle.json``."""

    target: str
    precision: str
    model: ModelSpec
    drafter: DrafterSpec | None
    graphs: dict[str, GraphSpec]
    files: dict[str, FileRecord]
    versions: dict[str, str]
    # Largest absolute difference from PyTorch, and the share of equal preferences, by graph and check.
    validation: dict[str, dict[str, float]]
    # How quantising the target model's weights changed it (``export.quantisation.quality``); null if not.
    quality: dict[str, Any] | None = None
    # The shapes of compiled engines; null for ONNX Runtime, which takes any.
    engine_plan: EnginePlan | None = None
    # Whether the target model's attention gives a row the same bits whatever a pass computes beside it
    # (``runtime.decode.target_model``), and whether its quantised weights are multiplied with activations in
    # int8.
    row_invariant: bool = False
    int8_products: bool = False
    # Draft nodes of the steps that a device can run by itself; empty where the bundle lacks their graphs.
    step_nodes: tuple[int, ...] = ()
    schema_version: int = SCHEMA_VERSION

    @property
    def is_for_gpu(self) -> bool:
        """Whether the target is for GPUs, so that steps run on one unless it is said otherwise."""
        return self.engine_plan is not None or self.target == TORCH

    def to_json(self) -> str:
        return json.dumps(msgspec.to_builtins(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "BundleManifest":
        """Raises BundleError for another schema version, and for a missing, unknown or mistyped field."""
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            # Also a number of very many digits, and arrays within arrays without an end.
            raise BundleError(f"{MANIFEST_NAME} is not valid JSON: {error}") from error
        version = values.get("schema_version") if isinstance(values, dict) else None
        if version != SCHEMA_VERSION:
            raise BundleError(
                f"{MANIFEST_NAME}: schema_version must be {SCHEMA_VERSION} for this runtime, "
                f"got {version!r}; build it again with export/build_engines.py of this release"
            )
        try:
            return msgspec.convert(values, cls)
        except (msgspec.ValidationError, UnicodeEncodeError) as error:
            raise BundleError(f"{MANIFEST_NAME} does not follow schema {SCHEMA_VERSION}: {error}") from error


@dataclass(frozen=True)
class Bundle:
    """A bundle on disk: its directory, and what its ``bundle.json`` says."""

    path: Path
    manifest: BundleManifest

    @classmethod
    def load(cls, path: Path | str, *, verify: bool = True) -> "Bundle":
        """Read and verify a bundle.

        Raises BundleError naming a file that is missing, cut short or, if ``verify``, changed.
        """
        path = Path(path)
        try:
            text = (path / MANIFEST_NAME).read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise BundleError(f"{path} is no engine bundle: {MANIFEST_NAME} is missing") from None
        except UnicodeDecodeError as error:
            raise BundleError(f"{path}: {MANIFEST_NAME} is not UTF-8 text: {error}") from error
        except OSError as error:
            raise BundleError(f"{path}: {MANIFEST_NAME} cannot be read: {error.strerror}") from None
        manifest = BundleManifest.from_json(text)
        for name, record in manifest.files.items():
            if name in ("", "..") or Path(name).name != name:
                raise BundleError(f"{MANIFEST_NAME}: files must be plain names, got {name!r}")
            file = path / name
            if not file.is_file():
                raise BundleError(f"{path}: {name} is missing")
            size = file.stat().st_size
            if size != record.size:
                raise BundleError(f"{path}: {name} must have {record.size} bytes, got {size} (cut short?)")
            if verify and sha256_of(file) != record.sha256:
                raise BundleError(f"{path}: {name} is not the file of the bundle (sha256 differs)")
        head = manifest.drafter and (STREAMING if manifest.drafter.drafts_in_verify_pass else "drafter")
        for graph in filter(None, ("backbone", head)):
            if graph not in manifest.graphs:
                raise BundleError(f"{MANIFEST_NAME}: graph {graph!r} is not described")
        if TOKENIZER_NAME not in manifest.files:
            raise BundleError(f"{MANIFEST_NAME}: {TOKENIZER_NAME} is not listed")
        return cls(path, manifest)


def sha256_of(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


# Caches are read in blocks of so many positions.
CAPACITY_MULTIPLE = 8


def target_model_capacity(max_length: int, num_nodes: int, path_length: int) -> int:
    """Positions of the target model: behind the text is a whole tree, or the longest path packed.

    num_nodes: draft nodes of the largest tree, which has a root too
    path_length: nodes of the longest path with its root
    """
    return rounded_capacity(max_length + max(num_nodes + 1, path_length))


def drafter_capacity(
    max_length: int, *, padding: int, family: str, num_frames: int, beam_width: int = 0
) -> int:
    """Positions of a draft head: behind the text are the padding of its context, and its frames or nodes.

    padding: tokens by which the context of one sequence may be padded to that of another
    """
    drafts = beam_width * (num_frames - 1) if family == AUTOREGRESSIVE else num_frames
    return rounded_capacity(max_length + padding + drafts)


def streaming_capacity(max_length: int, num_nodes: int, num_frames: int) -> int:
    """Positions of a pass with speculative streams: a tree and the streams of all nodes are behind."""
    return rounded_capacity(max_length + (num_nodes + 1) * (1 + num_frames))


def rounded_capacity(positions: int) -> int:
    """The next multiple of CAPACITY_MULTIPLE."""
    return -(-positions // CAPACITY_MULTIPLE) * CAPACITY_MULTIPLE

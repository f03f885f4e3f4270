"""What the comparison knows of an engine, and the engines that it compares."""

import importlib.metadata
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from export.options import Options

PLAIN, PROMPT_LOOKUP, DRAFT = METHODS = ("plain", "prompt-lookup", "draft")
PRECISIONS = ("fp32", "int8", "int4")
EXTRA = "pip install -e '.[peers]'"

# Is given the tokens of an answer as they come, one or several at a time.
Receive = Callable[[Sequence[int]], None]
# ``decode(prompt_ids, max_new_tokens, receive)``: greedily, with no token that ends the text before.
Decode = Callable[[Sequence[int], int, Receive], None]


@dataclass(frozen=True)
class Opening:
    """What a worker opens.

    path: directory of the converted model
    threads: of the engine
    context: positions of the longest text
    lookup_tokens: drafts that prompt lookup makes at a time, where an engine asks for a number
    num_nodes: draft nodes of a step of ours; None: as many as pay for themselves
    """

    engine: str
    precision: str
    method: str
    path: str
    threads: int
    context: int
    lookup_tokens: int
    num_nodes: int | None


# Engines are compared by identity, because dictionaries cannot be hashed.
@dataclass(frozen=True, eq=False)
class Engine:
    """An engine of the comparison.

    module: has ``convert(model_dir, out, form, drafter)``, which writes the model's files into the empty
        directory ``out``, and ``open_model(opening)``, which returns a ``Decode``
    imports: modules that must be installed
    package: whose version is reported
    forms: what our precisions are called there
    methods: ways of decoding, the plain one first
    """

    name: str
    module: str
    imports: tuple[str, ...]
    package: str
    forms: dict[str, str]
    methods: tuple[str, ...] = (PLAIN,)

    @property
    def is_ours(self) -> bool:
        return self.package == "ctc-speculator"

    def missing(self) -> str | None:
        """One line that says how to get the engine; None where it is installed."""
        lacking = [name for name in self.imports if importlib.util.find_spec(name) is None]
        return f"{self.name} is left out: no module {lacking[0]}; {EXTRA}" if lacking else None

    def version(self) -> str:
        try:
            return importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:
            return "not installed as a package"


# What shares a scale in our quantised weights: the flag of ``ctc build``, and what it takes by default.
SCALE_FLAGS = {
    "int8": ("--int8-scales", Options.int8_scales),
    "int4": ("--int4-block-size", str(Options.int4_block_size)),
}

OURS_PLAIN, OURS_SPECULATIVE = "ours-plain", "ours-speculative"
_OURS = ("benchmarks.peers.engines.ours", ("onnxruntime",), "ctc-speculator")
_OUR_FORMS = {precision: precision for precision in PRECISIONS}
ENGINES = {
    engine.name: engine
    for engine in (
        Engine(OURS_PLAIN, *_OURS, _OUR_FORMS),
        Engine(OURS_SPECULATIVE, *_OURS, _OUR_FORMS, (PROMPT_LOOKUP, DRAFT)),
        Engine(
            "llama.cpp",
            "benchmarks.peers.engines.llama",
            ("llama_cpp", "gguf"),
            "llama-cpp-python",
            {"fp32": "F32", "int8": "Q8_0", "int4": "Q4_0"},
            (PLAIN, PROMPT_LOOKUP),
        ),
        # With minima, which make it slower and closer to the model.
        Engine(
            "llama.cpp-q4_1",
            "benchmarks.peers.engines.llama",
            ("llama_cpp", "gguf"),
            "llama-cpp-python",
            {"int4": "Q4_1"},
        ),
        Engine(
            "onnxruntime-genai",
            "benchmarks.peers.engines.genai",
            ("onnxruntime_genai",),
            "onnxruntime-genai",
            _OUR_FORMS,
        ),
        Engine(
            "openvino-genai",
            "benchmarks.peers.engines.openvino",
            ("openvino_genai", "gguf"),
            "openvino-genai",
            {"fp32": "f32", "int8": "Q8_0", "int4": "Q4_0"},
            (PLAIN, PROMPT_LOOKUP),
        ),
        Engine(
            "ctranslate2",
            "benchmarks.peers.engines.ctranslate",
            ("ctranslate2",),
            "ctranslate2",
            # It has kernels of 4 bits for GPUs only.
            {"fp32": "float32", "int8": "int8"},
        ),
        Engine(
            "transformers",
            "benchmarks.peers.engines.hugging_face",
            ("transformers", "torch"),
            "transformers",
            {"fp32": "float32"},
            (PLAIN, PROMPT_LOOKUP),
        ),
    )
}


def model_files(engine: Engine, method: str, precision: str) -> str:
    """Name of the directory of the converted model, which methods share unless one needs a head."""
    name = "ours" if engine.is_ours else engine.name
    return f"{name}-{DRAFT}-{precision}" if method == DRAFT else f"{name}-{precision}"

"""The engines of the comparison: how each one's model is made, and how it is run."""

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from export.options import Options
from runtime.core.errors import UserError
from runtime.core.system import OURS, installed_versions

PLAIN, PROMPT_LOOKUP, DRAFT = METHODS = ("plain", "prompt-lookup", "draft")
PRECISIONS = ("fp32", "int8", "int4")
EXTRA = "pip install -e '.[peers]'"
# Files of a converted model.
BUNDLE_NAME, GGUF_NAME, LINK_NAME = "bundle", "model.gguf", "model"
VOCABULARY_NAME, GENAI_CONFIG_NAME = "vocabulary.json", "genai_config.json"
# Tokens that prompt lookup in OpenVINO compares.
MAX_NGRAM_SIZE = 3

# ``convert(model_dir, out, form, flags)`` writes the files of the model into the empty directory ``out``; the
# flags are further ones of ``ctc build``, for ours.
Convert = Callable[[Path, Path, str, Sequence[str]], None]
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

    def file(self, name: str) -> Path:
        return Path(self.path) / name


# Engines are compared by identity, because dictionaries cannot be hashed.
@dataclass(frozen=True, eq=False)
class Engine:
    """An engine of the comparison.

    imports: modules that must be installed
    package: whose version is reported
    forms: what our precisions are called there
    methods: ways of decoding, the plain one first
    """

    name: str
    convert: Convert
    open_model: Callable[[Opening], Decode]
    imports: tuple[str, ...]
    package: str
    forms: dict[str, str]
    methods: tuple[str, ...] = (PLAIN,)

    @property
    def is_ours(self) -> bool:
        return self.package == OURS

    def missing(self) -> str | None:
        """One line that says how to get the engine; None where it is installed."""
        lacking = [name for name in self.imports if importlib.util.find_spec(name) is None]
        return f"{self.name} is left out: no module {lacking[0]}; {EXTRA}" if lacking else None

    def version(self) -> str:
        return installed_versions([self.package]).get(self.package, "not installed as a package")


def convert_ours(model_dir: Path, out: Path, form: str, flags: Sequence[str]) -> None:
    from export.build_engines import main

    argv = ["--model", str(model_dir), "--out", str(out / BUNDLE_NAME), "--precision", form, *flags]
    if main(argv):
        raise UserError("the bundle cannot be built")


def open_ours(opening: Opening) -> Decode:
    from runtime.decoder import SpeculativeDecoder

    decoder = SpeculativeDecoder.from_bundle(
        opening.file(BUNDLE_NAME),
        method=None if opening.method == DRAFT else PLAIN,
        num_nodes=opening.num_nodes,
        num_threads=opening.threads,
        prompt_lookup=opening.method == PROMPT_LOOKUP,
        verify=False,
    )

    def decode(prompt_ids: Sequence[int], max_new_tokens: int, receive: Receive) -> None:
        for chunk in decoder.stream(prompt_ids, max_new_tokens=max_new_tokens, stop_token_ids=()):
            receive(chunk.token_ids)

    return decode


def convert_gguf(model_dir: Path, out: Path, form: str, flags: Sequence[str]) -> None:
    from benchmarks.peers.gguf_file import write_gguf  # imports torch

    write_gguf(model_dir, out / GGUF_NAME, form)


def open_llama(opening: Opening) -> Decode:
    """llama.cpp through llama-cpp-python, which writes a token at a time."""
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    lookup = opening.method == PROMPT_LOOKUP
    model = Llama(
        model_path=str(opening.file(GGUF_NAME)),
        # The drafts of the last step may go beyond the text.
        n_ctx=opening.context + opening.lookup_tokens + 1,
        n_threads=opening.threads,
        n_threads_batch=opening.threads,
        draft_model=LlamaPromptLookupDecoding(num_pred_tokens=opening.lookup_tokens) if lookup else None,
        verbose=False,
    )

    def decode(prompt_ids: Sequence[int], max_new_tokens: int, receive: Receive) -> None:
        # Otherwise it would keep what two prompts begin with alike.
        model.reset()
        tokens = model.generate(list(prompt_ids), temp=0.0, repeat_penalty=1.0)
        for _ in range(max_new_tokens):
            receive([next(tokens)])
        tokens.close()

    return decode


def convert_genai(model_dir: Path, out: Path, form: str, flags: Sequence[str]) -> None:
    cache = out / "cache"
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(model_dir), "-o", str(out)]
    command += ["-p", form, "-e", "cpu", "-c", str(cache)]
    done = subprocess.run(command, stdout=sys.stderr, check=False)
    shutil.rmtree(cache, ignore_errors=True)
    if done.returncode:
        raise UserError("the builder of onnxruntime-genai failed")


def open_genai(opening: Opening) -> Decode:
    """ONNX Runtime's own engine for texts, with the model that its builder makes."""
    import onnxruntime_genai as genai

    config = genai.Config(opening.path)
    described = json.loads(opening.file(GENAI_CONFIG_NAME).read_text(encoding="utf-8"))["model"]
    session = {"intra_op_num_threads": opening.threads}
    # It wants a token that ends texts, and cannot be told to go on after it. The last token of the vocabulary
    # is the rarest. A text that has it is shorter than the others, which the number of tokens shows.
    settings = {"eos_token_id": described["vocab_size"] - 1, "decoder": {"session_options": session}}
    config.overlay(json.dumps({"model": settings}))
    model = genai.Model(config)

    def decode(prompt_ids: Sequence[int], max_new_tokens: int, receive: Receive) -> None:
        parameters = genai.GeneratorParams(model)
        parameters.set_search_options(do_sample=False, max_length=len(prompt_ids) + max_new_tokens)
        generator = genai.Generator(model, parameters)
        generator.append_tokens(list(prompt_ids))
        for _ in range(max_new_tokens):
            generator.generate_next_token()
            receive([int(generator.get_next_tokens()[0])])
            if generator.is_done():
                break

    return decode


def convert_openvino(model_dir: Path, out: Path, form: str, flags: Sequence[str]) -> None:
    """A traced graph in float32, of which it reads no GGUF file, and a GGUF file in 8 and 4 bits."""
    if form != "f32":
        convert_gguf(model_dir, out, form, flags)
        return
    from benchmarks.peers.openvino_graph import write_graph  # imports torch

    write_graph(model_dir, out)


def open_openvino(opening: Opening) -> Decode:
    import openvino as ov
    import openvino_genai as genai

    lookup = opening.method == PROMPT_LOOKUP
    # On a processor with bfloat16 it would compute in that.
    properties: dict[str, Any] = {
        "INFERENCE_NUM_THREADS": opening.threads,
        "INFERENCE_PRECISION_HINT": "f32",
    }
    path = opening.path
    if opening.precision == "fp32":
        # By default its cache has 8 bits.
        properties["KV_CACHE_PRECISION"] = "f32"
    else:
        path = str(opening.file(GGUF_NAME))
    if lookup:
        properties["prompt_lookup"] = True
    pipeline = genai.LLMPipeline(path, "CPU", **properties)

    class Streamer(genai.StreamerBase):
        def __init__(self, receive: Receive):
            super().__init__()
            self.receive = receive

        def write(self, tokens: int | list[int]) -> Any:
            self.receive([tokens] if isinstance(tokens, int) else tokens)
            return genai.StreamingStatus.RUNNING

        def end(self) -> None:
            pass

    def decode(prompt_ids: Sequence[int], max_new_tokens: int, receive: Receive) -> None:
        config = genai.GenerationConfig()
        config.max_new_tokens = max_new_tokens
        config.do_sample = False
        config.ignore_eos = True
        # It wants to know one all the same, and a graph without a tokenizer has none.
        config.set_eos_token_id(0)
        if lookup:
            config.num_assistant_tokens = opening.lookup_tokens
            config.max_ngram_size = MAX_NGRAM_SIZE
        ids = np.array([prompt_ids], np.int64)
        inputs = genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(np.ones_like(ids)))
        pipeline.generate(inputs, config, Streamer(receive))

    return decode


def convert_ctranslate2(model_dir: Path, out: Path, form: str, flags: Sequence[str]) -> None:
    from ctranslate2.converters import TransformersConverter

    converter = TransformersConverter(str(model_dir))
    # It refuses a directory that exists.
    converter.convert(str(out), quantization=form, force=True)


def open_ctranslate2(opening: Opening) -> Decode:
    import ctranslate2

    compute_type = ENGINES[opening.engine].forms[opening.precision]
    model = ctranslate2.Generator(
        opening.path, device="cpu", compute_type=compute_type, intra_threads=opening.threads
    )
    vocabulary = json.loads(opening.file(VOCABULARY_NAME).read_text(encoding="utf-8"))

    def decode(prompt_ids: Sequence[int], max_new_tokens: int, receive: Receive) -> None:
        def step(result: Any) -> bool:
            receive([result.token_id])
            return False

        model.generate_batch(
            [[vocabulary[index] for index in prompt_ids]],
            include_prompt_in_result=False,
            max_length=max_new_tokens,
            sampling_topk=1,
            end_token=[len(vocabulary) + 1],
            callback=step,
        )

    return decode


def convert_transformers(model_dir: Path, out: Path, form: str, flags: Sequence[str]) -> None:
    """Link to the model, which is used as it is."""
    (out / LINK_NAME).symlink_to(model_dir.resolve())


def open_transformers(opening: Opening) -> Decode:
    """Transformers on PyTorch, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(opening.threads)
    model: Any = AutoModelForCausalLM.from_pretrained(opening.file(LINK_NAME), dtype=torch.float32)
    model.eval()
    # No text ends before it has all its tokens.
    model.generation_config.eos_token_id = None
    lookup = opening.method == PROMPT_LOOKUP
    options = {"prompt_lookup_num_tokens": opening.lookup_tokens} if lookup else {}

    class Streamer:
        def __init__(self, receive: Receive):
            self.receive = receive
            self.has_prompt = False

        def put(self, tokens: Any) -> None:
            """Receive the prompt, and then the tokens of the answer."""
            if self.has_prompt:
                self.receive(tokens.reshape(-1).tolist())
            self.has_prompt = True

        def end(self) -> None:
            pass

    def decode(prompt_ids: Sequence[int], max_new_tokens: int, receive: Receive) -> None:
        ids = torch.tensor([list(prompt_ids)])
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            streamer=Streamer(receive),
            **options,
        )

    return decode


# What shares a scale in our quantised weights: the flag of ``ctc build``, and what it takes by default.
SCALE_FLAGS = {
    "int8": ("--int8-scales", Options.int8_scales),
    "int4": ("--int4-block-size", str(Options.int4_block_size)),
}

OURS_PLAIN, OURS_SPECULATIVE = "ours-plain", "ours-speculative"
_OURS = (convert_ours, open_ours, ("onnxruntime",), OURS)
_LLAMA = (convert_gguf, open_llama, ("llama_cpp", "gguf"), "llama-cpp-python")
_GENAI = (convert_genai, open_genai, ("onnxruntime_genai",), "onnxruntime-genai")
_OPENVINO = (convert_openvino, open_openvino, ("openvino_genai", "gguf"), "openvino-genai")
_CTRANSLATE2 = (convert_ctranslate2, open_ctranslate2, ("ctranslate2",), "ctranslate2")
_TRANSFORMERS = (convert_transformers, open_transformers, ("transformers", "torch"), "transformers")
_OUR_FORMS = {precision: precision for precision in PRECISIONS}
_GGUF_FORMS = {"int8": "Q8_0", "int4": "Q4_0"}
ENGINES = {
    engine.name: engine
    for engine in (
        Engine(OURS_PLAIN, *_OURS, _OUR_FORMS),
        Engine(OURS_SPECULATIVE, *_OURS, _OUR_FORMS, (PROMPT_LOOKUP, DRAFT)),
        Engine("llama.cpp", *_LLAMA, {"fp32": "F32", **_GGUF_FORMS}, (PLAIN, PROMPT_LOOKUP)),
        # With minima, which make it slower and closer to the model.
        Engine("llama.cpp-q4_1", *_LLAMA, {"int4": "Q4_1"}),
        Engine("onnxruntime-genai", *_GENAI, _OUR_FORMS),
        Engine("openvino-genai", *_OPENVINO, {"fp32": "f32", **_GGUF_FORMS}, (PLAIN, PROMPT_LOOKUP)),
        # It has kernels of 4 bits for GPUs only.
        Engine("ctranslate2", *_CTRANSLATE2, {"fp32": "float32", "int8": "int8"}),
        Engine("transformers", *_TRANSFORMERS, {"fp32": "float32"}, (PLAIN, PROMPT_LOOKUP)),
    )
}

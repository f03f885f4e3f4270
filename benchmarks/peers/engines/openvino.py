"""OpenVINO GenAI: a traced graph in float32, and GGUF files, which it reads itself, in 8 and 4 bits."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.engine import PROMPT_LOOKUP, Decode, Opening, Receive
from benchmarks.peers.gguf_file import write_gguf

GGUF_NAME = "model.gguf"
# It reads no GGUF file in float32.
FLOAT = "f32"
MAX_NGRAM_SIZE = 3


def convert(model_dir: Path, out: Path, form: str, drafter: Path | None) -> None:
    if form != FLOAT:
        write_gguf(model_dir, out / GGUF_NAME, form)
        return
    from benchmarks.peers.openvino_graph import write_graph  # imports torch

    write_graph(model_dir, out)


def open_model(opening: Opening) -> Decode:
    import openvino as ov
    import openvino_genai as genai

    lookup = opening.method == PROMPT_LOOKUP
    # On a processor with bfloat16 it would compute in that.
    properties: dict[str, Any] = {
        "INFERENCE_NUM_THREADS": opening.threads,
        "INFERENCE_PRECISION_HINT": "f32",
    }
    if opening.precision == "fp32":
        # By default its cache has 8 bits.
        properties["KV_CACHE_PRECISION"] = "f32"
        path = opening.path
    else:
        path = str(Path(opening.path) / GGUF_NAME)
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

"""ONNX Runtime's own engine for texts, onnxruntime-genai, with the model that its builder makes."""

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers.engine import Decode, Opening, Receive
from runtime.core.errors import UserError

CONFIG_NAME = "genai_config.json"


def convert(model_dir: Path, out: Path, form: str, drafter: Path | None) -> None:
    cache = out / "cache"
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(model_dir), "-o", str(out)]
    command += ["-p", form, "-e", "cpu", "-c", str(cache)]
    done = subprocess.run(command, stdout=sys.stderr, check=False)
    shutil.rmtree(cache, ignore_errors=True)
    if done.returncode:
        raise UserError("the builder of onnxruntime-genai failed")


def open_model(opening: Opening) -> Decode:
    import onnxruntime_genai as genai

    config = genai.Config(opening.path)
    described = json.loads((Path(opening.path) / CONFIG_NAME).read_text(encoding="utf-8"))["model"]
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

"""llama.cpp through llama-cpp-python, which writes a token at a time."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers.engine import PROMPT_LOOKUP, Decode, Opening, Receive
from benchmarks.peers.gguf_file import write_gguf

FILE_NAME = "model.gguf"


def convert(model_dir: Path, out: Path, form: str, drafter: Path | None) -> None:
    write_gguf(model_dir, out / FILE_NAME, form)


def open_model(opening: Opening) -> Decode:
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    lookup = opening.method == PROMPT_LOOKUP
    model = Llama(
        model_path=str(Path(opening.path) / FILE_NAME),
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

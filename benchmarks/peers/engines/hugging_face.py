"""Transformers on PyTorch, in float32."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.engine import PROMPT_LOOKUP, Decode, Opening, Receive

LINK_NAME = "model"


def convert(model_dir: Path, out: Path, form: str, drafter: Path | None) -> None:
    """Link to the model, which is used as it is."""
    (out / LINK_NAME).symlink_to(model_dir.resolve())


def open_model(opening: Opening) -> Decode:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(opening.threads)
    model: Any = AutoModelForCausalLM.from_pretrained(Path(opening.path) / LINK_NAME, dtype=torch.float32)
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

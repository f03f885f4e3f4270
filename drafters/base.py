"""The base of all draft heads: a configuration, the target model's frozen tables, a checkpoint.

Weights are stored in float32, in float16, or with eight bits a weight: a matrix is then ``NAME`` [..., R, C]
int8 and one scale for each of its rows, ``NAME.scale`` [..., R, 1] float16: half the size of float16, and
rounded to 1/254 of a row's largest weight. Vectors are float16. Numbers of tokens stay what they are.
"""

import dataclasses
import json
import os
import re
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from drafters.config import CONFIG_NAME, WEIGHTS_NAME, DrafterConfig, DrafterConfigError

SCALE = ".scale"
LARGEST = 127
# The smallest number above 0 in float16.
LEAST_SCALE = 2.0**-24


def save_weights(state: dict[str, Tensor], path: Path, dtype: torch.dtype) -> None:
    """Write weights; ``dtype`` of the matrices: float32, float16 or int8."""
    stored = {}
    for name, value in state.items():
        if not value.is_floating_point():
            stored[name] = value.contiguous()
        elif dtype == torch.int8 and value.ndim > 1:
            scale = (value.abs().amax(-1, keepdim=True) / LARGEST).half()
            # A row of zeros needs a scale that is not zero.
            scale = scale.clamp(min=LEAST_SCALE)
            rows = (value / scale.float()).round().clamp(-LARGEST, LARGEST)
            stored[name], stored[name + SCALE] = rows.to(torch.int8), scale
        else:
            stored[name] = value.to(torch.float16 if dtype == torch.int8 else dtype).contiguous()
    save_tensors(stored, path)


def save_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a file of safetensors. Raises OSError, for a full disk for instance, and leaves no new file."""
    is_new = not path.exists()
    try:
        path.touch()
        mode = path.stat().st_mode
        save_file(tensors, path, metadata)
        # The library replaces the file by one that nobody else may read.
        path.chmod(mode)
    except (SafetensorError, OSError) as error:
        if is_new:
            path.unlink(missing_ok=True)
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error


def load_weights(path: Path) -> dict[str, Tensor]:
    """The weights in float32, token numbers in int64. Raises safetensors' errors; KeyError without scales."""
    stored = load_file(path)
    rows = {name for name, value in stored.items() if value.dtype == torch.int8}
    scales = {name + SCALE for name in rows}
    weights = {}
    for name, value in stored.items():
        if name in rows:
            weights[name] = value.float() * stored[name + SCALE].float()
        elif name not in scales:
            weights[name] = value.float() if value.is_floating_point() else value
    return weights


class Drafter(nn.Module):
    """A draft head; ``attach_model`` shares the embedding and the LM head of its target model with it.

    draft_token_ids: the draft vocabulary, the tokens [L] int64, ascending, that drafts are made of; row i of
        the draft LM head is the LM head's row of token ``draft_token_ids[i]``. None where it is all tokens
    """

    embed_tokens: Tensor
    lm_head: Tensor
    draft_token_ids: Tensor | None
    tabulated_lm_head: Tensor | None

    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.config = config
        # Frozen, owned by the target model, absent from the checkpoint.
        self.register_buffer("embed_tokens", torch.empty(0), persistent=False)
        self.register_buffer("lm_head", torch.empty(0), persistent=False)
        size = config.draft_vocab_size
        self.register_buffer("draft_token_ids", None if size is None else torch.arange(size))
        # The draft LM head, once ``tabulate`` has looked it up. It is a buffer because the export rounds
        # parameters and buffers.
        self.register_buffer("tabulated_lm_head", None, persistent=False)

    def attach_model(self, model: Any) -> Self:
        """Share the frozen parts of a target model, a causal LM of Hugging Face, that the head uses."""
        return self.attach_base(model.get_input_embeddings().weight, model.lm_head.weight)

    def attach_base(self, embed_tokens: Tensor, lm_head: Tensor) -> Self:
        """Share the target model's frozen embedding and LM head, each [V, H]."""
        expected = (self.config.vocab_size, self.config.hidden_size)
        for name, tensor in (("embed_tokens", embed_tokens), ("lm_head", lm_head)):
            if tuple(tensor.shape) != expected:
                raise DrafterConfigError(
                    f"{name} of the target model must have shape {expected} for this drafter, "
                    f"got {tuple(tensor.shape)}"
                )
        self.embed_tokens = embed_tokens.detach()
        self.lm_head = lm_head.detach()
        return self

    def set_draft_vocabulary(self, token_ids: Tensor) -> None:
        """Choose the tokens [L] that drafts are made of; ascending and distinct."""
        assert self.draft_token_ids is not None
        self.draft_token_ids.copy_(token_ids)

    @property
    def draft_lm_head(self) -> Tensor:
        """The LM head's rows [L, H] of the tokens that drafts are made of."""
        if self.draft_token_ids is None:
            return self.lm_head
        if self.tabulated_lm_head is not None:
            return self.tabulated_lm_head
        return F.embedding(self.draft_token_ids, self.lm_head)

    def label_ids(self, token_ids: Tensor) -> Tensor:
        """The draft LM head's rows for tokens, [...] int64; -1 for a token that drafts cannot have."""
        if self.draft_token_ids is None:
            return token_ids
        rows = torch.full((self.config.vocab_size,), -1, device=token_ids.device)
        rows[self.draft_token_ids] = torch.arange(self.config.label_count, device=token_ids.device)
        return rows[token_ids]

    def token_ids(self, label_ids: Tensor) -> Tensor:
        """The tokens that rows of the draft LM head stand for, [...] int64."""
        return label_ids if self.draft_token_ids is None else self.draft_token_ids[label_ids]

    def tabulate(self) -> None:
        """Compute once what depends on weights alone. The head must not be trained after this."""
        if self.draft_token_ids is not None:
            self.tabulated_lm_head = self.draft_lm_head

    @torch.no_grad()
    def start_from(self, norm_weight: Tensor) -> None:
        """Initialise the last norm with the target model's [H], because both feed the same LM head."""
        self.norm.weight.copy_(norm_weight)  # type: ignore[union-attr, operator]

    def calibrate(self, calibration: tuple[float, float] | None) -> None:
        """Keep the map from prefix to acceptance probability with the head (``DrafterConfig``)."""
        self.config = dataclasses.replace(self.config, calibration=calibration)

    def embed(self, token_ids: Tensor) -> Tensor:
        """token_ids [...] int64 -> [..., H]."""
        return F.embedding(token_ids, self.embed_tokens)

    def save_pretrained(self, directory: Path | str, *, dtype: torch.dtype = torch.float32) -> None:
        """Write ``config.json`` and ``model.safetensors``; ``dtype`` as for ``save_weights``."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        save_weights(self.state_dict(), directory / WEIGHTS_NAME, dtype)
        (directory / CONFIG_NAME).write_text(
            json.dumps(self.config.to_dict(), indent=2) + "\n", encoding="utf-8"
        )

    def load_weights(self, directory: Path) -> Self:
        """Load a checkpoint's weights in float32. Raises DrafterConfigError with the reason."""
        path = directory / WEIGHTS_NAME
        if not path.is_file():
            raise DrafterConfigError(f"{directory} is no drafter checkpoint: {WEIGHTS_NAME} is missing")
        try:
            self.load_state_dict(load_weights(path))
        except Exception as error:
            raise DrafterConfigError(f"{path} does not fit its {CONFIG_NAME}: {error}") from error
        return self

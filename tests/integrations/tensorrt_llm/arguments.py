"""TensorRT-LLM's arguments, as far as trtllm.yaml and Triton's model.yaml have them.

The classes have the engine's names, and of its fields those that are written or that it reads in the draft
model's config.json: their types, allowed values and limits, and no defaults. ``test_source.py`` compares them
with the engine's sources.
"""

import json
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, model_validator

AttentionBackend = Literal["VANILLA", "TRTLLM"]


class StrictBaseModel(BaseModel):
    model_config = ConfigDict(extra="forbid")


class KvCacheConfig(StrictBaseModel):
    enable_block_reuse: bool
    free_gpu_memory_fraction: Annotated[float | None, Field(ge=0, le=1)]


class DecodingBaseConfig(StrictBaseModel):
    """What both decoding types have."""

    max_draft_len: NonNegativeInt | None
    speculative_model: str | Path | None
    target_layer_ids: list[int] | None
    mask_token_id: int | None
    attention_backend: AttentionBackend

    @model_validator(mode="before")
    @classmethod
    def read_the_draft_model(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Add what the engine reads in the draft model's directory, because trtllm.yaml does not have it."""
        path = Path(values["speculative_model"]) / "config.json"
        draft = json.loads(path.read_text(encoding="utf-8"))
        # The engine looks for each of them first among the settings of DFlash, then beside them.
        draft |= draft["dflash_config"]
        return {**{name: draft[name] for name in cls.model_fields if name in draft}, **values}

    @model_validator(mode="after")
    def has_drafts(self) -> Self:
        assert self.max_draft_len, "max_draft_len: expected more than 0"
        return self


class DFlashDecodingConfig(DecodingBaseConfig):
    decoding_type: Literal["DFlash"]


class DSparkDecodingConfig(DecodingBaseConfig):
    decoding_type: Literal["DSpark"]
    block_size: PositiveInt | None
    markov_rank: int | None

    @model_validator(mode="after")
    def has_whole_blocks(self) -> Self:
        assert self.block_size == self.max_draft_len, "block_size: expected max_draft_len"
        return self


SpeculativeConfig = Annotated[
    DFlashDecodingConfig | DSparkDecodingConfig, Field(discriminator="decoding_type")
]


class TorchLlmArgs(StrictBaseModel):
    """The arguments of the engine: of trtllm-serve's command line and trtllm.yaml, or of model.yaml."""

    model: str | Path
    backend: Literal["pytorch"]
    max_batch_size: int | None
    max_seq_len: int | None
    max_num_tokens: int | None
    kv_cache_config: KvCacheConfig
    speculative_config: SpeculativeConfig | None


class TritonConfig(StrictBaseModel):
    """``triton_config`` of model.yaml, which Triton's model converts with int() and bool()."""

    max_batch_size: int
    decoupled: bool

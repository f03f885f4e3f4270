"""Random models with tokenizers, as directories that the exporter reads."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)


def save_random_model(
    directory: Path, alphabet: list[str] = BYTES, pre_tokenizer: Any = BYTE_LEVEL, **sizes: Any
) -> LlamaForCausalLM:
    """Write a random Llama of ``LlamaConfig(**sizes)``, always the same; its tokens are the letters given."""
    torch.manual_seed(0)
    no_specials: dict[str, Any] = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    model = LlamaForCausalLM(LlamaConfig(**no_specials, **sizes)).eval()
    model.save_pretrained(directory, max_shard_size="1GB")
    save_tokenizer(directory, alphabet, pre_tokenizer)
    return model


def save_tokenizer(directory: Path, alphabet: list[str] = BYTES, pre_tokenizer: Any = BYTE_LEVEL) -> None:
    """Write a tokenizer whose tokens are the letters given."""
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)

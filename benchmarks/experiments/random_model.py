"""Random models with tokenizers, and draft heads of them, as directories that the exporter reads."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from drafters.base import Drafter
from drafters.build import build_drafter
from drafters.config import DrafterConfig

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


def random_head(model: Any, **settings: Any) -> Drafter:
    """A random draft head of a Llama with two layers, whose features it reads."""
    config = model.config
    head = build_drafter(
        DrafterConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.hidden_size // config.num_attention_heads,
            target_layer_ids=(0, 1),
            base_num_layers=2,
            base_model="model",
            **settings,
        )
    )
    head.attach_base(model.get_input_embeddings().weight, model.lm_head.weight)
    head.start_from(model.model.norm.weight)
    return head

"""A tiny random backbone, its draft head and their bundle, made once a session."""

from pathlib import Path

import pytest

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}Q: {{ message['content'] }}\nA:"
    "{% else %} {{ message['content'] }}{{ eos_token }}\n{% endif %}"
    "{% endfor %}"
)


def save_tiny_tokenizer(directory: Path) -> int:
    """Write a byte-level tokenizer (256 bytes, eos, pad) with a chat template; returns its size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = ["<|endoftext|>", "<|pad|>"]
    vocab = {token: index for index, token in enumerate([*specials, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=specials[0], pad_token=specials[1], model_max_length=512
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(directory)
    return len(fast)


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama whose greedy text varies, with a tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    directory = tmp_path_factory.mktemp("tiny") / "model"
    size = save_tiny_tokenizer(directory)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,  # at the usual 0.02 greedy text is one token, repeated
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def tiny_drafter_dir(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random CTC draft head for the tiny model."""
    import json

    import torch

    from drafters.config import DrafterConfig
    from drafters.ctc import CTCDrafter

    base = json.loads((tiny_model_dir / "config.json").read_text(encoding="utf-8"))
    directory = tmp_path_factory.mktemp("tiny") / "drafter"
    torch.manual_seed(1)
    CTCDrafter(
        DrafterConfig(
            vocab_size=base["vocab_size"],
            hidden_size=64,
            intermediate_size=128,
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            target_layer_ids=(0, 1),
            base_num_layers=2,
            num_frames=4,
            base_model="model",
        )
    ).save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def tiny_bundle_dir(
    tiny_model_dir: Path, tiny_drafter_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The tiny model and draft head as an engine bundle. Read only: copy it before changing it."""
    from export.build_engines import build

    directory = tmp_path_factory.mktemp("tiny") / "bundle"
    build(tiny_model_dir, directory, drafter_dir=tiny_drafter_dir)
    return directory

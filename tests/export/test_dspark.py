"""A head in DSpark's form, compared with the layers of Qwen3 that Transformers has."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, DynamicCache
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding

from drafters.parallel import ParallelDrafter
from export.build_engines import main

Make = Callable[..., Any]
CONTEXT, MASK_TOKEN = 7, 5


class Block(nn.Module):
    """The parallel stage of DSpark with the modules and names of its checkpoints."""

    def __init__(self, config: Any):
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        config._attn_implementation = "eager"
        self.config = config
        features = len(config.dflash_config["target_layer_ids"]) * hidden
        self.fc = nn.Linear(features, hidden, bias=False)
        self.hidden_norm, self.norm = Qwen3RMSNorm(hidden, eps), Qwen3RMSNorm(hidden, eps)
        self.layers = nn.ModuleList(
            Qwen3DecoderLayer(config, index) for index in range(config.num_hidden_layers)
        )
        self.rotary = Qwen3RotaryEmbedding(config)

    def forward(self, features: Tensor, embedded: Tensor) -> Tensor:
        """features [1, A, F*H], embedded block [1, T, H] -> [1, T, H]."""
        context = self.hidden_norm(self.fc(features))
        length, count = context.shape[1], embedded.shape[1]
        positions = torch.arange(length + count)[None]
        before = self.rotary(context, positions[:, :length])
        behind = self.rotary(context, positions[:, length:])
        cache, hidden = DynamicCache(config=self.config), embedded
        layer: Any
        for layer in self.layers:
            # A layer that reads the context alone leaves its keys and values in the cache.
            layer.self_attn(context, before, torch.zeros(1, 1, length, length), past_key_values=cache)
            hidden = layer(
                hidden,
                attention_mask=torch.zeros(1, 1, count, length + count),
                position_ids=positions[:, length:],
                past_key_values=cache,
                position_embeddings=behind,
            )
        result: Tensor = self.norm(hidden)
        return result


def write(head: Any, model_dir: Path, directory: Path, target: str) -> Path:
    head.save_pretrained(directory / "head")
    command = ["--model", str(model_dir), "--drafter", str(directory / "head"), "--target", target]
    assert main([*command, "--out", str(directory / "draft")]) == 0
    return directory / "draft"


@pytest.mark.parametrize(("trunk", "draft_vocab_size"), [("dspark", None), ("dspark", 40), ("dflash", None)])
@torch.no_grad()
def test_the_directory_is_what_the_papers_say(
    make_tiny_head: Make, tiny_model_dir: Path, tmp_path: Path, trunk: str, draft_vocab_size: int | None
) -> None:
    transition = {"transition": "markov", "num_candidates": 9} if trunk == "dspark" else {}
    head: ParallelDrafter = make_tiny_head(
        "block",
        trunk=trunk,
        num_layers=2,
        mask_token_id=MASK_TOKEN,
        draft_vocab_size=draft_vocab_size,
        **transition,
    )
    directory = write(head, tiny_model_dir, tmp_path, "vllm")
    config = AutoConfig.from_pretrained(directory)
    weights = load_file(directory / "model.safetensors")
    tables = [weights.pop(name) for name in sorted(weights) if name.startswith("markov_head.")]
    if draft_vocab_size is not None:
        tokens = torch.arange(draft_vocab_size) + weights.pop("d2t")
        assert torch.equal(weights.pop("lm_head.weight"), head.lm_head[tokens])
    block = Block(config).eval()
    block.load_state_dict(weights)  # raises for a missing and for an unexpected name

    features = torch.randn(1, CONTEXT, head.config.feature_size)
    anchor, count = torch.tensor([[9]]), head.config.num_frames
    masks = torch.full((1, count - 1), config.dflash_config["mask_token_id"])
    slots = torch.cat((anchor, masks), dim=1)
    found = block(features, F.embedding(slots, head.embed_tokens))
    expected = head(
        features,
        torch.arange(CONTEXT)[None],
        anchor,
        torch.arange(CONTEXT, CONTEXT + count)[None],
        torch.ones(1, 1, count, CONTEXT + count, dtype=torch.bool),
    )
    torch.testing.assert_close(head.label_logits(found), head.label_logits(expected), atol=1e-5, rtol=0)
    if trunk == "dflash":
        assert config.architectures == ["DFlashDraftModel"]
        assert config.block_size == count
        return
    w1, w2 = tables
    assert head.transition is not None
    labels = torch.arange(head.config.label_count)
    bias = (
        head.transition.of_previous(anchor[0], head.embed_tokens)
        @ head.transition.of_following(labels, head.draft_lm_head).mT
    )
    torch.testing.assert_close(w1[anchor[0]] @ w2.mT, bias)
    assert bias.abs().max() > 0.01


def test_each_engine_is_told_its_own_method(
    make_tiny_head: Make, tiny_model_dir: Path, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {
        "trunk": "dspark",
        "num_layers": 1,
        "transition": "markov",
        "num_candidates": 9,
    }
    for target, layers in (
        ("vllm", (0, 1)),
        ("sglang", (0,)),
        ("edge-llm", (0, 1)),
        ("tensorrt-llm", (0, 1)),
    ):
        settings["target_layer_ids"] = layers
        directory = write(make_tiny_head("block", **settings), tiny_model_dir, tmp_path / target, target)
        config = json.loads((directory / "config.json").read_text())
        assert config["architectures"] == ["Qwen3DSparkModel"]
        assert (config["block_size"], config["markov_rank"], config["draft_vocab_size"]) == (4, 128, 258)
        record = directory / f"{target.replace('-', '_')}_draft.json"
        arguments = json.loads(record.read_text())["arguments"]
        if target == "vllm":
            assert arguments["speculative_config"] == {
                "method": "dspark",
                "model": str(directory.resolve()),
                "num_speculative_tokens": 4,
                "dspark_draft_topk": 9,
            }
        elif target == "edge-llm":
            assert arguments == {
                "model_dir": str(tiny_model_dir.resolve()),
                "draft_model_dir": str(directory.resolve()),
                "spec_type": "dspark",
            }
        elif target == "tensorrt-llm":
            # All drafts of a block: the engine refuses fewer, and needs no code of ours.
            assert arguments["speculative_config"] == {
                "decoding_type": "DSpark",
                "speculative_model": str(directory.resolve()),
                "max_draft_len": config["block_size"],
                "attention_backend": "VANILLA",
            }
            assert yaml.safe_load((directory / "trtllm.yaml").read_text()) == {
                name: value for name, value in arguments.items() if name != "model"
            }
            assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
            assert config["dflash_config"]["causal"] is False
            assert "auto_map" not in config
            assert not (directory / "configuration_ctc.py").exists()
        else:
            assert arguments["speculative_algorithm"] == "DSPARK"
            assert arguments["speculative_num_draft_tokens"] == 5


def test_dflash_s_form_is_for_dflash_in_each_engine(
    make_tiny_head: Make, tiny_model_dir: Path, tmp_path: Path
) -> None:
    """A block of 4 has the anchor and 3 drafts."""
    head = make_tiny_head("block", trunk="dflash", num_layers=1, target_layer_ids=(0,))
    found = {}
    for target in ("vllm", "sglang", "tensorrt-llm"):
        directory = write(head, tiny_model_dir, tmp_path / target, target)
        record = json.loads((directory / f"{target.replace('-', '_')}_draft.json").read_text())
        found[target] = record["arguments"]
        config = json.loads((directory / "config.json").read_text())
        assert config["dflash_config"] == {"target_layer_ids": [0], "mask_token_id": 0, "causal": False}
        assert config["block_size"] == 4
        assert not {"markov_rank", "auto_map", "ctc_speculator"} & set(config)
    name = str((tmp_path / "vllm/draft").resolve())
    speculative = {"model": name, "method": "dflash", "num_speculative_tokens": 3}
    assert found["vllm"]["speculative_config"] == speculative
    assert found["sglang"]["speculative_algorithm"] == "DFLASH"
    assert found["sglang"]["speculative_num_draft_tokens"] == 4
    drafting = found["tensorrt-llm"]["speculative_config"]
    assert (drafting["decoding_type"], drafting["max_draft_len"]) == ("DFlash", 3)


@pytest.mark.parametrize(
    ("target", "settings", "message"),
    [
        ("vllm", {"transition": "mlp"}, "transition: expected 'markov', which DSpark has, got 'mlp'"),
        (
            "sglang",
            {"transition": "markov"},
            "target_layer_ids: SGLang hands over layers before the last",
        ),
        (
            "sglang",
            {"transition": "markov", "draft_vocab_size": 40, "target_layer_ids": (0,)},
            "draft_vocab_size: SGLang drafts from the",
        ),
        (
            "edge-llm",
            {"transition": "markov", "draft_vocab_size": 40},
            "draft_vocab_size: TensorRT Edge-LLM drafts from the whole vocabulary, got 40",
        ),
        (
            "tensorrt-llm",
            {"transition": "markov", "draft_vocab_size": 40},
            "draft_vocab_size: TensorRT-LLM drafts from the whole vocabulary, got 40",
        ),
        (
            "edge-llm",
            {"trunk": "dflash"},
            "trunk: expected 'attention' or 'dspark', got 'dflash'",
        ),
        (
            "sglang",
            {"trunk": "dflash"},
            "target_layer_ids: SGLang hands over layers before the last",
        ),
        ("tensorrt-llm", {"transition": "mlp"}, "transition: expected 'markov', which DSpark has, got 'mlp'"),
    ],
)
def test_heads_that_an_engine_does_not_load(
    make_tiny_head: Make,
    tiny_model_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    target: str,
    settings: dict[str, Any],
    message: str,
) -> None:
    values = {"trunk": "dspark", "num_layers": 1, "num_candidates": 9, **settings}
    make_tiny_head("block", **values).save_pretrained(tmp_path / "head")
    command = ["--model", str(tiny_model_dir), "--drafter", str(tmp_path / "head"), "--target", target]
    assert main([*command, "--out", str(tmp_path / "draft")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "draft").exists()

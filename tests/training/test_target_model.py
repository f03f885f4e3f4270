"""The frozen target model in other number formats and spread by accelerate: what it gives does not change."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig

from drafters.build import load_drafter
from drafters.model_files import check_base_weights, stored_weights_digest
from drafters.target_models import weights_digest
from export.source import load_source
from training import train
from training.config import TrainingConfig
from training.data.batches import Batch, LiveFeatures
from training.data.sequences import Example, Sequences, distill
from training.fresh_heads import make_head
from training.head_config import HeadConfig
from training.target_model import (
    SharedTables,
    load_target_model,
    target_digest,
    teacher,
    with_number_formats,
)


@pytest.fixture
def fresh_accelerator() -> Iterator[None]:
    """accelerate keeps its first settings for the life of a process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


CPU = torch.device("cpu")
SEQUENCES = Sequences([([5, 6, 7], [8, 9]), ([4, 3], [2, 9, 6])])
PROMPTS = [Example([5, 6, 7], None), Example([4, 3], None)]


def make_config(model: Path, **settings: Any) -> TrainingConfig:
    return TrainingConfig(model=model, out=Path("o"), data=(Path("d"),), **settings)


def load(directory: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, **options).eval().requires_grad_(False)


@pytest.fixture
def offloaded(tiny_model_dir: Path, tmp_path: Path) -> Any:
    """A model whose embedding and LM head are in memory, a layer and the last norm on disk."""
    places = {
        "model.embed_tokens": "disk",
        "model.layers.0": "cpu",
        "model.layers.1": "disk",
        "model.norm": "disk",
        "model.rotary_emb": "cpu",
        "lm_head": "disk",
    }
    return load(tiny_model_dir, dtype=torch.float32, device_map=places, offload_folder=tmp_path / "off")


def outputs(model: Any, model_dir: Path, cache: Path) -> tuple[Tensor, Tensor, list[int], SharedTables]:
    """Features, the teacher's logits, distilled text and the tables that heads share."""
    batch = Batch.of(SEQUENCES, [0, 1], 10)
    features = LiveFeatures(model, (0, 1))(batch)
    logits = teacher(model)(features[..., -model.config.hidden_size :])
    text = distill(
        model,
        PROMPTS,
        model_fingerprint="",
        cache_dir=cache,
        max_new_tokens=6,
        batch_size=2,
        eos_token_ids=[0],
    )
    return features, logits, text.tokens.tolist(), SharedTables.of(model, "fp32", CPU)


@pytest.mark.parametrize("way", ["cpu", "auto", "disk"])
def test_a_spread_model_gives_what_a_whole_one_gives(
    tiny_model_dir: Path, tmp_path: Path, way: str, request: pytest.FixtureRequest
) -> None:
    whole = outputs(load(tiny_model_dir, dtype=torch.float32), tiny_model_dir, tmp_path / "a")
    model = (
        request.getfixturevalue("offloaded")
        if way == "disk"
        else load_target_model(make_config(tiny_model_dir, model_dtype="fp32", device_map="auto"), CPU)
        if way == "auto"
        else load(tiny_model_dir, dtype=torch.float32, device_map={"": "cpu"})
    )
    if way == "disk":
        assert model.lm_head.weight.device.type == "meta"
    spread = outputs(model, tiny_model_dir, tmp_path / "b")
    assert torch.equal(spread[0], whole[0])
    assert torch.equal(spread[1], whole[1])
    assert spread[2] == whole[2]
    for field in dataclasses.fields(SharedTables):
        assert torch.equal(getattr(spread[3], field.name), getattr(whole[3], field.name)), field.name
    assert target_digest(model, tiny_model_dir) == weights_digest(load(tiny_model_dir, dtype=torch.float32))


def stored_model(directory: Path, kind: str, dtype: torch.dtype) -> Path:
    """A random model on disk; its weights are no round numbers in any format."""
    sizes: dict[str, Any] = {
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    config = (
        Gemma3TextConfig(**sizes)
        if kind == "gemma3"
        else LlamaConfig(**sizes, tie_word_embeddings=kind == "tied")
    )
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    shards = {"max_shard_size": "60KB"} if kind == "shards" else {}
    model.to(dtype).save_pretrained(directory, **shards)
    return directory


@pytest.mark.parametrize("kind", ["llama", "tied", "gemma3", "shards"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_digest_is_that_of_what_is_stored(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    """However the model is loaded, because the export loads it in float32."""
    stored_model(tmp_path, kind, dtype)
    expected = weights_digest(load(tmp_path, dtype=torch.float32))
    assert stored_weights_digest(tmp_path) == expected
    for name in ("fp32", "bf16"):
        model = load_target_model(make_config(tmp_path, model_dtype=name), CPU)
        assert target_digest(model, tmp_path) == expected
    # Rounded weights have another digest, unless nothing was rounded.
    assert (weights_digest(model) == expected) == (dtype == torch.bfloat16)


def test_without_the_usual_names_there_is_no_digest(tmp_path: Path) -> None:
    assert stored_weights_digest(tmp_path) == ""
    (tmp_path / "model.safetensors").write_bytes(b"cut short")
    assert stored_weights_digest(tmp_path) == ""


@pytest.mark.parametrize("instructions", ["avx512_bf16", "amx_bf16", "bf16", None])
def test_auto_is_bf16_on_a_gpu_and_where_a_cpu_multiplies_it(
    instructions: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, instructions: True})
    streams = (HeadConfig(drafter_type="streaming", num_layers=1),)

    def chosen(stored: torch.dtype, **settings: Any) -> str:
        base = SimpleNamespace(dtype=stored)
        return with_number_formats(make_config(Path("m"), **settings), base).model_dtype

    def precision(**settings: Any) -> str:
        base = SimpleNamespace(dtype=torch.float32)
        return with_number_formats(make_config(Path("m"), **settings), base).precision

    assert precision() == ("bf16" if instructions else "fp32")
    assert precision(precision="bf16") == "bf16"
    assert chosen(torch.bfloat16) == "fp32"
    assert chosen(torch.float32, model_dtype="bf16") == "bf16"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert precision() == "bf16"
    assert precision(precision="fp32") == "fp32"
    assert chosen(torch.bfloat16) == chosen(torch.float16) == "bf16"
    assert chosen(torch.float32) == "fp32"
    assert chosen(torch.bfloat16, precision="fp32") == "fp32"
    assert chosen(torch.bfloat16, model_dtype="fp32") == "fp32"
    assert chosen(torch.bfloat16, heads=streams) == "fp32"


def test_tables_are_shared_and_copied_only_to_be_converted(tmp_path: Path) -> None:
    for kind in ("llama", "tied"):
        stored_model(tmp_path / kind, kind, torch.bfloat16)
        for name, precision in (("fp32", "fp32"), ("bf16", "bf16"), ("bf16", "fp32")):
            model = load_target_model(make_config(tmp_path / kind, model_dtype=name), CPU)
            tables = SharedTables.of(model, precision, CPU)
            own = model.get_input_embeddings().weight
            assert (tables.embed_tokens.data_ptr() == own.data_ptr()) == (name == precision)
            assert (tables.embed_tokens.data_ptr() == tables.lm_head.data_ptr()) == (kind == "tied")
            assert tables.embed_tokens.dtype == (torch.bfloat16 if precision == "bf16" else torch.float32)
            assert torch.equal(tables.embed_tokens.float(), own.float())


def test_a_model_s_name_is_that_of_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    monkeypatch.chdir(inner)
    assert [make_config(Path(name)).model_name for name in (".", "..", "../inner/")] == [
        "inner",
        "outer",
        "inner",
    ]


def test_a_fresh_head_is_on_the_device_of_its_tables(tiny_model_dir: Path) -> None:
    """Medusa's own LM heads begin as copies of rows of the table that the draft vocabulary names."""
    config = make_config(tiny_model_dir, model_dtype="fp32")
    model = load_target_model(config, CPU)
    tables = SharedTables.of(model, "fp32", torch.device("meta"))
    settings = HeadConfig(
        drafter_type="medusa", num_frames=2, num_labels=2, own_lm_head=True, draft_vocab_size=8
    )
    head = make_head(model, settings, config, tables, torch.arange(model.config.vocab_size))
    assert {tensor.device.type for tensor in (*head.parameters(), *head.buffers())} == {"meta"}


def test_features_and_logits_of_a_model_in_bf16(tiny_model_dir: Path) -> None:
    """Without autocast the heads read float32, and values differ from those of float32 by rounding alone."""
    batch = Batch.of(SEQUENCES, [0], 10)
    found = {}
    for name in ("fp32", "bf16"):
        model = load_target_model(make_config(tiny_model_dir, model_dtype=name), CPU)
        features = LiveFeatures(model, (0, 1))(batch)
        logits = teacher(model)(features[..., -64:]).float()
        assert features.dtype == torch.float32
        found[name] = features, logits
    for exact, rounded in zip(found["fp32"], found["bf16"], strict=True):
        assert not torch.equal(exact, rounded)
        # bf16 has 8 bits of mantissa, and errors of a few layers add up.
        assert (exact - rounded).norm() < 0.05 * exact.norm()


HEADS = """
[[head]]
name = "ctc"
num_frames = 4
frame_start = "fused"
transition = "mlp"
soft_labels = 0.5
[[head]]
name = "medusa"
drafter_type = "medusa"
own_lm_head = true
num_frames = 2
[[head]]
name = "hydra"
drafter_type = "hydra"
num_frames = 2
[[head]]
name = "eagle"
drafter_type = "eagle"
num_frames = 2
soft_labels = 0.5
"""


@pytest.fixture
def argv(tmp_path: Path) -> list[str]:
    (tmp_path / "heads.toml").write_text(HEADS)
    rows = [{"question": f"{i} + {i + 1}?", "answer": f"That is {2 * i + 1}, as {i} fits."} for i in range(9)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = "--labels data --steps 2 --batch-size 2 --num-anchors 4 --holdout 0.3 --max-length 40"
    paths = ["--data", str(tmp_path / "sums.jsonl"), "--out", str(tmp_path / "out")]
    return [*paths, *flags.split(), "--heads", str(tmp_path / "heads.toml")]


@pytest.mark.parametrize(
    "flags",
    ["--precision fp32", "--precision bf16", "--precision bf16 --device-map auto --cache-features"],
)
def test_heads_of_a_model_in_bf16_are_exported_for_its_stored_weights(
    tiny_model_dir: Path, tmp_path: Path, argv: list[str], flags: str, capsys: Any, fresh_accelerator: None
) -> None:
    """The tiny model is stored in float32, so that bf16 rounds its weights."""
    model = ["--model", str(tiny_model_dir), "--model-dtype", "bf16"]
    assert train.main([*argv, *model, *flags.split()]) == 0
    assert "frozen parameters in bfloat16" in capsys.readouterr().out
    whole = load(tiny_model_dir, dtype=torch.float32)
    for name in ("ctc", "medusa", "hydra", "eagle"):
        directory = tmp_path / "out" / name
        weights = load_file(directory / "model.safetensors")
        assert {value.dtype for value in weights.values()} == {torch.float32}
        check_base_weights(load_drafter(directory).config, whole)
        record = json.loads((directory / "training.json").read_text())
        assert record["settings"]["model_dtype"] == "bf16"
    assert load_source(tiny_model_dir, tmp_path / "out/ctc").drafter is not None
    assert {path.name for path in (tmp_path / "out.run").iterdir()} <= {"checkpoint", "logs", "best", "cache"}

"""The frozen target model of a training run: number formats, and models on several devices."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from drafters.registry import load_drafter
from drafters.target_models import weights_digest
from training import train
from training.config import TrainingConfig
from training.errors import TrainingError
from training.head_config import HeadConfig
from training.target_model import load_target_model, model_dtype

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def fresh_accelerator() -> Iterator[None]:
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def config(model: Path, out: Path, **settings: Any) -> TrainingConfig:
    return TrainingConfig(model=model, data=(), out=out, **settings)


def run(model: Path, out: Path, *flags: str) -> Path:
    """Two steps with this model; the head's directory."""
    data = out.parent / "data.jsonl"
    data.write_text('{"prompt": "How many days?"}\n' * 6)
    shape = "--num-frames 4 --num-labels 3 --steps 2 --warmup 1 --batch-size 2 --max-new-tokens 8"
    paths = ["--model", str(model), "--data", str(data), "--out", str(out)]
    assert train.main([*paths, *shape.split(), *flags]) == 0
    return out


def offloading_map(tmp_path: Path, model_dir: Path, **changed: str) -> Path:
    """The last layer on disk, everything else on the CPU, but for what is ``changed``."""
    base = AutoConfig.from_pretrained(model_dir)
    names = ["model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"]
    layers = [f"model.layers.{layer}" for layer in range(base.num_hidden_layers)]
    places = dict.fromkeys([*names, *layers], "cpu") | {layers[-1]: "disk"}
    path = tmp_path / "map.json"
    path.write_text(json.dumps(places | {name.replace("__", "."): place for name, place in changed.items()}))
    return path


@pytest.mark.parametrize(
    ("settings", "files", "device", "expected"),
    [
        ({}, torch.bfloat16, GPU, torch.bfloat16),
        ({}, torch.float16, GPU, torch.bfloat16),
        ({}, torch.float32, GPU, torch.float32),
        ({}, torch.bfloat16, CPU, torch.float32),
        ({"precision": "fp32"}, torch.bfloat16, GPU, torch.float32),
        ({"heads": (HeadConfig(drafter_type="streaming"),)}, torch.bfloat16, GPU, torch.float32),
        ({"model_dtype": "fp32"}, torch.bfloat16, GPU, torch.float32),
        ({"model_dtype": "bf16"}, torch.float32, CPU, torch.bfloat16),
    ],
)
def test_the_number_format(
    settings: dict[str, Any], files: torch.dtype, device: torch.device, expected: torch.dtype, tmp_path: Path
) -> None:
    base = AutoConfig.for_model("llama", dtype=files)
    assert model_dtype(config(tmp_path, tmp_path, **settings), base, device) == expected


def test_a_head_of_a_model_in_bf16_belongs_to_the_model(tiny_model_dir: Path, tmp_path: Path) -> None:
    """The digest that it records is that of the float32 weights, which the export compares."""
    head = load_drafter(run(tiny_model_dir, tmp_path / "head", "--model-dtype", "bf16"))
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    assert head.config.base_weights == weights_digest(model)
    with torch.no_grad():
        model.get_decoder().norm.weight.mul_(1.01)
    assert head.config.base_weights != weights_digest(model)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_spread_model_trains_the_same_head(dtype: str, tiny_model_dir: Path, tmp_path: Path) -> None:
    places = offloading_map(tmp_path, tiny_model_dir)
    settings = config(tiny_model_dir, tmp_path / "head", device_map=str(places))
    model = load_target_model(settings, AutoConfig.from_pretrained(tiny_model_dir), CPU)
    assert next(model.model.layers[-1].parameters()).is_meta
    whole = run(tiny_model_dir, tmp_path / "whole", "--model-dtype", dtype)
    spread = run(tiny_model_dir, tmp_path / "spread", "--model-dtype", dtype, "--device-map", str(places))
    found, expected = (load_file(out / "model.safetensors") for out in (spread, whole))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0, msg=name)


def test_what_the_head_shares_stays_on_a_device(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where memory is short, accelerate puts the last modules on disk: the norm and the LM head."""
    base = AutoConfig.from_pretrained(tiny_model_dir)
    monkeypatch.setattr("training.target_model.get_max_memory", lambda: {"cpu": 400_000})
    model = load_target_model(config(tiny_model_dir, tmp_path / "out", device_map="auto"), base, CPU)
    layers = [next(layer.parameters()).device.type for layer in model.model.layers]
    assert layers[-1] == "meta"
    assert model.lm_head.weight.device == model.model.norm.weight.device == CPU
    ids = torch.arange(12)[None]
    whole = load_target_model(config(tiny_model_dir, tmp_path / "out"), base, CPU)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, whole(ids).logits, rtol=0, atol=0)


def test_refusals(tiny_model_dir: Path, tmp_path: Path) -> None:
    base = AutoConfig.from_pretrained(tiny_model_dir)
    streams = (HeadConfig(drafter_type="streaming"),)
    for settings, message in (
        (
            {"model_dtype": "bf16", "precision": "fp32"},
            "--model-dtype: bf16 needs --precision bf16, got fp32",
        ),
        ({"model_dtype": "bf16", "heads": streams}, "--model-dtype: streams are trained in a model of fp32"),
        ({"device_map": "auto", "heads": streams}, "--device-map: streams are trained in a model on one"),
        ({"model_dtype": "fp8"}, "--model-dtype: must be one of auto, fp32, bf16, got 'fp8'"),
    ):
        with pytest.raises(TrainingError, match=message):
            config(tiny_model_dir, tmp_path, **settings)
    (tmp_path / "list.json").write_text("[1]")
    on_disk = offloading_map(tmp_path, tiny_model_dir, lm_head="disk")
    for name, processes, message in (
        ("auto", 2, "--device-map: expected one process, .* got 2"),
        (str(tmp_path / "absent.json"), 1, "--device-map: must be auto or a JSON file; .*absent.json"),
        (
            str(tmp_path / "list.json"),
            1,
            "--device-map: .*list.json: expected an object of devices by module",
        ),
        (str(on_disk), 1, "--device-map: the LM head must be on a device"),
    ):
        with pytest.raises(TrainingError, match=message):
            load_target_model(config(tiny_model_dir, tmp_path / "out", device_map=name), base, CPU, processes)

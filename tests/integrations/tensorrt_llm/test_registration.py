"""A draft directory makes its draft model known to TensorRT-LLM when its configuration is read."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoConfig, Qwen3Config, dynamic_module_utils

from export.tensorrt_llm_target import CONFIG_CODE, CONFIG_FILE
from integrations.draft_directory import DraftError
from integrations.tensorrt_llm.model import DFlashCTCForCausalLM
from integrations.tensorrt_llm.plugin import VERSIONS, register
from tests.integrations.tensorrt_llm import fake_tensorrt_llm
from tests.integrations.transformers.models import make_head, make_model


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The configuration of a draft directory, with a cache of its own for the code in it."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path / "cache"))
    path = tmp_path / "draft"
    path.mkdir()
    (path / CONFIG_FILE).write_text(CONFIG_CODE, encoding="utf-8")
    values = {
        "model_type": "qwen3",
        "architectures": ["DFlashCTCForCausalLM"],
        "auto_map": {"AutoConfig": "configuration_ctc.CTCDraftConfig"},
        "num_hidden_layers": 1,
        "ctc_speculator": {"head": {}, "top_k": 5, "shape": "chain"},
    }
    (path / "config.json").write_text(json.dumps(values), encoding="utf-8")
    return path


@pytest.mark.parametrize("trust", [False, True])
def test_the_configuration_without_tensorrt_llm(directory: Path, trust: bool) -> None:
    config = AutoConfig.from_pretrained(directory, trust_remote_code=trust)
    assert isinstance(config, Qwen3Config)
    assert type(config).__name__ == ("CTCDraftConfig" if trust else "Qwen3Config")
    assert (config.num_hidden_layers, config.ctc_speculator["top_k"]) == (1, 5)


def test_the_configuration_registers_the_draft_model(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builders = fake_tensorrt_llm.install(monkeypatch)
    AutoConfig.from_pretrained(directory, trust_remote_code=False)
    assert not hasattr(builders["DFLASH"], "builds_ctc_heads")
    AutoConfig.from_pretrained(directory, trust_remote_code=True)
    head = make_head(make_model("llama"))
    model_config, draft_config = fake_tensorrt_llm.configurations(head, top_k=4, num_drafts=3)
    assert isinstance(builders["DFLASH"](model_config, draft_config, None, None), DFlashCTCForCausalLM)


def test_other_draft_models_are_built_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when several directories are loaded."""
    builders = fake_tensorrt_llm.install(monkeypatch)
    register()
    build = builders["DFLASH"]
    register()
    assert builders["DFLASH"] is build
    for architectures in (["DFlashDraftModel"], None):
        other: Any = SimpleNamespace(pretrained_config=SimpleNamespace(architectures=architectures))
        assert build(None, other, None, None) == "built by the engine"


def test_another_version_is_one_line(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    builders = fake_tensorrt_llm.install(monkeypatch, version="1.3.0rc27")
    with pytest.raises(DraftError, match=r"^ctc-speculator: expected TensorRT-LLM 1\.4 .* got 1\.3\.0rc27; "):
        AutoConfig.from_pretrained(directory, trust_remote_code=True)
    assert not hasattr(builders["DFLASH"], "builds_ctc_heads")


@pytest.mark.parametrize("version", ["1.4.0rc1", "1.4.0", "1.4.2"])
def test_versions_that_are_supported(version: str) -> None:
    assert VERSIONS.problem(version) is None


@pytest.mark.parametrize("version", ["1.2.1", "1.3.0", "1.5.0", None])
def test_versions_that_are_not(version: str | None) -> None:
    problem = VERSIONS.problem(version)
    assert problem is not None
    assert "expected TensorRT-LLM 1.4 (read in 1.4.0rc1, never run), got " in problem
    assert "\n" not in problem

"""The models' config.pbtxt: what is written is what is committed, and what a model accepts."""

import json
from typing import Any

import pytest
from google.protobuf import json_format, text_format
from tritonclient.grpc import model_config_pb2

from runtime.core.errors import UserError
from triton_repo.triton.config import REPOSITORY, config_text
from triton_repo.triton.tensors import MODEL, MODELS, PLAIN_MODEL, TEXT, TOKENS, TOKENS_MODEL, check_tensors


def loaded(text: str) -> Any:
    """A configuration as the server hands it to a model."""
    message = text_format.Parse(text, model_config_pb2.ModelConfig())
    return json.loads(json_format.MessageToJson(message, preserving_proto_field_name=True))


def parameters(text: str) -> dict[str, str]:
    return {name: value.get("string_value", "") for name, value in loaded(text)["parameters"].items()}


@pytest.mark.parametrize("name", MODELS)
def test_committed_configurations_are_those_written(name: str) -> None:
    """If this fails, run ``python -m triton_repo.triton.config``."""
    assert (REPOSITORY / name / "config.pbtxt").read_text(encoding="utf-8") == config_text(name)


def test_parameters() -> None:
    assert parameters(config_text(PLAIN_MODEL)) == {
        "interface": "text",
        "bundle": "",
        "method": "plain",
        "num_nodes": "auto",
        "prompt_lookup": "no",
        "step": "",
        "max_num_seqs": "0",
        "max_length": "0",
        "num_threads": "0",
        "max_queue_size": "64",
        "max_queue_tokens": "65536",
        "prefix_cache_mb": "512",
        "prefill_chunk_size": "64",
    }
    assert parameters(config_text(TOKENS_MODEL))["interface"] == "tokens"
    assert parameters(config_text(MODEL))["method"] == parameters(config_text(MODEL))["prompt_lookup"] == ""


def test_any_text_survives() -> None:
    path = 'a "b"\\c\n ünï #{}'
    assert parameters(config_text(MODEL, {"bundle": path}))["bundle"] == path


def test_instances() -> None:
    assert loaded(config_text(MODEL, num_instances=3))["instance_group"] == [{"kind": "KIND_CPU", "count": 3}]
    (group,) = loaded(config_text(MODEL, num_instances=2, gpus=(0, 3)))["instance_group"]
    assert group == {"kind": "KIND_GPU", "count": 2, "gpus": [0, 3]}


def test_a_configuration_with_other_tensors_is_refused() -> None:
    text = config_text(MODEL)
    check_tensors(loaded(text), TEXT)
    with pytest.raises(UserError, match="input messages must be absent, got"):
        check_tensors(loaded(text), TOKENS)
    other = text.replace('"top_p"\n  data_type: TYPE_FP32', '"top_p"\n  data_type: TYPE_INT32')
    with pytest.raises(UserError, match="input top_p must be"):
        check_tensors(loaded(other), TEXT)

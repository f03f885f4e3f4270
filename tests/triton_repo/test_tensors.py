"""Requests' tensors to options and back, and the configuration that lists them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import json_format, text_format
from tritonclient.grpc import model_config_pb2

from runtime.decoding.sampling import SamplingParams
from runtime.errors import RequestError, UserError
from triton_repo.config import MODELS, check_tensors, model_config
from triton_repo.tensors import INTERFACES, TEXT, TOKENS, answer_tensors, by_tensor, inputs_of, read_request

REPOSITORY = Path(__file__).resolve().parents[2] / "triton_repo" / "models"


def tensors(**values: Any) -> dict[str, Any]:
    """As Triton passes them: a batch axis of 1, text as bytes."""
    kinds: dict[type, Any] = {str: np.object_, int: np.int32, float: np.float32, bool: np.bool_}
    found: dict[str, Any] = {"text_input": np.array([[b"How many?"]], np.object_)}
    found["max_tokens"] = np.array([[12]], np.int32)
    for name, value in values.items():
        if isinstance(value, np.ndarray):
            found[name] = value
            continue
        elements = value if isinstance(value, list) else [value]
        kind = kinds[type(elements[0])]
        encoded = [v.encode() if isinstance(v, str) else v for v in elements]
        found[name] = np.array([encoded], kind)
    return found


def test_defaults() -> None:
    asked = read_request(TEXT, tensors())
    assert asked.prompt == "How many?"
    assert (asked.max_new_tokens, asked.stop_strings, asked.end_id) == (12, (), None)
    assert (asked.stream, asked.raw, asked.echo) == (False, False, False)
    assert asked.sampling == SamplingParams()


def test_every_option() -> None:
    given = tensors(
        stop_words=["\n\n", "", "Ünïcödé"],
        end_id=3,
        temperature=0.5,
        top_k=4,
        top_p=0.75,
        min_p=0.25,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.25,
        logit_bias='{"3": 1.5, "7": -2}',
        stream=True,
        raw=True,
        exclude_input_in_output=False,
        return_log_probs=True,
        num_return_sequences=1,
        beam_width=1,
        num_draft_tokens=0,
        use_draft_logits=False,
        return_context_logits=False,
        return_generation_logits=False,
        return_perf_metrics=False,
        return_num_input_tokens=True,
        return_num_output_tokens=True,
        bad_words=["", ""],
        pad_id=2,
        length_penalty=0.5,
        seed=np.array([[2**64 - 1]], np.uint64),
    )
    assert given.keys() == {info.name for info in inputs_of(TEXT)}
    asked = read_request(TEXT, given)
    assert asked.sampling == SamplingParams(
        temperature=0.5,
        top_k=4,
        top_p=0.75,
        min_p=0.25,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.25,
        logit_bias={3: 1.5, 7: -2.0},
        seed=2**64 - 1,
        log_probs=True,
    )
    assert (asked.stop_strings, asked.end_id) == (("\n\n", "Ünïcödé"), 3)
    assert (asked.stream, asked.raw, asked.echo) == (True, True, False)
    given["stream"] = np.array([[False]])
    assert read_request(TEXT, given).echo


def test_token_ids() -> None:
    given = {**tensors(), "input_ids": np.array([[5, 6, 7]], np.int32)}
    del given["text_input"]
    assert read_request(TOKENS, given).prompt == [5, 6, 7]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"nonsense": 3}, "nonsense: is no input of this model; it has text_input"),
        ({"temperature": "hot"}, "temperature: must be TYPE_FP32, got object"),
        ({"top_k": 0.5}, "top_k: must be TYPE_INT32, got float32"),
        ({"top_k": [1, 2]}, r"top_k: must have one element, got shape \[1, 2\]"),
        ({"top_k": np.empty((1, 0), np.int32)}, "top_k: must have one element"),
        (
            {"text_input": np.array([[b"a\xff"]], np.object_)},
            "must be UTF-8 text, got byte 0xff at 1",
        ),
        ({"stop_words": np.array([[b"\xc3"]], np.object_)}, "stop_words: must be UTF-8"),
        ({"beam_width": 2}, "beam_width: must be 1, got 2"),
        ({"num_return_sequences": 0}, "num_return_sequences: must be 1, got 0"),
        ({"num_draft_tokens": 4}, "num_draft_tokens: must be 0, got 4"),
        ({"return_context_logits": True}, "return_context_logits: must be False, got True"),
        ({"bad_words": ["", "no"]}, "bad_words: must be empty; logit_bias can keep a token out"),
        ({"logit_bias": "[1]"}, "logit_bias: must be a JSON object"),
        ({"logit_bias": "[" * 100_000}, "logit_bias: must be a JSON object"),
        ({"logit_bias": '{"1": 1' + "0" * 400 + "}"}, "logit_bias: must be a JSON object"),
        ({"logit_bias": " " * (1 << 22) + "{}"}, "logit_bias: must be at most 4194304 characters long"),
        ({"logit_bias": '{"a": 1}'}, "logit_bias: must be a JSON object"),
        ({"logit_bias": '{"1": null}'}, "logit_bias: must be a JSON object"),
        ({"temperature": -1.0}, "temperature: must be a number from 0 on"),
        ({"temperature": float("nan")}, "temperature: must be a number from 0 on, got nan"),
    ],
)
def test_bad_requests(given: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        read_request(TEXT, tensors(**given))


def test_a_missing_tensor() -> None:
    given = tensors()
    del given["max_tokens"]
    with pytest.raises(RequestError, match="max_tokens: is missing"):
        read_request(TEXT, given)


def test_errors_name_the_tensor() -> None:
    assert by_tensor(TEXT, RequestError("max_new_tokens: must be 1")) == "max_tokens: must be 1"
    assert by_tensor(TOKENS, RequestError("prompt: must not be empty")) == "input_ids: must not be empty"
    assert by_tensor(TEXT, RequestError("out of luck")) == "out of luck"


@pytest.mark.parametrize("interface", INTERFACES)
def test_answers(interface: str) -> None:
    answer: Any = "Ünï" if interface == TEXT else [5, 6]
    found = dict(
        answer_tensors(
            interface,
            answer,
            log_probs=[-0.5, -1.0],
            cum_log_prob=-3.5,
            num_input_tokens=4,
            num_output_tokens=7,
            num_steps=3,
            finish_reason="stop",
            make=lambda name, array: (name, array),
        )
    )
    if interface == TEXT:
        assert found["text_output"].tolist() == ["Ünï".encode()]
    else:
        assert found["output_ids"].tolist() == [[5, 6]]
    assert found["acceptance_length"].tolist() == [[2.0]]
    assert found["output_log_probs"].tolist() == [[-0.5, -1.0]]
    assert found["cum_log_probs"].tolist() == [[-3.5]]
    assert found["finish_reason"].tolist() == [[b"stop"]]


@pytest.mark.parametrize("name", MODELS)
def test_committed_configurations_are_those_written(name: str) -> None:
    """python -c 'from triton_repo.config import *; print(model_config(...))' writes them."""
    assert (REPOSITORY / name / "config.pbtxt").read_text() == model_config(name, MODELS[name])


def test_parameters_are_quoted() -> None:
    text = model_config("ctc_llm", TEXT, {"bundle": 'a "b"\\c'})
    assert 'string_value: "a \\"b\\"\\\\c"' in text


def loaded(text: str) -> Any:
    """A configuration as the server hands it to a model."""
    message = text_format.Parse(text, model_config_pb2.ModelConfig())
    return json.loads(json_format.MessageToJson(message, preserving_proto_field_name=True))


def test_instances() -> None:
    assert loaded(model_config("ctc_llm", TEXT, num_instances=3))["instance_group"] == [
        {"kind": "KIND_CPU", "count": 3}
    ]
    assert loaded(model_config("ctc_llm", TEXT, gpus=(0, 2)))["instance_group"] == [
        {"kind": "KIND_GPU", "count": 1, "gpus": [0, 2]}
    ]


def test_a_configuration_with_other_tensors_is_refused() -> None:
    text = model_config("ctc_llm", TEXT)
    check_tensors(loaded(text), TEXT)
    with pytest.raises(UserError, match=r"input input_ids must be \('TYPE_INT32', \[-1\]\), got none"):
        check_tensors(loaded(text), TOKENS)
    other = text.replace('"top_p", data_type: TYPE_FP32', '"top_p", data_type: TYPE_INT32')
    with pytest.raises(UserError, match="input top_p must be"):
        check_tensors(loaded(other), TEXT)

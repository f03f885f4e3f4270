"""Requests' tensors to options, and chunks to tensors."""

import json
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from runtime.core.errors import RequestError
from runtime.decode.grammar import Grammar
from runtime.decode.sampling_params import SamplingParams
from runtime.decode.sequence import Chunk, Piece
from triton_repo.triton.model import Responder, scores_json
from triton_repo.triton.requests import failure, read_request
from triton_repo.triton.tensors import INVALID, OTHER_PROMPTS, TEXT, TOKENS, inputs_of


def tensors(**values: Any) -> dict[str, Any]:
    """As Triton passes them: a batch axis of 1, text as bytes."""
    kinds: dict[type, Any] = {str: np.object_, int: np.int32, float: np.float32, bool: np.bool_}
    arrays: dict[str, Any] = {"text_input": np.array([[b"How many?"]], np.object_)}
    arrays["max_tokens"] = np.array([[12]], np.int32)
    for name, value in values.items():
        if isinstance(value, np.ndarray):
            arrays[name] = value
            continue
        elements = value if isinstance(value, list) else [value]
        kind = kinds[type(elements[0])]
        encoded = [v.encode() if isinstance(v, str) else v for v in elements]
        arrays[name] = np.array([encoded], kind)
    return arrays


def test_defaults() -> None:
    request = read_request(TEXT, tensors())
    assert request.prompt == "How many?"
    assert (request.max_new_tokens, request.stop_strings, request.end_id) == (12, (), None)
    assert (request.stream, request.raw, request.echo) == (False, False, False)
    assert request.add_special_tokens
    assert request.sampling == SamplingParams()


def conversation(**values: Any) -> dict[str, Any]:
    given = tensors(**values)
    del given["text_input"]
    return given


def test_a_conversation() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Ünï?"}]
    request = read_request(TEXT, conversation(messages=json.dumps(messages), template_options='{"a": 1}'))
    assert (request.messages, request.template_options, request.prompt) == (messages, {"a": 1}, "")
    assert read_request(TEXT, tensors()).messages is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (conversation(), "text_input: is missing, and messages too; one of them is needed"),
        (tensors(messages="[]"), "messages: must not be given together with text_input"),
        (tensors(template_options="{}"), "template_options: is for messages, got text_input"),
        (conversation(messages="[]", raw=True), "raw: is for text_input, got messages"),
        (conversation(messages="x"), "messages: must be a JSON list of messages such as"),
        (conversation(messages="[" * 100_000), "messages: must be a JSON list of messages such as"),
        (conversation(messages='{"role": "user"}'), "messages: expected a list of messages"),
        (conversation(messages='[{"role": "user"}]'), "messages: message 1: field 'content' of a message is"),
        (
            conversation(messages='[{"role": "user", "content": "a"}]', template_options="[]"),
            r"template_options: must be a JSON object, got '\[\]'",
        ),
    ],
)
def test_what_is_no_conversation(given: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=f"^{message}"):
        read_request(TEXT, given)


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
        guided_decoding_guide_type="regex",
        guided_decoding_guide="[ab]",
        stream=True,
        raw=True,
        add_special_tokens=False,
        exclude_input_in_output=False,
        return_log_probs=True,
        top_log_probs=2,
        prompt_log_probs=True,
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
    others = {info.name for info in OTHER_PROMPTS}
    assert given.keys() | others == {info.name for info in inputs_of(TEXT)}
    request = read_request(TEXT, given)
    assert request.grammar == Grammar("regex", "[ab]")
    assert request.sampling == SamplingParams(
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
        top_log_probs=2,
    )
    assert request.prompt_log_probs
    assert (request.stop_strings, request.end_id) == (("\n\n", "Ünïcödé"), 3)
    assert (request.stream, request.raw, request.echo) == (True, True, False)
    assert not request.add_special_tokens
    given["stream"] = np.array([[False]])
    assert read_request(TEXT, given).echo


def test_token_ids() -> None:
    given = {**tensors(), "input_ids": np.array([[5, 6, 7]], np.int32)}
    with pytest.raises(RequestError, match="input_ids: must not be given together with text_input"):
        read_request(TEXT, given)
    del given["text_input"]
    for interface in (TEXT, TOKENS):
        assert read_request(interface, given).prompt == [5, 6, 7]
    for name, value, message in (
        ("raw", True, "raw: is for text_input, got input_ids"),
        ("template_options", "{}", "template_options: is for messages, got input_ids"),
        ("exclude_input_in_output", False, "exclude_input_in_output: must be true with input_ids"),
    ):
        options = tensors(**{name: value})
        with pytest.raises(RequestError, match=message):
            read_request(TEXT, {**given, name: options[name]})


def test_scores_as_json() -> None:
    pieces = [Piece(5, "a", False), Piece(6, "b", True, -0.5, ((6, -0.5), (7, -np.inf)))]
    expected = [["a", None, []], ["b", -0.5, [["<6>", -0.5], ["<7>", -9999.0]]]]
    assert json.loads(scores_json(pieces, "<{}>".format)) == expected


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
        (
            {"stop_words": np.array([[b"a" * (5 << 20)] * 2], np.object_)},
            "stop_words: must be at most 8388608 bytes long, got 10485760",
        ),
        (
            {"stop_words": np.array([[b""] * ((1 << 20) + 1)], np.object_)},
            "stop_words: must have at most 1048576 elements, got 1048577",
        ),
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


def test_missing_tensors() -> None:
    given = tensors()
    del given["max_tokens"]
    assert read_request(TEXT, given).max_new_tokens is None
    del given["text_input"]
    with pytest.raises(RequestError, match="text_input: is missing"):
        read_request(TEXT, given)


def test_a_number_is_the_one_that_the_client_wrote() -> None:
    """Not the double next to its float32, which 0.01 is below a bound of 0.01."""
    sampling = read_request(TEXT, tensors(text_input="x", repetition_penalty=0.01, temperature=0.8)).sampling
    assert (sampling.repetition_penalty, sampling.temperature) == (0.01, 0.8)


def test_errors_name_the_tensor() -> None:
    for interface, error, expected in (
        (TEXT, RequestError("must be 1", field="max_new_tokens"), "max_tokens: must be 1"),
        (TOKENS, RequestError("must not be empty", field="prompt"), "input_ids: must not be empty"),
        (TEXT, RequestError("out of luck"), "out of luck"),
    ):
        assert failure(interface, error) == (INVALID, expected)


@pytest.mark.parametrize("interface", [TEXT, TOKENS])
def test_responses(interface: str) -> None:
    """The last of two, which has the new tokens, and the counts of the whole output."""
    sender: Any = Mock(arrived=0.0)
    given = tensors(stream=True, return_log_probs=True, top_log_probs=1)
    responder = Responder(interface, read_request(TEXT, given), 4, sender, Mock(), "<{}>".format)
    pieces = [Piece(token, "a", token > 3, -0.5) for token in range(3)]
    responder(Chunk(tuple(pieces), None, num_drafts=8, num_cached=2))
    new = (Piece(5, "Ün", True, -0.5, ((5, -0.5),)), Piece(6, "ï", False, -1.0))
    responder(Chunk(new, "stop", num_drafts=8))
    (response,), flags = sender.send.call_args
    assert flags == {"is_last": True}
    if interface == TEXT:
        assert response["text_output"].tolist() == ["Ünï".encode()]
    else:
        assert response["output_ids"].tolist() == [[5, 6]]
    counts = {name: array.tolist() for name, array in response.items() if name.startswith("num_")}
    assert counts == {
        "num_input_tokens": [[4]],
        "num_cached_tokens": [[2]],
        "num_output_tokens": [[5]],
        "num_steps": [[1]],
        "num_drafted_tokens": [[16]],
        "num_accepted_tokens": [[1]],
    }
    assert response["acceptance_length"].tolist() == [[4.0]]
    assert response["output_log_probs"].tolist() == [[-0.5, -1.0]]
    assert response["cum_log_probs"].tolist() == [[-3.0]]
    assert response["output_tokens"].tolist() == [["Ün".encode(), "ï".encode()]]
    assert response["finish_reason"].tolist() == [[b"stop"]]
    assert json.loads(response["token_scores"][0][0]) == [["Ün", -0.5, [["<5>", -0.5]]], ["ï", -1.0, []]]
    assert "prompt_scores" not in response


def test_a_whole_answer_after_its_prompt() -> None:
    """Nothing is sent before the end."""
    sender: Any = Mock(arrived=0.0)
    given = tensors(stream=False, exclude_input_in_output=False)
    responder = Responder(TEXT, read_request(TEXT, given), 4, sender, Mock(), str)
    responder(Chunk((Piece(1, " Two", False),), None))
    assert not sender.send.called
    responder(Chunk((Piece(2, ".", False),), "length"))
    (response,), _ = sender.send.call_args
    assert response["text_output"].tolist() == [b"How many? Two."]

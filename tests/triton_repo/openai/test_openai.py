"""OpenAI's own client and a real tritonserver: the runtime's texts, and OpenAI's errors."""

import asyncio
import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from aiohttp.test_utils import TestClient, TestServer
from transformers import AutoTokenizer

from benchmarks.load.clients import served_together
from runtime.decode.grammar import Grammar
from runtime.decode.sampling_params import SamplingParams
from runtime.decoder import SpeculativeDecoder
from tests.schemas import SCHEMAS
from tests.triton_repo.servers import MAX_NUM_SEQS, PATIENCE, PROMPTS, Server, expected_text, openai_client
from triton_repo.openai import server as openai_server
from triton_repo.openai.app import Service, make_app
from triton_repo.triton.process import free_ports
from triton_repo.triton.tensors import MODEL
from triton_repo.web.access import Access

QUESTION: list[Any] = [{"role": "user", "content": "How many?"}]
CONVERSATION: list[Any] = [
    *({"role": "system", "content": "Be brief."}, {"role": "user", "content": "How many?"}),
    *({"role": "assistant", "content": "Two."}, {"role": "user", "content": "Why not?"}),
]
NAME = "my-model"
GREEDY: dict[str, Any] = {"model": NAME, "temperature": 0, "max_tokens": 24}


@pytest.fixture(scope="module")
def client(each_server: Server) -> Iterator[openai.OpenAI]:
    with openai_client(each_server.url, "--model-name", NAME) as client:
        yield client


def decoded(decoder: SpeculativeDecoder, prompt: str, count: int = 24, **options: Any) -> str:
    """The runtime's text after a prompt without the chat template."""
    ids = decoder.prompt_tokenizer.encode(prompt, raw=True, **options)
    return "".join(chunk.text for chunk in decoder.stream(ids, max_new_tokens=count))


def test_a_chat(client: openai.OpenAI, decoder: SpeculativeDecoder) -> None:
    answer = client.chat.completions.create(messages=QUESTION, logprobs=True, **GREEDY)
    (choice,) = answer.choices
    assert (answer.model, answer.object, choice.finish_reason) == (NAME, "chat.completion", "length")
    assert choice.message.content == expected_text(decoder, "How many?")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(decoder.prompt_tokenizer.encode("How many?"))
    assert answer.usage.completion_tokens == 24
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert "".join(token.token for token in choice.logprobs.content) == choice.message.content
    assert len(choice.logprobs.content) == 24
    assert all(token.logprob <= 0 for token in choice.logprobs.content)


def test_a_conversation_in_the_chat_template(
    client: openai.OpenAI, decoder: SpeculativeDecoder, tiny_model_dir: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    prompt = str(tokenizer.apply_chat_template(CONVERSATION, tokenize=False, add_generation_prompt=True))
    answer = client.chat.completions.create(messages=CONVERSATION, **GREEDY)
    assert answer.choices[0].message.content == decoded(decoder, prompt, add_special_tokens=False)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(tokenizer(prompt, add_special_tokens=False)["input_ids"])


def test_streams(client: openai.OpenAI, decoder: SpeculativeDecoder) -> None:
    options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}, **GREEDY}
    *events, last = client.chat.completions.create(messages=QUESTION, **options)
    assert events[0].choices[0].delta.role == "assistant"
    texts = [event.choices[0].delta.content or "" for event in events]
    assert len([text for text in texts if text]) > 1
    assert "".join(texts) == expected_text(decoder, "How many?")
    assert [event.choices[0].finish_reason for event in events] == [None] * (len(events) - 1) + ["length"]
    assert last.choices == []
    assert (last.usage.completion_tokens, {event.usage for event in events}) == (24, {None})
    events = list(client.completions.create(prompt=["How", "Why"], stream=True, logprobs=0, **GREEDY))
    assert {event.usage for event in events} == {None}
    for index, prompt in enumerate(("How", "Why")):
        choices = [event.choices[0] for event in events if event.choices[0].index == index]
        text = "".join(choice.text for choice in choices)
        assert text == decoded(decoder, prompt)
        for choice in choices:
            for token, offset in zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True):
                assert text[offset:].startswith(token)


def test_outputs_that_follow_a_grammar(client: openai.OpenAI, decoder: SpeculativeDecoder) -> None:
    """The runtime's own texts, whole and streamed, and every error names the field of the body."""
    schema = SCHEMAS["records"]
    prompt = decoder.prompt_tokenizer.encode("How many?")
    chunks = decoder.stream(prompt, max_new_tokens=200, grammar=Grammar("json_schema", json.dumps(schema)))
    expected = "".join(chunk.text for chunk in chunks)
    response_format: Any = {"type": "json_schema", "json_schema": {"name": "r", "schema": schema}}
    options: dict[str, Any] = {**GREEDY, "max_tokens": 200, "response_format": response_format}
    (choice,) = client.chat.completions.create(messages=QUESTION, **options).choices
    assert (choice.message.content, choice.finish_reason) == (expected, "stop")
    jsonschema.validate(json.loads(expected), schema)
    events = client.chat.completions.create(messages=QUESTION, stream=True, **options)
    assert "".join(event.choices[0].delta.content or "" for event in events) == expected
    for guide, text in (({"regex": "[0-9]{3}"}, "[0-9]{3}"), ({"choice": ["yes", "no"]}, "yes|no")):
        body = {"structured_outputs": guide}
        answer = client.completions.create(prompt="How", extra_body=body, n=2, **GREEDY)
        assert all(re.fullmatch(text, choice.text) for choice in answer.choices)
    wrong: list[tuple[str, Any]] = [
        ("response_format", {"type": "json_schema", "json_schema": {"name": "r", "schema": {"type": "foo"}}}),
        ("structured_outputs", {"regex": "("}),
        ("structured_outputs", {"grammar": "start: a\na: a"}),
    ]
    for field, value in wrong:
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(messages=QUESTION, extra_body={field: value}, **GREEDY)
        assert refused.value.param == field
        assert refused.value.type == "invalid_request_error"


def test_completions(client: openai.OpenAI, decoder: SpeculativeDecoder) -> None:
    answer = client.completions.create(prompt=["How many?", "Why"], **GREEDY)
    assert [choice.text for choice in answer.choices] == [
        decoded(decoder, "How many?"),
        decoded(decoder, "Why"),
    ]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (9 + 3, 48)
    short = client.completions.create(model=NAME, prompt="Why", temperature=0)
    assert short.choices[0].text == decoded(decoder, "Why", 16)


@pytest.mark.parametrize("as_ids", [False, True])
def test_a_prompt_is_scored(client: openai.OpenAI, decoder: SpeculativeDecoder, as_ids: bool) -> None:
    """As programs ask that measure the likelihood of answers: for no tokens of the model's own, or one."""
    texts = ["How many?", "Ünïcödé ✓"]
    ids = [decoder.prompt_tokenizer.encode(text, raw=True) for text in texts]
    options: dict[str, Any] = {"model": NAME, "echo": True, "logprobs": 2, "temperature": 0}
    prompts: Any = ids if as_ids else texts
    for count in (0, 1):
        answer = client.completions.create(prompt=prompts, max_tokens=count, **options)
        for choice, text, prompt in zip(answer.choices, texts, ids, strict=True):
            sampling = SamplingParams(log_probs=True, top_log_probs=2)
            (chunk,) = decoder.stream(
                prompt, max_new_tokens=count, sampling=sampling, prompt_log_probs=True, stop_token_ids=()
            )
            pieces = [*chunk.prompt, *chunk.pieces]
            assert choice.text == text + chunk.text
            scores = choice.logprobs
            assert scores is not None
            assert scores.tokens == [piece.text for piece in pieces]
            assert scores.token_logprobs is not None
            assert scores.top_logprobs is not None
            assert scores.token_logprobs[0] is scores.top_logprobs[0] is None
            expected = [piece.log_prob for piece in pieces[1:]]
            assert scores.token_logprobs[1:] == pytest.approx(expected, abs=1e-4)
            for piece, value, top in zip(
                pieces[1:], scores.token_logprobs[1:], scores.top_logprobs[1:], strict=True
            ):
                assert top[piece.text] <= max(top.values())
                assert (value == max(top.values())) == (piece.token_id == piece.top[0][0])
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 2 * count
    echoed = client.completions.create(prompt=prompts, max_tokens=3, **{**options, "logprobs": None})
    for choice, text, prompt in zip(echoed.choices, texts, ids, strict=True):
        chunks = decoder.stream(prompt, max_new_tokens=3)
        assert choice.text == text + "".join(chunk.text for chunk in chunks)
        assert choice.logprobs is None
    with pytest.raises(openai.BadRequestError, match="max_tokens: must be at least 1, got 0"):
        client.completions.create(model=NAME, prompt=prompts, max_tokens=0)


def test_the_most_probable_tokens(client: openai.OpenAI, decoder: SpeculativeDecoder) -> None:
    options: dict[str, Any] = {"messages": QUESTION, "logprobs": True, "top_logprobs": 3, **GREEDY}
    whole = client.chat.completions.create(**options).choices[0].logprobs
    events = [event.choices[0].logprobs for event in client.chat.completions.create(stream=True, **options)]
    assert whole is not None
    assert whole.content is not None
    assert len(whole.content) == 24
    streamed = [token for scores in events if scores is not None for token in scores.content or []]
    for token, same in zip(whole.content, streamed, strict=True):
        assert token.logprob == token.top_logprobs[0].logprob
        assert [best.logprob for best in token.top_logprobs] == sorted(
            (best.logprob for best in token.top_logprobs), reverse=True
        )
        assert (len(token.top_logprobs), same.logprob) == (3, pytest.approx(token.logprob, abs=1e-4))


def test_stop_and_sampling(client: openai.OpenAI, decoder: SpeculativeDecoder) -> None:
    whole = expected_text(decoder, "How many?")
    stopped = client.chat.completions.create(messages=QUESTION, stop=[whole[5:8], "\ue000"], **GREEDY)
    assert stopped.choices[0].message.content == whole[: whole.find(whole[5:8])]
    assert stopped.choices[0].finish_reason == "stop"
    sampled: dict[str, Any] = {**GREEDY, "temperature": 0.75, "seed": 3, "top_p": 0.9}
    answer = client.chat.completions.create(messages=QUESTION, n=2, extra_body={"top_k": 40}, **sampled)
    texts = [choice.message.content for choice in answer.choices]
    expected = [
        expected_text(decoder, "How many?", temperature=0.75, top_k=40, top_p=0.9, seed=seed)
        for seed in (3, 4)
    ]
    assert texts == expected
    assert texts[0] != texts[1]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(decoder.prompt_tokenizer.encode("How many?"))
    forced = client.completions.create(prompt="x", logit_bias={"77": 1000}, **{**GREEDY, "max_tokens": 1})
    assert forced.choices[0].text == decoder.prompt_tokenizer.tokenizer.decode([77])


def test_eight_at_once(client: openai.OpenAI, decoder: SpeculativeDecoder) -> None:
    prompts = [PROMPTS[index % len(PROMPTS)] for index in range(8)]

    def ask(prompt: str) -> str | None:
        message: Any = {"role": "user", "content": prompt}
        return client.chat.completions.create(messages=[message], **GREEDY).choices[0].message.content

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, prompts)) == [expected_text(decoder, prompt) for prompt in prompts]


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"temperature": -1}, "temperature", "temperature: must be a number from 0 on, got -1"),
        ({"max_tokens": 4096}, "max_tokens", "max_tokens: must be at most"),
        ({"stop": ["a"] * 33}, "stop", "stop: must be at most 32, got 33"),
        (
            {"messages": [{"role": "user", "content": "a" * 600}]},
            "messages",
            "messages: must be shorter than",
        ),
        ({"extra_body": {"guided_json": {}}}, "guided_json", "guided_json: is not supported"),
        ({"logit_bias": {"9999": 1}}, "logit_bias", "logit_bias: must be token ids below 258, got 9999"),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_bad_requests(
    client: openai.OpenAI, fields: dict[str, Any], param: str, message: str, streamed: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{"messages": QUESTION, **GREEDY, "stream": streamed, **fields})
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"
    assert message in str(caught.value)


def test_other_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match=f"model: must be {NAME}, got .*other"):
        client.chat.completions.create(messages=QUESTION, **{**GREEDY, "model": "other"})
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model=NAME, input="x")
    with pytest.raises(openai.BadRequestError, match="prompt: must not be empty"):
        client.completions.create(prompt="", **GREEDY)
    assert client.completions.create(prompt=" ", **GREEDY).usage.prompt_tokens == 1
    with pytest.raises(openai.BadRequestError, match="prompt: token ids must be below 258, got 9999"):
        client.completions.create(prompt=[9999], **GREEDY)
    with pytest.raises(openai.APIStatusError) as caught:
        client.completions.create(prompt="x" * (9 << 20), **GREEDY)
    assert caught.value.status_code == 413


def test_models_and_health(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.with_options(base_url=str(client.base_url).removesuffix("v1/")).get(
        "/health", cast_to=object
    ) in (None, "")


def test_one_model(client: openai.OpenAI) -> None:
    assert client.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError, match=f"model: must be {NAME}, got .*meta/other"):
        client.models.retrieve("meta/other")


def answers(service: Service, *requests: tuple[str, str, dict[str, Any]]) -> list[tuple[int, Any, str]]:
    """Of requests by method, path and options: status, headers and text."""

    async def ask() -> list[tuple[int, Any, str]]:
        server = TestServer(make_app(service))
        await server.start_server(auto_decompress=False)
        async with TestClient(server) as client:
            found = [await client.request(method, path, **options) for method, path, options in requests]
            return [(answer.status, answer.headers, await answer.text()) for answer in found]

    return asyncio.run(ask())


def test_a_key() -> None:
    service = Service("localhost:1", MODEL, NAME, Access(api_key="sésame"))
    right = {"headers": {"Authorization": "Bearer sésame"}}
    wrong = [{}, {"headers": {"Authorization": "Bearer sesame"}}, {"headers": {"Authorization": ""}}]
    (status, _, _), (lower, _, _), *refused = answers(
        service,
        ("GET", "/v1/models", right),
        ("GET", "/v1/models", {"headers": {"Authorization": "bearer sésame"}}),
        *(("GET", "/v1/models", each) for each in wrong),
    )
    assert (status, lower) == (200, 200)
    for status, headers, text in refused:
        assert (status, headers["WWW-Authenticate"]) == (401, "Bearer")
        assert json.loads(text)["error"]["type"] == "authentication_error"
    ((health, _, _),) = answers(service, ("GET", "/health", {}))
    assert health == 503  # there is no Triton, and no key was asked for
    (open_, _, _), *_ = answers(Service("localhost:1", MODEL, NAME), ("GET", "/v1/models", {}))
    assert open_ == 200


def test_an_empty_key_is_refused(
    server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CTC_API_KEY", " ")
    assert openai_server.main(["--url", server.url]) == 2
    assert "openai: CTC_API_KEY: must not be empty, got ' '" in capsys.readouterr().err
    assert openai_server.main(["--url", server.url, "--api-key", ""]) == 2
    assert "openai: --api-key: must not be empty, got ''" in capsys.readouterr().err


def test_pages_of_browsers() -> None:
    """One that is not allowed cannot even ask blindly, with a body that needs no question before."""
    page, other = {"Origin": "https://chat.example"}, {"Origin": "https://other.example"}
    blind = {
        "headers": {**other, "Content-Type": "text/plain"},
        "data": json.dumps({**GREEDY, "prompt": "x"}),
    }
    asking = {
        **page,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization",
    }
    service = Service("localhost:1", MODEL, NAME, Access(origins=frozenset({"https://chat.example"})))
    refused, preflight, allowed, missing, plain = answers(
        service,
        ("POST", "/v1/completions", blind),
        ("OPTIONS", "/v1/chat/completions", {"headers": asking}),
        ("GET", "/v1/models", {"headers": page}),
        ("GET", "/v1/nothing", {"headers": page}),
        ("GET", "/v1/models", {}),
    )
    assert refused[0] == 403
    assert json.loads(refused[2])["error"]["message"] == (
        'pages of "https://other.example" may not ask this server; --allow-origin lets them'
    )
    assert (preflight[0], preflight[1]["Access-Control-Allow-Headers"]) == (204, "authorization")
    for status, headers, _ in (preflight, allowed, missing):
        assert headers["Access-Control-Allow-Origin"] == "https://chat.example"
        assert status in (200, 204, 404)
    assert "Access-Control-Allow-Origin" not in plain[1]
    for host, status in (
        ("localhost:9", 404),
        ("127.0.0.1:9", 404),
        ("[::1]:9", 404),
        ("own.example:9", 403),
    ):
        own = {"headers": {"Origin": f"http://{host}", "Host": host, "Content-Type": "text/plain"}}
        ((found, _, _),) = answers(service, ("POST", "/v1/nothing", own))
        assert found == status
        foreign = {"headers": {"Origin": "http://localhost:8", "Host": host}}
        ((found, _, _),) = answers(service, ("POST", "/v1/nothing", foreign))
        assert found == 403
    everybody = Service("localhost:1", MODEL, NAME, Access(origins=frozenset({"*"})))
    ((status, headers, _),) = answers(everybody, ("GET", "/v1/models", {"headers": other}))
    assert (status, headers["Access-Control-Allow-Origin"]) == (200, "https://other.example")


@pytest.mark.parametrize(
    "options",
    [
        {"data": b"{}", "headers": {"Content-Type": "application/json; charset=klingon"}},
        {"data": b"{}", "headers": {"Content-Type": "application/json; charset=punycode"}},
        {
            "data": b"no gzip",
            "headers": {"Content-Type": "application/json", "Content-Encoding": "gzip"},
        },
        {"data": b"[" * 100_000, "headers": {"Content-Type": "application/json"}},
        {"json": {"model": NAME, "prompt": "x", "a" * 100_000: 1}},
        # Numbers that an answer cannot repeat, in a field that changes nothing else.
        {"json": {"model": NAME, "prompt": "x", "metadata": {"a": float("nan")}}},
        {
            "data": b'{"model": "%s", "prompt": "x", "metadata": {"a": -1e999}}' % NAME.encode(),
            "headers": {"Content-Type": "application/json"},
        },
    ],
)
def test_bodies_that_are_not_what_they_say(options: dict[str, Any]) -> None:
    service = Service("localhost:1", MODEL, NAME)
    ((status, _, text),) = answers(service, ("POST", "/v1/completions", options))
    headers = options.get("headers", {})
    assert status == (415 if "charset" in str(headers) or "Content-Encoding" in headers else 400)
    assert json.loads(text)["error"]["type"] == "invalid_request_error"
    assert len(text) < 600


def test_clients_that_leave_free_their_slots(client: openai.OpenAI, each_server: Server) -> None:
    """While they stream, and while they wait for a whole answer: their texts are not decoded to the end."""
    length = 450
    options: dict[str, Any] = {"messages": QUESTION, "model": NAME, "max_tokens": length, "temperature": 9.0}
    options["logit_bias"] = {"0": -10000}  # no end of text
    whole_answers = []
    for _ in range(2):
        began = time.monotonic()
        client.chat.completions.create(**options)
        whole_answers.append(time.monotonic() - began)
    patience = min(whole_answers) / 4
    before = each_server.counter("ctc_tokens")
    for _ in range(MAX_NUM_SEQS):
        with client.chat.completions.create(stream=True, **options) as events:
            next(iter(events))
        with pytest.raises(openai.APITimeoutError):
            client.with_options(timeout=patience).chat.completions.create(**options)
    assert asyncio.run(served_together(each_server.url, MAX_NUM_SEQS))
    rest = MAX_NUM_SEQS * 400
    assert each_server.counter("ctc_tokens") - before - rest < MAX_NUM_SEQS * length


def test_without_a_server(capsys: pytest.CaptureFixture[str], server: Server) -> None:
    (port,) = free_ports(1)
    body = {**GREEDY, "messages": QUESTION}

    async def ask() -> list[tuple[int, str]]:
        app = make_app(Service(f"localhost:{port}", MODEL, NAME))
        async with TestClient(TestServer(app)) as client:
            answers = [await client.get("/health")]
            for streamed in (False, True):
                answers.append(await client.post("/v1/chat/completions", json={**body, "stream": streamed}))
            json_type = {"Content-Type": "application/json"}
            answers.append(await client.post("/v1/chat/completions", data=b"{", headers=json_type))
            answers.append(await client.post("/v1/chat/completions", json=[]))
            answers.append(await client.post("/v1/chat/completions", json={}))
            answers.append(await client.get("/v1/chat/completions"))
            return [(answer.status, await answer.text()) for answer in answers]

    (health, _), *down, (bad, text), (other, _), (nameless, missing), (method, _) = asyncio.run(ask())
    assert health == 503
    assert [status for status, _ in down] == [503, 503]
    assert json.loads(down[0][1])["error"]["type"] == "overloaded_error"
    assert (bad, other, nameless, method) == (400, 400, 400, 405)
    assert "body: must be JSON" in json.loads(text)["error"]["message"]
    assert json.loads(missing)["error"]["message"] == f"model: is missing; this server has {NAME}"
    assert openai_server.main(["--url", f"localhost:{port}"]) == 2
    assert f"openai: --url: no server at localhost:{port} serves ctc_llm: " in capsys.readouterr().err
    assert openai_server.main(["--url", server.url, "--port", str(server.http_port)]) == 2
    assert f"openai: --port {server.http_port}:" in capsys.readouterr().err


def test_a_full_queue_is_status_503(server: Server, decoder: SpeculativeDecoder) -> None:
    """As many requests as it takes, of which some are refused at once and the others answered."""

    async def ask() -> list[tuple[int, Any]]:
        app = make_app(Service(server.url, MODEL, NAME))
        async with TestClient(TestServer(app)) as client:
            body = {**GREEDY, "messages": QUESTION, "max_tokens": 100, "n": 16}
            answers = await asyncio.gather(
                *(client.post("/v1/chat/completions", json=body) for _ in range(4))
            )
            return [(answer.status, await answer.json()) for answer in answers]

    began = time.monotonic()
    answers = asyncio.run(ask())
    assert time.monotonic() - began < PATIENCE
    assert 503 in {status for status, _ in answers}
    for status, body in answers:
        assert status in (200, 503)
        if status == 503:
            assert "queue" in body["error"]["message"]


@pytest.mark.parametrize("origin", ["chat.example", "https://chat.example/", "https://"])
def test_an_origin_that_no_browser_sends_is_refused(origin: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        openai_server.main(["--allow-origin", origin])
    assert (
        f"--allow-origin: must be such as https://chat.example, or *, got '{origin}'"
        in capsys.readouterr().err
    )

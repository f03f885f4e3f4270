"""What the line of a request says of answers of several choices, which come whole or in parts."""

import asyncio
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from triton_repo.web.request_log import RECORD, log_requests


def response(tokens: int, steps: int, reason: str) -> dict[str, Any]:
    counts = {"num_input_tokens": 3, "num_cached_tokens": 0, "num_output_tokens": tokens, "num_steps": steps}
    return {**{name: np.array([count]) for name, count in counts.items()}, "finish_reason": [reason.encode()]}


def line_of(
    monkeypatch: pytest.MonkeyPatch, status: int, *responses: tuple[int, dict[str, Any]]
) -> dict[str, Any]:
    """The fields of the line of a request that ends with this status after these responses, by choice."""
    found: list[dict[str, Any]] = []
    monkeypatch.setattr("triton_repo.web.request_log.write", lambda text, fields: found.append(fields))
    app = web.Application()
    log_requests(app)

    async def handler(request: web.Request) -> web.Response:
        for index, tensors in responses:
            request[RECORD].add(tensors, index)
        return web.Response(status=status)

    request = make_mocked_request("POST", "/v1/completions", app=app)
    asyncio.run(app.middlewares[0](request, handler))  # type: ignore[arg-type]
    (line,) = found
    return line


def test_a_choice_that_ended_does_not_hide_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    line = line_of(monkeypatch, 503, (0, response(9, 4, "stop")))
    assert (line["status"], line["reason"], line["output_tokens"]) == (503, "unavailable", 9)


def test_the_time_of_the_first_token_is_that_of_one_that_comes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = line_of(monkeypatch, 200, (0, response(9, 4, "length")))
    assert (whole["output_tokens"], whole["acceptance_length"]) == (9, 2)
    assert "time_to_first_token" not in whole
    streamed = line_of(monkeypatch, 200, (0, response(1, 0, "")), (0, response(9, 4, "length")))
    assert streamed["time_to_first_token"] <= streamed["seconds"]

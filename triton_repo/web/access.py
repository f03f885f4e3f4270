"""Who may ask: clients with the key, if there is one, and pages of browsers that are allowed."""

import hmac
import ipaddress
import json
import re
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from runtime.core.errors import UserError
from triton_repo.web.json_body import shown

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
# Makes the answer to a request that is refused, in the form of its interface.
Refuse = Callable[[int, UserError], web.Response]
# A queue moves on within this time, and a server that is started anew needs about as long.
RETRY_SECONDS = 2
# Of a request of a page: the headers that let the browser read the answer.
ALLOWED = web.RequestKey("allowed", dict)


@dataclass(frozen=True)
class Access:
    """What the server asks of its clients.

    api_key: what clients have to send as a bearer token; None for nothing
    origins: pages that may ask from a browser, such as https://chat.example; "*" stands for all
    """

    api_key: str | None = None
    origins: frozenset[str] = frozenset()


NO_LIMITS = Access()


def retry_after(status: int) -> dict[str, str]:
    """The header that tells a client when to try again, for an answer that says that it may."""
    return {"Retry-After": str(RETRY_SECONDS)} if status == 503 else {}


async def send_event(response: web.StreamResponse, event: dict[str, Any]) -> None:
    """Send a server-sent event; its type is its name, too."""
    name = f"event: {event['type']}\n" if "type" in event else ""
    await response.write(f"{name}data: {json.dumps(event)}\n\n".encode())


def middlewares(access: Access, refuse: Refuse, open_paths: Collection[str]) -> list[Any]:
    """An application's middlewares. open_paths: those that need no key, for those who watch the server."""

    @web.middleware
    async def with_key(request: web.Request, handler: Handler) -> web.StreamResponse:
        if access.api_key is not None and request.path not in open_paths:
            # The scheme has no case.
            given = re.sub(r"^bearer ", "", request.headers.get("Authorization", ""), flags=re.IGNORECASE)
            # Bytes that are not UTF-8, in a header or in the environment, are surrogates here.
            texts = (text.encode("utf-8", "surrogateescape") for text in (given, access.api_key))
            if not hmac.compare_digest(*texts):
                message = "a valid key is expected in the header Authorization, as: Bearer KEY"
                response = refuse(401, UserError(message))
                response.headers["WWW-Authenticate"] = "Bearer"
                return response
        return await handler(request)

    @web.middleware
    async def from_browsers(request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answers pages of other origins only if they are allowed, so that no page can spend compute unseen.

        A browser names the page's origin in every such request, and asks before one with JSON or a key.
        """
        origin = request.headers.get("Origin")
        if origin is None or _is_own(request, origin):
            return await handler(request)
        if "*" not in access.origins and origin not in access.origins:
            message = f"pages of {shown(origin)} may not ask this server; --allow-origin lets them"
            return refuse(403, UserError(message))
        allowed = {"Access-Control-Allow-Origin": origin, "Vary": "Origin"}
        if request.method == "OPTIONS":
            asked = request.headers.get("Access-Control-Request-Headers", "")
            allowed |= {"Access-Control-Allow-Methods": "GET, POST", "Access-Control-Allow-Headers": asked}
            return web.Response(status=204, headers=allowed)
        request[ALLOWED] = allowed
        response = await handler(request)
        if not response.prepared:
            response.headers.update(allowed)
        return response

    return [from_browsers, with_key]


def _is_own(request: web.Request, origin: str) -> bool:
    """Whether the page is this server's own, by its address or as localhost.

    By another name it may be anybody's: whoever owns a name can let it stand for this machine for a while.
    """
    with suppress(ValueError):
        address = urlsplit(origin)
        if address.netloc == request.host and address.hostname is not None:
            return address.hostname == "localhost" or bool(ipaddress.ip_address(address.hostname))
    return False

"""The ASGI middleware in front of every route. A request without a valid token, or with a body of unknown size, is
refused before a byte of the body is read, and the connection is closed."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from apportion.service.engine import Metrics
from apportion.service.http.tokens import Tokens
from apportion.service.problems import ServiceError

MAX_BODY = 4 << 20  # bytes; parsing makes a body up to fifty times as large (a list of empty lists)
BODY_S = 20.0
#: paths that need no token
OPEN_PATHS = frozenset({"/", "/healthz", "/readyz", "/docs", "/openapi.json", "/docs/oauth2-redirect"})
PROBLEM = "application/problem+json"


class Guard:
    """Checks the token and the headers of a request, and adds the token's `tenant` to the scope's state."""

    def __init__(self, app: ASGIApp, tokens: Tokens, metrics: Metrics) -> None:
        self._app, self._tokens, self._metrics = app, tokens, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        authorization, length, problem = b"", b"", None
        for name, value in scope["headers"]:
            if name == b"authorization":
                authorization = value
            elif name == b"content-length":
                length = value
            elif name == b"transfer-encoding":  # trailers could be endless
                problem = ServiceError("length", "the body is sent in chunks")
        tenant = self._tokens.tenant(authorization)
        if tenant is None and scope["path"] not in OPEN_PATHS:
            problem = ServiceError("unauthorized", "the token is missing or unknown to this server")
        elif length and (not length.isdigit() or len(length) > 12 or int(length) > MAX_BODY):
            problem = ServiceError("too-large", f"the body has more than {MAX_BODY} bytes")
        if problem is not None:
            self._metrics.problems.labels(problem.type).inc()
            await answer(send, *encode_problem(problem), ((b"connection", b"close"),))
            return
        scope.setdefault("state", {})["tenant"] = tenant
        await self._app(scope, receive, send)


async def answer(
    send: Send, status: int, kind: bytes, body: bytes, extra: tuple[tuple[bytes, bytes], ...] = ()
) -> None:
    """Sends a complete response."""
    headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode()), *extra]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def encode_problem(problem: ServiceError) -> tuple[int, bytes, bytes]:
    """Status, media type and body of a problem (RFC 9457)."""
    return problem.status, PROBLEM.encode(), msgspec.json.encode(problem_data(problem))


def problem_data(problem: ServiceError) -> dict[str, Any]:
    """The members of a problem."""
    data = {"type": problem.type, "title": problem.title, "status": problem.status, "detail": problem.detail}
    return data | {"remedy": problem.remedy} | ({"field": problem.field} if problem.field else {})


async def body_of(receive: Receive) -> bytes:
    """Reads the whole body. Raises ServiceError if it does not arrive in time or the client disconnects."""
    parts, more = list[bytes](), True
    try:
        async with asyncio.timeout(BODY_S):
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ServiceError("slow-body", "the client disconnected")
                parts.append(message.get("body", b""))
                more = message.get("more_body", False)
    except TimeoutError:
        raise ServiceError("slow-body", f"the body did not arrive within {BODY_S:g} s") from None
    return b"".join(parts)

"""The outermost application: who answers, what is logged and counted, and that errors are problems."""

from __future__ import annotations

import logging
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from apportion.ir.errors import ConfigError
from apportion.service.http.api.bodies import ClientGoneError
from apportion.service.http.api.problems import REASON, MethodError, is_expected, problem_of, send_problem
from apportion.service.http.audit import Audit, client
from apportion.service.http.delivery import App, Delivery
from apportion.service.http.logs import log, request_id
from apportion.service.http.metrics import Traffic

_PROBES = ("/healthz", "/readyz", "/metrics")


class Edge:
    """Plans and streams go to `delivery`, all else to `control`."""

    def __init__(self, delivery: Delivery, control: ASGIApp, traffic: Traffic, audit: Audit) -> None:
        self._delivery, self._control, self._traffic, self._audit = delivery, control, traffic, audit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if sum([name == b"authorization" for name, _ in scope["headers"]]) > 1:
                raise ConfigError(
                    "Authorization", "(hidden)", "is sent twice: which one counts?", "send one key, once"
                )
            found = self._delivery.find(scope["path"])
            if found is not None:
                await found(scope, receive, send)
                return
        except ClientGoneError:
            return
        except Exception as error:
            await self._refuse(error, scope, send)
            return
        await ControlExchange(self._control, self._traffic, self._audit, scope, send).run(receive)

    async def _refuse(self, error: Exception, scope: Scope, send: Send) -> None:
        id = _id(scope)
        problem = problem_of(error, id)
        facts = {"path": scope["path"], "client": client(scope), "request_id": id}
        if not is_expected(error):
            log("request failed", logging.ERROR, error=error, **facts)
        elif problem.status == 503:
            log("request refused", logging.WARNING, status=503, reason=problem.detail, **facts)
        self._audit.refused(scope, problem.status)
        if self._delivery.is_plan(scope["path"]):
            self._traffic.plans[problem.status] += 1
        else:
            self._traffic.requests[scope["method"], "none", problem.status] += 1
        await send_problem(send, problem, error.allow if isinstance(error, MethodError) else "")


class ControlExchange:
    """One request to the control plane and its answer."""

    def __init__(self, app: App | ASGIApp, traffic: Traffic, audit: Audit, scope: Scope, send: Send) -> None:
        self._app, self._traffic, self._audit, self._scope, self._send = app, traffic, audit, scope, send
        self._began_s = time.perf_counter()
        self._id = scope["apportion.request_id"] = _id(scope)
        self._status = 0

    async def run(self, receive: Receive) -> None:
        """Log and count it, whatever comes of it."""
        failed: Exception | None = None
        try:
            await self._app(self._scope, receive, self._forward)
        except ClientGoneError:
            self._status = 499  # as nginx writes where nobody waits for the answer
        except Exception as error:  # the answer was sent, the rest is for the log
            failed = error
        self._count(failed)

    async def _forward(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            headers = [pair for pair in message["headers"] if pair[0] != b"x-request-id"]
            message["headers"] = [*headers, (b"x-request-id", self._id.encode())]
        await self._send(message)

    def _count(self, failed: Exception | None) -> None:
        took_s = time.perf_counter() - self._began_s
        scope = self._scope
        route = getattr(scope.get("route"), "path", "none")
        self._audit.request(scope, route, self._status)
        self._traffic.requests[scope["method"], route, self._status] += 1
        self._traffic.request_s.observe(took_s)
        level = logging.ERROR if failed else logging.DEBUG if route in _PROBES else logging.INFO
        facts = {
            "method": scope["method"],
            "path": scope["path"],
            "status": self._status,
            "client": client(scope),
            "reason": scope.get(REASON),
        }
        log("request", level, error=failed, ms=took_s * 1e3, request_id=self._id, **facts)


def _id(scope: Scope) -> str:
    return request_id(dict(scope["headers"]).get(b"x-request-id"))

"""The FastAPI application of an engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from logging import getLogger
from typing import Annotated, Any

from fastapi import FastAPI, Header, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.routing import Route

from apportion.ir.version import __version__
from apportion.service.engine import Engine, Entry, PlanRequest, State
from apportion.service.http.delivery import Delivery, key_of
from apportion.service.http.guard import PROBLEM, Guard, body_of, encode_problem
from apportion.service.http.models import Health, Hour, PlanResponse, Plans, PlanState, Problem, Submission
from apportion.service.http.openapi import BODY, DELIVERY
from apportion.service.http.requests import parse
from apportion.service.http.tokens import Tokens
from apportion.service.pack import Pack
from apportion.service.problems import KINDS, ServiceError, UnknownPlanError
from apportion.service.workers.work import plan_file, plan_page
from apportion.web import WATCH

_PROBLEM: dict[str, Any] = {"model": Problem, "content": {PROBLEM: {}}}
PLAN_FILE = "application/vnd.apportion.plan"
LOG = getLogger(__name__)

Key = Annotated[str, Path(pattern="^[0-9a-f]{64}$", description="key of the request: Job.request_key in hex")]
Start = Callable[[], AbstractAsyncContextManager[Engine]]


def create_app(start: Start, tokens: Tokens, metrics: Any) -> FastAPI:
    """The application of an engine. start: creates the engine, on the application's event loop."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with start() as engine:
            app.state.engine = engine
            delivery = Delivery(engine)
            app.router.routes.insert(0, Route("/v1/plans/{key}/ranks/{rank}", delivery, methods=["GET"]))
            app.router.routes.insert(1, Route("/v1/ranks/{rank}/stream", delivery, methods=["GET"]))
            yield

    app = FastAPI(
        title="Apportion",
        version=__version__,
        description="Plans of context-parallel attention, by content address.",
        lifespan=lifespan,
        redoc_url=None,
        responses={kind.status: {"description": kind.title, **_PROBLEM} for kind in KINDS.values()},
    )
    app.add_middleware(Guard, tokens=tokens, metrics=metrics)
    for kind in (ServiceError, HTTPException, RequestValidationError, Exception):
        app.exception_handler(kind)(partial(_problem_response, metrics))
    for add in (_plan_routes, _other_routes):
        add(app)
    app.openapi()["paths"] |= DELIVERY  # FastAPI keeps this schema and serves it
    return app


def _plan_routes(app: FastAPI) -> None:
    @app.put("/v1/plans/{key}", status_code=202, openapi_extra=BODY, responses={200: {"model": Submission}})
    async def submit(
        key: Key, request: Request, response: Response, ahead: Annotated[int, Query(ge=0, le=65536)] = 0
    ) -> Submission:
        """Submits a request, to be planned once. 200 if its plan is ready. ahead: training steps until its use."""
        body, key_bytes = await _plan_request(request), key_of(key)
        if body.key != key_bytes:
            raise ServiceError("wrong-key", f"the request has the key {body.key.hex()}", field="key")
        entry = await _engine(request).submit(body, request.state.tenant, ahead)
        if entry.state is State.READY:
            response.status_code = 200
        return Submission(key=key, state=entry.state)

    @app.get("/v1/plans/{key}", responses={200: {"content": {"text/html": {}}}})
    async def state(key: Key, request: Request, accept: Annotated[str, Header()] = "*/*") -> PlanState:
        """State and report of a request; as text/html, the page of its plan."""
        engine, key_bytes = _engine(request), key_of(key)
        entry = engine.entry(key_bytes)
        pack = await engine.pack(key_bytes, 0.0) if entry is None or entry.plan else None
        if _prefers(accept, "text/html") and pack is not None:
            page = await _make(request, plan_page, await parse("application/msgpack", pack.request))
            return HTMLResponse(page)  # type: ignore[return-value]
        if entry is None and pack is None:
            raise UnknownPlanError(key_bytes)
        return _state(entry, pack)

    @app.get("/v1/plans")
    async def latest(request: Request, count: Annotated[int, Query(ge=1, le=1000)] = 50) -> Plans:
        """The latest requests since the server's start, newest first; neither plans that are only in the store,
        nor requests to POST /v1/plan for a plan file or a page."""
        return Plans(plans=[_state(entry, None) for entry in _engine(request).latest(count)])

    @app.get("/v1/hour")
    async def hour(request: Request) -> Hour:
        """The last hour by minute and tenant: counts, plans ready but not yet requested, planning and wait times."""
        minutes, tenants = await _engine(request).hour()
        return Hour(minutes=minutes, tenants=tenants)

    @app.post("/v1/plan", openapi_extra=BODY, responses={200: {"content": {PLAN_FILE: {}, "text/html": {}}}})
    async def plan(request: Request, accept: Annotated[str, Header()] = "*/*") -> PlanResponse:
        """Plans a request and waits for the plan. The answer is a report; if text/html is accepted, a page; if
        application/vnd.apportion.plan is accepted, the plan. Pages and plans are neither stored nor listed."""
        body = await _plan_request(request)
        if _prefers(accept, PLAN_FILE):
            data = await _make(request, plan_file, body)
            return Response(data, media_type=PLAN_FILE)  # type: ignore[return-value]
        if _prefers(accept, "text/html"):
            return HTMLResponse(await _make(request, plan_page, body))  # type: ignore[return-value]
        engine = _engine(request)
        await engine.submit(body, request.state.tenant)
        pack = await engine.pack(body.key, 3600.0)
        if pack is None:
            raise ServiceError("too-long", "the plan is not ready yet: get it by its key", field="key")
        return PlanResponse(key=body.key.hex(), id=pack.head.id.hex(), report=pack.report)


def _other_routes(app: FastAPI) -> None:
    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def page() -> str:
        return WATCH.assemble("Apportion", {"release": __version__})

    @app.get("/healthz")
    async def alive() -> Health:
        """Liveness of the server."""
        return Health()

    @app.get("/readyz")
    async def ready(request: Request) -> Health:
        """Readiness of planner and store. The status is 200 also if degraded: plans are then served from memory."""
        store = _engine(request).store
        reason = store.problem() if store is not None else None
        return Health() if reason is None else Health(status="degraded", reason=reason)

    @app.get("/metrics", response_class=Response)
    async def metrics(request: Request) -> Response:
        """Metrics in Prometheus' text format."""
        registry = _engine(request).metrics.registry
        return Response(await asyncio.to_thread(generate_latest, registry), media_type=CONTENT_TYPE_LATEST)


def _engine(request: Request) -> Engine:
    engine: Engine = request.app.state.engine
    return engine


async def _plan_request(request: Request) -> PlanRequest:
    return await parse(request.headers.get("content-type", ""), await body_of(request.receive))


async def _make(request: Request, work: Any, body: PlanRequest) -> bytes:
    return await _engine(request).make(work, body, request.state.tenant)


def _prefers(accept: str, media: str) -> bool:
    return media in [part.partition(";")[0].strip() for part in accept.split(",")]


def _state(entry: Entry | None, pack: Pack | None) -> PlanState:
    """The state of a request. entry: None if its plan is only in the store."""
    if entry is None:
        assert pack is not None
        return PlanState(
            key=pack.key.hex(), state=State.READY, ranks=pack.ranks, id=pack.head.id.hex(), report=pack.report
        )
    return PlanState(
        key=entry.key.hex(),
        state=entry.state,
        ranks=entry.ranks,
        job=entry.job.hex()[:16],
        tenant=entry.tenant,
        seconds=entry.seconds,
        id=entry.plan.hex(),
        detail="" if entry.problem is None else entry.problem.detail,
        report=None if pack is None else pack.report,
    )


# ---- problems


async def _problem_response(metrics: Any, request: Request, error: Exception) -> Response:
    problem = _problem(request, error)
    metrics.problems.labels(problem.type).inc()
    status, media, body = encode_problem(problem)
    headers = {} if problem.retry_after is None else {"retry-after": f"{problem.retry_after:.0f}"}
    if problem.type == "method":
        headers["allow"] = ", ".join(sorted(_methods(request)))
    return Response(body, status, headers, media.decode())


def _problem(request: Request, error: Exception) -> ServiceError:
    if isinstance(error, ServiceError):
        return error
    if isinstance(error, HTTPException):
        kind = "method" if error.status_code == 405 else "not-found"
        return ServiceError(kind, f"{request.method} {request.url.path}")
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        field = str(first["loc"][-1])
        return ServiceError("invalid", f"{field}: {first['msg']}", field=field)
    LOG.error("%s %s", request.method, request.url.path, exc_info=error)
    return ServiceError("failed", type(error).__name__)


def _methods(request: Request) -> set[str]:
    """The methods of all routes with the request's path."""
    path, routes = request.url.path, (route for route in request.app.routes if isinstance(route, Route))
    return {method for route in routes if route.path_regex.match(path) for method in route.methods or ()}

"""The control plane: jobs, epochs, iterations, and what is to know about the server. FastAPI."""

from __future__ import annotations

import asyncio
from functools import cache
from typing import Any

import msgspec
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from apportion.ir.bytes.job import Job as Spec
from apportion.ir.errors import ApportionError, ConfigError
from apportion.ir.request.batch import Batch
from apportion.ir.version import __version__
from apportion.planner.recipe.recipes import check as check_recipe
from apportion.service.engine import Engine, IterationState, JobKey
from apportion.service.http.api import models
from apportion.service.http.api.openapi import describe, document
from apportion.service.http.api.pages import page
from apportion.service.http.api.problems import REASON, Problem, encode, headers_of, plain, problem_of
from apportion.service.http.auth import key_digest, new_key
from apportion.service.http.calls import (
    Admin,
    Anyone,
    EpochNumber,
    IterationNumber,
    KeyId,
    Member,
    Name,
    Owner,
    Parts,
    Scraper,
    Writer,
    reply,
)
from apportion.service.http.watch_routes import router as watch
from apportion.service.protocol import EXPORT, JSON, TAR, EpochState

PROBE_S = 2.0  # for the store's answer, where somebody asks whether the server is ready
_SHOWN = 200  # characters of a path that is not there
_PAGE_HEADERS = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}

router = APIRouter()


# ---------------------------------------------------------------------------------------------- jobs


@router.post(
    "/v1/jobs",
    **describe("admin", {201: models.CreatedJob, 200: models.CreatedJob}, (409, 429), models.NewJob),
)
async def create_job(call: Admin) -> Response:
    """Create a job.

    201 with its key, which is told only here; 200 where the same name, job and key were sent before."""
    asked, spec = await call.body(models.NewJob, lambda asked: (asked, _checked(asked.job)))
    key = new_key() if asked.key is None else asked.key
    call.is_by("admin", asked.name)
    created = await call.engine.create_job(asked.name, spec, asked.lookahead, key_digest(key))
    return reply(models.CreatedJob(asked.name, key, call.url(asked.name)), 201 if created else 200)


def _checked(data: Any) -> Spec:
    """The job, whose recipe the planner knows. Raises ConfigError, UnknownNameError."""
    spec = Spec.from_data(data)
    check_recipe(spec.policy.recipe)
    return spec


@router.get(EXPORT, **describe("admin", {200: TAR}))
async def export(call: Admin) -> Response:
    """Copy the store: a tar of jobs and plans that `apportion store import` reads; epochs do not go on in it."""
    return call.parts.exports.begin()


@router.get("/v1/jobs", **describe("admin", {200: models.JobsReply}))
async def list_jobs(call: Admin) -> Response:
    """List the jobs."""
    found = sorted(call.engine.jobs(), key=lambda job: job.name)
    return reply(models.JobsReply([call.reply(job) for job in found]))


@router.get("/v1/jobs/{job}", **describe("job", {200: models.JobReply}, (404,)))
async def read_job(call: Member, job: Name) -> Response:
    """Read a job."""
    return reply(call.reply(call.engine.job(job)))


@router.delete("/v1/jobs/{job}", **describe("admin", {204: None}, (403, 404)))
async def delete_job(call: Owner, job: Name) -> Response:
    """Delete a job, its epochs and iterations."""
    await call.engine.delete_job(job)
    return Response(status_code=204)


@router.get("/v1/jobs/{job}/keys", **describe("admin", {200: models.KeysReply}, (403, 404)))
async def list_keys(call: Owner, job: Name) -> Response:
    """List a job's keys, without what opens it."""
    return reply(models.KeysReply([models.KeyReply(key.id, key.role) for key in call.engine.job(job).keys]))


@router.post(
    "/v1/jobs/{job}/keys",
    **describe("admin", {201: models.KeyReply, 200: models.KeyReply}, (403, 404, 409), models.NewKey),
)
async def add_key(call: Owner, job: Name) -> Response:
    """Add a key to a job: to rotate its keys, or one for ranks that only reads. It is told only here."""
    asked = await call.body(models.NewKey, lambda asked: asked)
    key = new_key() if asked.key is None else asked.key
    held = JobKey(key_digest(key), asked.role)
    created = await call.engine.add_key(job, held)
    return reply(models.KeyReply(held.id, held.role, key), 201 if created else 200)


@router.delete("/v1/jobs/{job}/keys/{key}", **describe("admin", {204: None}, (403, 404, 409)))
async def revoke_key(call: Owner, job: Name, key: KeyId) -> Response:
    """Revoke a key of a job: it opens nothing from now on."""
    await call.engine.drop_key(job, key)
    return Response(status_code=204)


# ---------------------------------------------------------------------------------------------- epochs, iterations


@router.post(
    "/v1/jobs/{job}/epochs",
    **describe("job", {201: models.BegunEpoch, 200: models.BegunEpoch}, (404, 409, 425), models.NewEpoch),
)
async def begin_epoch(call: Member, job: Name) -> Response:
    """Begin an epoch.

    201 where the run is new: the epoch before of its stream is over then, those of other streams go on. 200 with the
    same number for every rank of the run. A key that only reads gets 425 until it has begun."""
    run, stream = await call.body(models.NewEpoch, lambda asked: (asked.run, asked.stream))
    number, created = await call.engine.begin_epoch(job, run, stream, reads=call.reads)
    return reply(models.BegunEpoch(number, stream, run), 201 if created else 200)


@router.get("/v1/jobs/{job}/epochs/{epoch}", **describe("job", {200: EpochState}, (404, 410)))
async def read_epoch(call: Member, job: Name, epoch: EpochNumber) -> Response:
    """Read how far an epoch is."""
    return reply(call.engine.epoch_state(job, epoch))


@router.put(
    "/v1/jobs/{job}/epochs/{epoch}/iterations/{iteration}",
    **describe(
        "job",
        {201: models.IterationReply, 200: models.IterationReply},
        (403, 404, 409, 410, 429),
        models.NewIteration,
    ),
)
async def submit(call: Writer, job: Name, epoch: EpochNumber, iteration: IterationNumber) -> Response:
    """Submit an iteration.

    Any rank may, and again: 201 for the first, 200 for the same once more, 409 for other batches. It is kept from
    then on, also if the server is killed."""
    batches = await call.body(models.NewIteration, _batches)
    created = await call.engine.submit(job, epoch, iteration, batches)
    found = await call.engine.iteration_state(job, epoch, iteration)
    return reply(_told(iteration, found), 201 if created else 200)


@router.get(
    "/v1/jobs/{job}/epochs/{epoch}/iterations/{iteration}",
    **describe("job", {200: models.IterationReply}, (404, 410)),
)
async def read_iteration(call: Member, job: Name, epoch: EpochNumber, iteration: IterationNumber) -> Response:
    """Read what became of an iteration."""
    return reply(_told(iteration, await call.engine.iteration_state(job, epoch, iteration)))


def _batches(asked: models.NewIteration) -> tuple[Batch, ...]:
    return tuple(_batch(f"batches[{i}]", data) for i, data in enumerate(asked.batches))


def _batch(place: str, data: Any) -> Batch:
    try:
        return Batch.from_data(data)
    except ConfigError as error:
        where = f"{place}.{error.field}"
        raise type(error)(where, error.value, error.rule, error.remedy) from None


def _told(iteration: int, found: IterationState) -> models.IterationReply:
    problem = found.problem
    return models.IterationReply(
        iteration,
        found.state,
        None if found.id is None else found.id.hex(),
        None if problem is None else problem.detail,
        None if problem is None else problem.field,
        found.planned_ms,
        found.ready_at,
    )


# ---------------------------------------------------------------------------------------------- the server itself


@router.get("/healthz", **describe(None, {200: models.Health}))
async def health(call: Anyone) -> Response:
    """Tell that the server is alive."""
    return reply(models.Health("ok"))


@router.get("/readyz", **describe(None, {200: models.Health, 503: models.Health}))
async def ready(call: Anyone) -> Response:
    """Tell whether the server takes work, and if not, why."""
    reason = _not_ready(call.engine) or await _trouble(call.engine)
    return reply(models.Health("not ready", reason), 503) if reason else reply(models.Health("ok"))


def _not_ready(engine: Engine) -> str:
    if engine.draining:
        return "it is shutting down"
    if not engine.ready:
        return "it is starting"
    found = engine.snapshot()
    if found.alive:
        return ""
    return f"none of its {found.workers} workers is alive" if found.restarts else "its workers are starting"


async def _trouble(engine: Engine) -> str:
    """Of the store, which is asked."""
    try:
        async with asyncio.timeout(PROBE_S):
            found = await engine.trouble()
    except TimeoutError:
        return f"the store does not answer within {PROBE_S:g} s"
    return f"the store fails: {found}" if found else ""


@router.get("/metrics", **describe("figures", {200: CONTENT_TYPE_LATEST}))
async def metrics(call: Scraper) -> Response:
    """Tell what was counted, for Prometheus."""
    return Response(await call.parts.figures.text(), media_type=CONTENT_TYPE_LATEST)


@router.get("/openapi.json", include_in_schema=False)
async def openapi(call: Scraper, request: Request) -> Response:
    return Response(msgspec.json.encode(request.app.openapi()), media_type=JSON)


@router.get("/docs", include_in_schema=False)
async def docs(call: Scraper, request: Request) -> Response:
    return Response(page(request.app.openapi()), headers=_PAGE_HEADERS, media_type="text/html; charset=utf-8")


# ---------------------------------------------------------------------------------------------- the application


def control(parts: Parts, has_admin: bool) -> FastAPI:
    """The routes above as an ASGI application whose errors are problems."""
    app = FastAPI(title="Apportion", version=__version__, openapi_url=None, docs_url=None, redoc_url=None)
    app.router.redirect_slashes = False
    app.state.parts = parts
    app.include_router(router)
    app.include_router(watch)
    app.openapi = cache(lambda: document(app.routes, has_admin))  # type: ignore[method-assign]
    for kind in (RequestValidationError, HTTPException, ApportionError, Exception):
        app.add_exception_handler(kind, _refuse)
    return app


async def _refuse(request: Request, error: Exception) -> Response:
    problem = _problem(request, error)
    request.scope[REASON] = problem.detail
    body = encode(problem)
    headers = headers_of(problem, body, _allowed(request))
    answer = Response(body, problem.status)
    answer.raw_headers = headers
    return answer


def _problem(request: Request, error: Exception) -> Problem:
    id = request.scope.get("apportion.request_id")
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        error = ConfigError(str(first["loc"][-1]), first["input"], first["msg"], "see /docs for the form")
    if isinstance(error, HTTPException):
        path = request.scope["path"][:_SHOWN]
        return plain(error.status_code, f"{request.method} {path}: see /docs for what there is", id)
    return problem_of(error, id)


def _allowed(request: Request) -> str:
    """Methods of the path: the router tells only those of the first route that fits."""
    path = request.scope["path"]
    fit = [
        route
        for route in (*router.routes, *watch.routes)
        if isinstance(route, APIRoute) and route.path_regex.match(path)
    ]
    return ", ".join(sorted({method for route in fit for method in route.methods or ()}))

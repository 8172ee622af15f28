"""The OpenAPI document: FastAPI's for its routes, the same by hand for those in front of it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import msgspec
from fastapi.openapi.utils import get_openapi
from starlette.routing import BaseRoute

from apportion.ir.version import __version__
from apportion.service.http.api import models
from apportion.service.http.api.models import MAX_EPOCH, MAX_ITERATION, MAX_RANK, MAX_WINDOW
from apportion.service.http.api.problems import Problem
from apportion.service.protocol import FRAMES, JSON, PLAN, PROBLEM, WINDOW, EpochState

Json = dict[str, Any]

_FILES = ("batch", "cluster", "hardware", "job", "model", "policy", "recipe")
_STRUCTS = (
    models.NewJob,
    models.CreatedJob,
    models.NewKey,
    models.KeyReply,
    models.KeysReply,
    models.JobReply,
    models.JobsReply,
    models.NewEpoch,
    models.BegunEpoch,
    EpochState,
    models.NewIteration,
    models.IterationReply,
    models.Waiting,
    models.Health,
    Problem,
)
_SAYS = {
    200: "Done, or there already",
    201: "Done",
    202: "Not yet: ask again",
    204: "Done",
    304: "The client has it",
    401: "A key is needed, or another one",
    403: "The key does not open this",
    404: "There is nothing of that name",
    406: "The format versions do not meet",
    408: "The body did not come in time",
    409: "Something else is there already, or the batch cannot be planned",
    410: "A later epoch of the stream has begun, or the iteration is no longer kept",
    413: "The body has too many bytes",
    415: "The body is not JSON",
    422: "A value is wrong: `field` names it",
    425: "The run has not begun, and the key only reads",
    429: "The job has enough under way",
    500: "The server failed",
    503: "The server has enough under way, is stopping, or its store does not answer",
}
_RETRY = {"Retry-After": {"description": "seconds", "schema": {"type": "integer", "minimum": 0}}}
_ETAG = {"ETag": {"required": True, "schema": {"type": "string", "pattern": '^"[0-9a-f]{64}"$'}}}
_BODY_PROBLEMS = (408, 413, 415)
_ABOUT = """Plans of context-parallel attention, made before ranks ask for them.

Errors are `application/problem+json` (RFC 9457). Keys go into the header `Authorization: Bearer KEY`: the admin key of
the server creates, lists and deletes jobs; the key of a job, which its creation returns, opens all that is the job's.
Further ones may be added and revoked, some that only read.
"""


def ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


def describe(
    key: str | None,
    replies: Mapping[int, type[msgspec.Struct] | str | None],
    problems: Iterable[int] = (),
    body: type[msgspec.Struct] | None = None,
) -> Json:
    """What FastAPI is told of a route. key: who may, "admin", "job", "figures" or None for anyone; replies: JSON by
    status, or a media type of text; problems: statuses beyond those that all have."""
    responses = {status: _reply(status, kind) for status, kind in replies.items()}
    missing = _problems(key, problems, body is not None)
    extra: Json = {"security": [] if key is None else [{key: []}]}
    if body is not None:
        extra["requestBody"] = {"required": True, "content": {JSON: {"schema": ref(body.__name__)}}}
    return {
        "status_code": next(iter(replies)),
        "response_model": None,
        "responses": {
            **{status: _problem(status) for status in missing if status not in responses},
            **responses,
        },
        "openapi_extra": extra,
    }


def _problems(key: str | None, problems: Iterable[int], has_body: bool) -> list[int]:
    always = () if key is None else (401, 422, 500, 503)
    aside = (409,) if key == "job" else ()
    return sorted({*always, *aside, *problems, *(_BODY_PROBLEMS if has_body else ())})


def _reply(status: int, kind: type[msgspec.Struct] | str | None) -> Json:
    found: Json = {"description": _SAYS[status]}
    if isinstance(kind, str):
        return found | {"content": {kind.partition(";")[0]: {"schema": {"type": "string"}}}}
    return found if kind is None else found | {"content": {JSON: {"schema": ref(kind.__name__)}}}


def _problem(status: int) -> Json:
    found: Json = {"description": _SAYS[status], "content": {PROBLEM: {"schema": ref("Problem")}}}
    return found | {"headers": _RETRY} if status in (429, 503) else found


# ---------------------------------------------------------------------------------------------- the document


def document(routes: Sequence[BaseRoute], has_admin: bool) -> Json:
    """OpenAPI 3.1. has_admin: whether the server asks for an admin key."""
    found = get_openapi(title="Apportion", version=__version__, description=_ABOUT, routes=routes)
    found["paths"] |= _delivery()
    found["components"] = {"schemas": _schemas(), "securitySchemes": _keys()}
    if not has_admin:
        _open(found["paths"])
    return found


def _open(paths: Json) -> None:
    for operation in (operation for path in paths.values() for operation in path.values()):
        if operation.get("security") in ([{"admin": []}], [{"figures": []}]):
            operation["security"] = []


def _keys() -> Json:
    told = {
        "admin": "The server's admin key",
        "job": "A key of the job, or the admin key",
        "figures": "The admin key, or that for metrics",
    }
    return {name: {"type": "http", "scheme": "bearer", "description": text} for name, text in told.items()}


@cache
def _schemas() -> Json:
    _, own = msgspec.json.schema_components(_STRUCTS, ref_template="#/components/schemas/{name}")
    shared: Json = {}
    for name in _FILES:
        shared |= _shared(name)
    return {**own, **shared}


def _shared(name: str) -> Json:
    """A schema of apportion/schemas, its parts as components of their own."""
    data = json.loads(files("apportion.schemas").joinpath(f"{name}.schema.json").read_text("utf-8"))
    title = name.capitalize()
    parts = {f"{title}_{part}": schema for part, schema in data.pop("$defs", {}).items()}
    del data["$schema"], data["$id"]
    return {key: _moved(schema, title) for key, schema in {title: data, **parts}.items()}


def _moved(schema: Any, title: str) -> Any:
    """The schema with its references to where the parts are now."""
    if isinstance(schema, list):
        return [_moved(item, title) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: _moved(value, title) for key, value in schema.items()}
    target = found.get("$ref")
    if isinstance(target, str):
        local = target.startswith("#/$defs/")
        found |= ref(f"{title}_{target[8:]}" if local else target.partition(":")[2].capitalize())
    return found


# ---------------------------------------------------------------------------------------------- delivery


def _delivery() -> Json:
    iteration = _path_parameter("iteration", 0, MAX_ITERATION)
    plan = "/v1/jobs/{job}/epochs/{epoch}/iterations/{iteration}/ranks/{rank}/plan"
    stream = "/v1/jobs/{job}/epochs/{epoch}/ranks/{rank}/stream"
    common = [_name(), _path_parameter("epoch", 1, MAX_EPOCH), _path_parameter("rank", 0, MAX_RANK)]
    return {
        plan: {"get": _plan([*common, iteration], False), "head": _plan([*common, iteration], True)},
        stream: {"get": _stream(common)},
    }


def _name() -> Json:
    schema = {"type": "string", "pattern": models.NAME}
    return {"name": "job", "in": "path", "required": True, "schema": schema}


def _path_parameter(name: str, low: int, high: int) -> Json:
    schema = {"type": "integer", "minimum": low, "maximum": high}
    return {"name": name, "in": "path", "required": True, "schema": schema}


def _query(name: str, text: str, schema: Json) -> Json:
    return {"name": name, "in": "query", "required": False, "description": text, "schema": schema}


def _header(name: str, text: str) -> Json:
    return {
        "name": name,
        "in": "header",
        "required": False,
        "description": text,
        "schema": {"type": "string"},
    }


def _plan(parameters: list[Json], head: bool) -> Json:
    wait = _query(
        "wait_s",
        "seconds to wait for it, at most 60 of them",
        {"type": "number", "minimum": 0, "maximum": 3600, "default": 0},
    )
    content = {} if head else {"content": {PLAN: {"schema": {"type": "string", "format": "binary"}}}}
    waiting = {} if head else {"content": {JSON: {"schema": ref("Waiting")}}}
    known = _header("If-None-Match", "ETags that the client has")
    return {
        "summary": "Read One Rank's Plan" + (" (headers only)" if head else ""),
        "description": "An encoded `IterationSlice`: the same bytes whenever one asks. Waits for an iteration that is "
        "not planned, or not submitted, yet.",
        "operationId": "head_plan" if head else "read_plan",
        "security": [{"job": []}],
        "parameters": [*parameters, wait, known],
        "responses": {
            "200": {"description": "The plan", "headers": _ETAG} | content,
            "202": {"description": _SAYS[202], "headers": _RETRY} | waiting,
            "304": {"description": _SAYS[304], "headers": _ETAG},
            **_delivery_problems((404, 406, 409, 410), head),
        },
    }


def _stream(parameters: list[Json]) -> Json:
    start = {"type": "integer", "minimum": 0, "maximum": MAX_ITERATION, "default": 0}
    window = {"type": "integer", "minimum": 1, "maximum": MAX_WINDOW, "default": WINDOW}
    told = {"Apportion-Heartbeat": {"required": True, "description": "seconds", "schema": {"type": "number"}}}
    return {
        "summary": "Stream One Rank's Plans",
        "description": "Frames (`apportion/service/frames.py`): plans in order, heartbeats between them, an end frame "
        "after `window` plans. Who lost the connection asks again from the last plan + 1.",
        "operationId": "stream_plans",
        "security": [{"job": []}],
        "parameters": [
            *parameters,
            _query("from", "first iteration", start),
            _query("window", "plans", window),
        ],
        "responses": {
            "200": {
                "description": "The frames",
                "headers": told,
                "content": {FRAMES: {"schema": {"type": "string", "format": "binary"}}},
            },
            **_delivery_problems((404, 406, 410), False),
        },
    }


def _delivery_problems(statuses: Iterable[int], head: bool) -> Json:
    found = {str(status): _problem(status) for status in _problems("job", statuses, False)}
    return {
        status: {k: v for k, v in told.items() if not (head and k == "content")}
        for status, told in found.items()
    }

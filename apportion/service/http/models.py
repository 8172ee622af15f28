"""Models of the JSON answers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from apportion.service.engine import State
from apportion.service.engine.hour import Minute, Usage


class Submission(BaseModel):
    """An accepted request."""

    key: str
    state: State


class PlanState(BaseModel):
    """A request and its plan. seconds: worker time; id: the plan's, 64 hex digits; detail: why there is no plan."""

    key: str
    state: State
    ranks: int | None = None
    job: Annotated[str, Field(description="first 16 hex digits of the job's digest")] = ""
    tenant: str = ""
    seconds: float = 0.0
    id: str = ""
    detail: str = ""
    report: dict[str, Any] | None = None


class Plans(BaseModel):
    """The latest requests, newest first."""

    plans: list[PlanState]


class Hour(BaseModel):
    """The last hour, from the requests that the server remembers. minutes: the oldest first; tenants: a row for all,
    with an empty name, and one for each tenant."""

    minutes: list[Minute]
    tenants: list[Usage]


class PlanResponse(BaseModel):
    """The answer to POST /v1/plan."""

    key: str
    id: str
    report: dict[str, Any]


class Health(BaseModel):
    """Health of the server, with the reason if it is degraded."""

    status: Literal["ok", "degraded"] = "ok"
    reason: str = ""


class Problem(BaseModel):
    """RFC 9457. type: see docs/reference/http.md; field: the invalid field of the request."""

    type: str
    title: str
    status: int
    detail: str
    remedy: str
    field: str | None = None

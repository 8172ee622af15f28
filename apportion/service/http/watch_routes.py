"""Routes of the page: itself, the stream that it reads, and reports of iterations."""

from __future__ import annotations

from functools import cache

from fastapi import APIRouter, Response

from apportion.service.http.api.openapi import describe
from apportion.service.http.calls import Admin, Anyone, EpochNumber, IterationNumber, Name, Reader
from apportion.service.http.watch.events import EVENTS
from apportion.service.protocol import HTML
from apportion.web import REPORT, WATCH
from apportion.web.page import policy

_HTML = f"{HTML}; charset=utf-8"
_HEADERS = {
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
}

router = APIRouter()


@router.get("/", include_in_schema=False)
async def page(call: Anyone) -> Response:
    """The page. It opens reports, which have its policy and their own."""
    own = policy([WATCH, REPORT], connect="'self'") + "; frame-ancestors 'none'"
    return Response(_page(), headers={**_HEADERS, "content-security-policy": own}, media_type=_HTML)


@cache
def _page() -> bytes:
    return WATCH.assemble("Apportion", {}).encode()


@router.get("/watch", **describe("admin", {200: EVENTS}))
async def watch(call: Admin) -> Response:
    """Watch the server: its state, once a second, as server-sent events."""
    return call.parts.watchers.admit()


@router.get(
    "/v1/jobs/{job}/epochs/{epoch}/iterations/{iteration}/report",
    **describe("job", {200: _HTML}, (404, 409, 410)),
)
async def report(call: Reader, job: Name, epoch: EpochNumber, iteration: IterationNumber) -> Response:
    """Make the report of a planned iteration, a page that opens offline."""
    source = await call.engine.source(job, epoch, iteration)
    return Response(await call.parts.reports.make(source), headers=_HEADERS, media_type=_HTML)

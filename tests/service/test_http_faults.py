"""What clients and the log are told when the server itself is at fault, and how the log looks."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Message

from apportion.service.frames import FrameReader, Kind
from apportion.service.http import export, logs
from apportion.service.http.streams import ABORT
from tests.service.engines import Rig, run
from tests.service.servers import KEY, Live, begin, live, make_job, plan_path, submit, until


@pytest.fixture
def broken() -> Iterator[Live]:
    """A server whose engine fails as no engine should."""

    def fail(*_: Any) -> None:
        raise RuntimeError("a fault with a secret in it")

    with live() as server:
        make_job(server.caller)
        begin(server.caller)
        server.engine.peek = server.engine.submit = server.engine.fetch = fail
        yield server


def test_a_fault_is_told_without_its_cause(broken: Live, caplog: pytest.LogCaptureFixture) -> None:
    member = broken.caller.using(KEY)
    for answer in (member("GET", plan_path(0)), submit(broken.caller, 0)):
        assert (answer.status, answer.problem) == (500, "internal")
        assert b"secret" not in answer.body
        until(lambda id=answer.json["request_id"]: id in _logged(caplog))
    assert "a fault with a secret in it" in caplog.text


def _logged(caplog: pytest.LogCaptureFixture) -> list[str | None]:
    """Ids of the requests whose errors were logged."""
    return [getattr(record, "facts", {}).get("request_id") for record in caplog.records if record.exc_info]


def test_a_fault_ends_a_stream_with_a_problem(broken: Live) -> None:
    answer = broken.caller.using(KEY)("GET", "/v1/jobs/run/epochs/1/ranks/0/stream")
    (frame,) = FrameReader().feed(answer.body)
    assert frame.kind is Kind.PROBLEM
    assert json.loads(frame.body)["type"] == "urn:apportion:problem:internal"


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_log_has_one_line_an_event(form: logs.Format) -> None:
    told = io.StringIO()
    with logs.logging_to(told, form):
        logs.log("request", path='/a b\n"c"=d', status=200, ms=1.5, nothing=None)
        try:
            raise ValueError("why")
        except ValueError as error:
            logs.log("failed", logging.ERROR, error=error)
    lines = told.getvalue().splitlines()
    if form == "json":
        first, second = map(json.loads, lines)
        assert (first["event"], first["path"], first["status"]) == ("request", '/a b\n"c"=d', 200)
        assert "ValueError: why" in second["trace"]
        assert "nothing" not in first
    else:
        assert lines[0].endswith(r' INFO    request path="/a b\n\"c\"=d" status=200 ms=1.5')
        assert lines[-1] == "ValueError: why"


def test_a_log_that_is_not_read_loses_lines_and_says_how_many() -> None:
    near, far = os.pipe()
    with (
        open(near, encoding="utf-8") as reader,
        open(far, "w", encoding="utf-8") as stream,
        logs.logging_to(stream, "text"),
    ):
        for number in range(20_000):
            logs.log("request", number=number, path="x" * 5000)
        lines: list[str] = []
        while not lines or "lines lost" not in lines[-1]:
            lines.append(reader.readline())
        lost = int(lines[-1].rpartition("=")[2])
        assert len(lines) - 1 + lost == 20_000
        assert "(5000 characters)" in lines[0]


def test_a_log_never_goes_to_whoever_got_the_number_of_a_stream_that_was_closed(tmp_path: Path) -> None:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    stream = (tmp_path / "log").open("w", encoding="utf-8")
    with logs.logging_to(stream, "text"):
        number = stream.fileno()
        stream.close()
        near, far = os.pipe()
        try:
            assert number in (near, far)
            logs.log("request")
        finally:
            os.close(far)
            assert os.read(near, 1) == b""
            os.close(near)
    assert (tmp_path / "log").read_text().endswith("request\n")
    assert (root.handlers[:], root.level) == before


@pytest.mark.parametrize(
    ("given", "kept"), [(b"a-B_1.2", True), (b"", False), (b"x" * 65, False), (b"a b", False)]
)
def test_ids_of_clients_are_kept_where_they_are_harmless(given: bytes, kept: bool) -> None:
    assert (logs.request_id(given) == given.decode()) is kept


def test_a_copy_that_nobody_takes_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "_STALL_S", 0.05)

    async def main() -> None:
        gone = asyncio.Event()

        async def receive() -> Message:
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.body":
                await asyncio.sleep(60.0)

        async with Rig().with_job() as engine:
            copies = export.Exports(engine)
            await copies.run({"type": "http", "extensions": {ABORT: gone.set}}, receive, send)
            assert gone.is_set()
            copies.begin()  # another one may be made

    run(main())

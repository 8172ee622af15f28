"""Requests to one job of a service: answered, checked, tried again."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import BinaryIO, TypeVar
from urllib.parse import urlencode

import msgspec
from urllib3 import Timeout

from apportion.ir.version import __version__
from apportion.service import protocol
from apportion.service.client import answers
from apportion.service.client.errors import BadAnswerError, ClientError, ClosedError
from apportion.service.client.link import Answer, Link, Opened, Peer, was_sent
from apportion.service.client.waits import Pace, TransientError, Waits
from apportion.service.frames import MAX_BODY

T = TypeVar("T")

_ACCEPT = {"Accept": f"{protocol.JSON}, {protocol.PROBLEM}"}
_MOST_JSON = 64 << 20
_OF_GATEWAYS = (502, 504)  # the server's own answer is not known
_LONGEST_S = 86400.0
_MOST_PAGE = 256 << 20
_AGENT = f"apportion/{__version__}"


class Caller:
    """Sends requests from any thread, through connections of the process that it is called in."""

    def __init__(
        self, peer: Peer, path: str, headers: Mapping[str, str], timeout_s: float, pace: Pace
    ) -> None:
        self._peer, self._path, self._headers = peer, path, {"User-Agent": _AGENT, **headers}
        self.timeout_s, self.pace = timeout_s, pace
        self._closed = False
        self._links: dict[int, Link] = {}

    def link(self) -> Link:
        """This process's connections. A parent's stay in `_links`, forsaken: freeing them takes locks that its threads
        may have held. Raises ClosedError."""
        link = self._links.get(os.getpid()) or self._new_link()
        if self._closed:
            raise ClosedError("the client is closed")
        return link

    def _new_link(self) -> Link:
        for link in list(self._links.values()):
            if not link.own:
                link.close()
        return self._links.setdefault(os.getpid(), Link(self._peer))

    def close(self) -> None:
        """End what other threads wait for, and free the sockets; again is no error."""
        self._closed = True
        for link in list(self._links.values()):
            link.close()

    def waits(
        self, timeout_s: float | None, given_up: Callable[[TransientError], ClientError] | None = None
    ) -> Waits:
        """For one call; by default it ends with the last failure's own error."""
        waits = Waits(self.pace, timeout_s or self.timeout_s, self._sleep)
        if given_up is not None:
            waits.given_up = given_up
        return waits

    def _sleep(self, seconds: float) -> None:
        if self.link().sockets.closed.wait(seconds):
            raise ClosedError("the client was closed while it waited for another attempt")

    def get(self, path: str, kind: type[T]) -> T:
        """The JSON data there."""
        return self._data("GET", path, None, kind)

    def send(self, method: str, path: str, data: object, kind: type[T]) -> T:
        """The JSON data that comes back. data: None sends none. The request must be one that may arrive twice."""
        return self._data(method, path, None if data is None else msgspec.json.encode(data), kind)

    def delete(self, path: str) -> None:
        """What is there. After an answer that was lost, what is not there has been deleted."""
        waits, lost = self.waits(None), False

        def once() -> None:
            nonlocal lost
            try:
                answer = self._whole(self._open("DELETE", path, _ACCEPT, None, waits), waits, _MOST_JSON)
            except TransientError as failure:
                lost |= was_sent(failure)
                raise
            lost |= answer.status in _OF_GATEWAYS
            if answer.status != 404 or not lost:
                answers.read(answer, answers.Empty)

        waits.repeat(once)

    def page(self, path: str, wait_s: float) -> bytes:
        """The HTML page there, which the server may take so long to make."""
        waits = self.waits(self.timeout_s + wait_s)

        def once() -> bytes:
            opened = self._open(
                "GET", path, {"Accept": f"{protocol.HTML}, {protocol.PROBLEM}"}, None, waits, wait_s
            )
            answer = self._whole(opened, waits, _MOST_PAGE)
            answers.check(answer)
            answers.check_type(answer.headers, protocol.HTML)
            return answer.body

        return waits.repeat(once)

    def download(self, path: str, kind: str, file: BinaryIO, progress: Callable[[int], None]) -> None:
        """What is there, into a file; however long it takes, while something comes. Not tried again."""
        waits = self.waits(_LONGEST_S)
        try:
            opened = self._open("GET", path, {"Accept": f"{kind}, {protocol.PROBLEM}"}, None, waits)
            if opened.status != 200:
                answers.check(self._whole(opened, waits, _MOST_JSON))
            answers.check_type(opened.headers, kind)
            size = 0
            try:
                while part := opened.read(self.pace.read_s):
                    size += file.write(part)
                    progress(size)
            finally:
                opened.close()
        except TransientError as error:
            raise error.error from None

    def plan(self, path: str, waits: Waits) -> bytes:
        """The body of a plan, once it is there."""
        return waits.repeat(lambda: self._poll(path, waits))

    def stream(self, path: str, waits: Waits) -> Opened:
        """A stream of frames, read as they come. Raises TransientError, ServiceProblem."""
        opened = self._open("GET", path, {"Accept": protocol.FRAMES_VERSION}, None, waits)
        if opened.status != 200:
            answers.check(self._whole(opened, waits, _MOST_JSON))
        try:
            answers.check_type(opened.headers, protocol.FRAMES)
        except BadAnswerError as error:
            opened.close()
            raise TransientError(error) from None  # the head may have been cut
        return opened

    def _data(self, method: str, path: str, body: bytes | None, kind: type[T]) -> T:
        waits = self.waits(None)
        headers = _ACCEPT if body is None else {**_ACCEPT, "Content-Type": protocol.JSON}

        def once() -> T:
            opened = self._open(method, path, headers, body, waits)
            return answers.read(self._whole(opened, waits, _MOST_JSON), kind)

        return waits.repeat(once)

    def _poll(self, path: str, waits: Waits) -> bytes:
        left = waits.left()
        wait_s = min(self.pace.wait_s, left - min(0.5, left / 4))
        query = urlencode({"wait_s": f"{wait_s:.3f}"})
        opened = self._open("GET", f"{path}?{query}", {"Accept": protocol.PLAN_VERSION}, None, waits, wait_s)
        answer = self._whole(opened, waits, MAX_BODY)
        if answer.status == 202:
            waits.failures = 0  # not one: the server is well
            raise answers.not_yet(answer)
        answers.check(answer)
        return answers.plan_of(answer)

    def _open(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: bytes | None,
        waits: Waits,
        wait_s: float = 0.0,
    ) -> Opened:
        """wait_s: how long the server may take beyond what is usual."""
        left, pace = max(waits.left(), 1e-3), self.pace
        timeout = Timeout(left, min(pace.connect_s, left), min(pace.read_s + wait_s, left))
        return self.link().open(method, self._path + path, {**self._headers, **headers}, body, timeout)

    def _whole(self, opened: Opened, waits: Waits, most: int) -> Answer:
        try:
            body = opened.body(most, self.pace.read_s, waits.left)
            return Answer(opened.status, opened.headers, body)
        finally:
            opened.close()

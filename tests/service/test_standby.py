"""A leader and one that stands by."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import urllib3

from tests.service.standby import Peer, case
from tests.service.stores import redis_server, until


def test_one_stands_by_until_the_other_ends(tmp_path: Path) -> None:
    with redis_server(tmp_path / "redis") as redis, ExitStack() as stack:
        first, second = Peer(tmp_path / "first", redis), Peer(tmp_path / "second", redis)
        for peer in (first, second):
            stack.callback(peer.end)
        first.start()
        until(lambda: first.ready, 60.0, "the leader")
        second.start()
        until(lambda: second.alive, 60.0, "the one that stands by")
        answer = urllib3.request("GET", f"http://127.0.0.1:{second.port}/v1/jobs", retries=False)
        assert (answer.status, answer.json()["type"]) == (503, "urn:apportion:problem:store")
        assert "stands by" in answer.json()["detail"]
        assert not second.ready
        first.end()
        until(lambda: second.ready, 60.0, "the take-over")


def test_nothing_is_lost_when_leaders_fail(tmp_path: Path) -> None:
    case(1, tmp_path, failures=3, timed=False)

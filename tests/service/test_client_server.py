"""The client and a real server: each does what the other expects."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import islice

import pytest

from apportion.ir.errors import ConfigError
from apportion.service.client import (
    Client,
    JobSummary,
    Pace,
    PlanTimeoutError,
    ServiceProblem,
    create_job,
    delete_job,
    list_jobs,
)
from apportion.service.http.run.child import serving
from tests.service import faulty_proxy
from tests.service.small_server import batches, bodies, job
from tests.support.sparse import sparse

HELD = bodies(6)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("served")) as server:
        yield server.url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[Client]:
    """Of a job whose first epoch is over, and whose second has all of `HELD`."""
    with create_job(url, "run1", job(), timeout_s=120) as made:
        made.begin("before")
        assert made.begin("run") == made.begin("run") == 2
        for iteration in range(len(HELD)):
            made.submit(2, iteration, batches(iteration))
        yield made


def test_plans_and_streams_give_what_planning_here_gives(client: Client) -> None:
    assert [client.plan(2, i, 1, 120).encode() for i in range(6)] == [ranks[1] for ranks in HELD]
    with closing(client.stream(2, 0, window=4, patience_s=120)) as plans:
        assert [piece.encode() for _, piece in islice(plans, 6)] == [ranks[0] for ranks in HELD]


def test_what_a_server_tells(url: str, client: Client) -> None:
    assert client.job() == job()
    assert client.url == f"{url}/v1/jobs/run1"
    assert list_jobs(url) == [JobSummary("run1", client.url, 2, 8, 2, {"train": 2})]
    state = client.epoch_state(2)
    assert (state.epoch, state.run, state.held) == (2, "run", 6)
    assert state.stream == "train"
    assert client.knows(2, 5)
    assert not client.knows(2, 6)


def test_streams_fence_only_themselves(url: str) -> None:
    with create_job(url, "streams", job()) as made:
        train, evaluation = made.begin("a"), made.begin("a", "eval")
        made.submit(train, 0, batches(0))
        assert made.begin("b", stream="eval") == evaluation + 1 == train + 2
        assert made.plan(train, 0, 0, 120).encode() == HELD[0][0]
        with pytest.raises(ServiceProblem, match=r"410 gone.*streams of their own"):
            made.plan(evaluation, 0, 0, 120)
        with pytest.raises(ConfigError, match="stream"):
            made.begin("c", "a/b")


def test_jobs_are_made_once_and_deleted(url: str) -> None:
    with (
        create_job(url, "other", job(), lookahead=3) as made,
        create_job(url, "other", job(), key=made.key, lookahead=3) as again,
    ):
        assert again.key == made.key
        assert made.begin("run") == again.begin("run")
    with pytest.raises(ServiceProblem, match="409"):
        create_job(url, "other", job())
    delete_job(url, "other")
    with pytest.raises(ServiceProblem, match="404"):
        delete_job(url, "other")


@pytest.mark.parametrize(
    ("call", "status", "field"),
    [
        (lambda client: client.plan(1, 0, 0), 410, None),
        (lambda client: client.plan(3, 0, 0), 404, "epoch"),
        (lambda client: client.plan(2, 0, 2), 404, "rank"),
        (lambda client: next(client.stream(2, 2)), 404, "rank"),
        (lambda client: next(client.stream(1, 0)), 410, None),
        (lambda client: client.submit(2, 3, batches(4)), 409, "batches"),
        (lambda client: client.submit(2, 6, batches(6) * 2), 422, "batches"),
        (lambda client: Client(client.url, "another-key-of-a-job").begin("run"), 401, None),
        (lambda client: Client(client.url).begin("run"), 401, None),
    ],
)
def test_what_a_server_refuses(
    client: Client, call: Callable[[Client], object], status: int, field: str | None
) -> None:
    with pytest.raises(ServiceProblem) as caught:
        call(client)
    assert (caught.value.status, caught.value.field) == (status, field)
    assert client.key not in str(caught.value)


def test_what_was_not_submitted_is_waited_for(url: str, client: Client) -> None:
    with (
        Client(client.url, client.key, pace=Pace(wait_s=0.1)) as hurried,
        pytest.raises(PlanTimeoutError, match="it is not planned yet, or its batches are not submitted"),
    ):
        hurried.plan(2, 100, 0, 3)


@pytest.mark.parametrize("seed", sparse(range(3), 3))
def test_a_faulty_network_delivers_everything_once_and_in_order(url: str, seed: int) -> None:
    faulty_proxy.through_proxy(url, seed)

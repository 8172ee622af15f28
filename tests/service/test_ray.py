"""Workers of a real Ray cluster on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from apportion.service.pack import Pack
from apportion.service.workers import Completion, Refusal, WorkerDiedError, plan_pack
from tests.service.faults import die, hang
from tests.service.requests import Request

pytest.importorskip("ray")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    from apportion.service.workers.ray import RayExecutor

    executor = RayExecutor(1, task_s=20.0, address="local")
    yield executor
    executor.shutdown()


def test_plans_are_the_same_on_ray(cluster: Any) -> None:
    done = cluster.submit(plan_pack, Request(0).data).result(60.0)
    assert isinstance(done, Completion)
    assert Pack.decode(done.data).data == Request(0).pack().data
    assert isinstance(cluster.submit(plan_pack, b"nothing").result(60.0), Refusal)


def test_deaths_and_timeouts_affect_only_one_task(cluster: Any) -> None:
    with pytest.raises(WorkerDiedError):
        cluster.submit(die, b"").result(60.0)
    with pytest.raises(TimeoutError):
        cluster.submit(hang, b"").result(60.0)
    assert isinstance(cluster.submit(plan_pack, Request(1).data).result(60.0), Completion)

"""On several cores plans are the same, byte for byte; and plans that are too large are refused in advance."""

from __future__ import annotations

import json
from contextvars import ContextVar
from typing import Any

import pytest

import apportion as ap
from apportion import CapacityError, ConfigError, cli
from apportion.ir.request.workload import lognormal_lengths
from apportion.ir.threads import spread
from apportion.planner.recipe.recipes import find_recipe, with_pods
from apportion.planner.tasks import cells


@pytest.mark.parametrize("name", ["fcp", "distca", "mixed", "ulysses", "upipe", "ring"])
@pytest.mark.parametrize("pods", [None, 8])
def test_threads_give_the_same_bytes(name: str, pods: int | None) -> None:
    batch, cluster = ap.Batch.from_lengths(lognormal_lengths(0, 32 * 4096)), ap.Cluster(4, 8)
    recipe = find_recipe(name) if pods is None else with_pods(find_recipe(name), pods)
    plans = [ap.plan(batch, cluster, ap.Model(), recipe, threads=threads) for threads in (1, 2, 5)]
    assert len({plan.id for plan in plans}) == 1
    assert len({plan.encode() for plan in plans}) == 1


@pytest.mark.parametrize("threads", [0, "2", None, 10**9])
def test_the_number_of_threads_must_be_positive(threads: Any) -> None:
    batch = ap.Batch.from_lengths([64])
    with pytest.raises(ConfigError, match="threads"):
        ap.plan(batch, ap.Cluster(1, 2), ap.Model(), threads=threads)
    with pytest.raises(ConfigError, match="threads"):
        ap.verify(ap.plan(batch, ap.Cluster(1, 2), ap.Model()), threads)


def test_threads_run_in_the_context_of_the_caller() -> None:
    value: ContextVar[int] = ContextVar("value", default=0)
    value.set(3)
    assert spread(lambda _: value.get(), range(4), 2) == [3] * 4


def test_the_command_accepts_threads(capsys: pytest.CaptureFixture[str]) -> None:
    ids = []
    for threads in ("1", "2"):
        arguments = ["--ranks", "4", "--tokens-per-rank", "65536", "--workload", "examples/code_lengths.json"]
        assert cli.main(["plan", *arguments, "--threads", threads, "--json"]) == cli.OK
        ids.append(json.loads(capsys.readouterr().out)["id"])
    assert ids[0] == ids[1]


@pytest.mark.parametrize("recipe", ["ring", "usp"])
def test_plans_larger_than_memory_are_refused_at_once(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, cluster = ap.Batch.from_lengths([512] * 16), ap.Cluster(2, 8)
    tasks = ap.plan(batch, cluster, ap.Model(), "ring").programs["default", "forward"]["tasks"]
    monkeypatch.setattr(cells, "MOST_TASKS", len(tasks) * 9 // 8)
    with pytest.raises(CapacityError, match=r"are planned at once; .* \(--pods\)"):
        ap.plan(batch, cluster, ap.Model(), recipe)
    in_pods = ap.plan(batch, cluster, ap.Model(), with_pods(find_recipe("ring"), 8))
    assert in_pods.report["ranks"] == 16

"""A plan is a function of its request: not of a clock, other threads, the process or its hash seed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event, Thread

import pytest

import apportion as ap
from apportion.planner import options
from apportion.planner.recipe import registry
from apportion.planner.recipe.recipes import entries
from apportion.planner.solvers.registry import SOLVERS
from apportion.planner.solvers.status import Budget
from tests.support.programs import run_python

CLUSTER, MODEL = ap.Cluster(2, 2), ap.Model(4, 4, 16, hidden=64, ffn=64, layers=2, dtype="fp32")
LENGTHS = [90, 61, 33, 20, 16, 9, 5, 3, 2, 1]
#: recipes with solvers that passes do not use by default
EXACT = {
    "lpt_ilp": {"shard": {"blocks": {}}, "place": {"lpt": {"solver": "ilp"}}, "schedule": {"matchings": {}}},
    "swap": {"shard": {"sequences": {}}, "place": {"whole": {"solver": "swap"}}, "schedule": {"gather": {}}},
    "flow": {"shard": {"blocks": {}}, "place": {"lpt": {}}, "schedule": {"matchings": {"solver": "flow"}}},
}


def planned(name: str) -> str:
    """The id of the plan, which is a hash of its bytes."""
    recipe = ap.Recipe(name, EXACT[name]) if name in EXACT else name
    return ap.plan(ap.Batch.from_lengths(LENGTHS), CLUSTER, MODEL, recipe=recipe).id.hex()


def all_planned() -> dict[str, str]:
    return {name: planned(name) for name in (*entries(), *EXACT)}


@contextmanager
def other_planning_threads(threads: int) -> Iterator[None]:
    """Runs the block while that many threads plan other requests."""
    stop = Event()

    def plan_repeatedly(seed: int) -> None:
        while not stop.is_set():
            for recipe in ("fcp", "dcp", "blend", "distca"):
                ap.plan(ap.Batch.from_lengths([50 + seed, 40, 30]), CLUSTER, MODEL, recipe=recipe)

    busy = [Thread(target=plan_repeatedly, args=(seed,)) for seed in range(threads)]
    for thread in busy:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in busy:
            thread.join()


@pytest.fixture(scope="module")
def plans_without_load() -> dict[str, str]:
    return all_planned()


def test_other_threads_do_not_change_plans(plans_without_load: dict[str, str]) -> None:
    with other_planning_threads(3), ThreadPoolExecutor(4) as pool:
        found = dict(zip(plans_without_load, pool.map(planned, plans_without_load), strict=True))
    assert found == plans_without_load


def test_another_process_and_hash_seed_give_the_same_plans(plans_without_load: dict[str, str]) -> None:
    code = "import json; from tests.planner.test_purity import all_planned; print(json.dumps(all_planned()))"
    printed = run_python("-c", code, env={"PYTHONHASHSEED": "12345"})
    assert json.loads(printed.splitlines()[-1]) == plans_without_load


def test_no_parameter_limits_time_by_a_clock() -> None:
    passes = (registry.find_pass(step, name) for step in registry.STEPS for name in registry.names(step))
    fields = {field for one in passes for field in options.schema(one)["properties"]}
    budget = set(options.schema(Budget)["properties"])
    assert not [name for name in fields if name.startswith(("deadline", "timeout"))]
    assert budget == {"steps", "gap"}
    assert {limit for entry in SOLVERS.values() for limit in entry.limits} <= budget

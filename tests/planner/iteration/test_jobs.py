"""Jobs: the plans of an iteration, and the same bytes again from what was stored of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from apportion.ir.bytes.job import Job
from apportion.ir.errors import CapacityError, ConfigError
from apportion.ir.masks import specs as masks
from apportion.ir.request.batch import Batch
from apportion.ir.request.cluster import Cluster
from apportion.ir.request.hardware import Hardware
from apportion.ir.request.model import Model
from apportion.ir.request.policy import Policy, Recipe
from apportion.ir.request.sequences import Sequence
from apportion.planner import api
from apportion.planner.iteration.iterate import plan_iteration
from apportion.planner.iteration.jobs import lower_job, plan_job
from apportion.planner.recipe.recipes import find_recipe
from tests.support.strategies import STRATEGIES, WIDE, cluster

MODEL = Model(q_heads=4, kv_heads=2, head_dim=16, layers={"global": 1, "local": 3})
KINDS = {"global": masks.causal(), "local": masks.sliding_window(7)}
LENGTHS = ([33, 20, 7, 1], [50, 9, 3])


def batches(packs: bool = False) -> tuple[Batch, ...]:
    groups = ([*LENGTHS[0], *LENGTHS[1]],) if packs else LENGTHS
    return tuple(Batch.from_lengths(lengths, mask=KINDS) for lengths in groups)


def job(recipe: Recipe | str, ranks: int = 4, **more: object) -> Job:
    policy = Policy(find_recipe(recipe))
    return Job(cluster(ranks), MODEL, policy, 64, 2, **more)


def assert_lowers_alike(job: Job, batches: tuple[Batch, ...]) -> None:
    planned = plan_job(job, batches, verify=False)
    assert planned.assignment is not None
    again = lower_job(planned.assignment)
    assert again.id == planned.plan.id
    assert again.encode() == planned.plan.encode()


@pytest.mark.parametrize("ranks", [2, 4, 6])
@pytest.mark.parametrize("name", [*STRATEGIES, *WIDE])
def test_an_assignment_lowers_to_the_bytes_that_planning_gave(name: str, ranks: int) -> None:
    asked = job(Recipe(name, {**STRATEGIES, **WIDE}[name]), ranks)
    assert_lowers_alike(asked, batches(asked.packs))


@pytest.mark.parametrize(
    ("recipe", "ranks"), [("auto", 16), ("fcp", 16), ("blend", 16), ("dcp", 8), ("distca", 16), ("flexsp", 8)]
)
def test_longer_sequences(recipe: str, ranks: int) -> None:
    lengths = np.random.default_rng(3).lognormal(6.5, 1.0, 60).astype(int) + 1
    model = Model(q_heads=16, kv_heads=8, head_dim=64, layers=4)
    asked = Job(Cluster(ranks // 8, 8), model, Policy(find_recipe(recipe)), 16384)
    assert_lowers_alike(asked, (Batch.from_lengths(lengths.tolist()),))


def test_what_a_search_found_on_other_hardware_lowers_alike() -> None:
    recipe = Recipe("mine", {"search": {"portfolio": {"candidates": ["fcp", "ring"]}}})
    planned = plan_job(job(recipe, hardware=Hardware.named("h100")), batches())
    assert planned.assignment is not None
    again = lower_job(planned.assignment)
    assert again.encode() == planned.plan.encode()
    assert [plan.report["search"] for plan in again.plans] == [
        plan.report["search"] for plan in planned.plan.plans
    ]


def test_homes_speeds_and_caps_are_kept() -> None:
    uneven = replace(cluster(4), speeds=(1.0, 1.0, 0.5, 1.0))
    policy = Policy(find_recipe("fcp"), seed=7, token_cap=40)
    asked = Job(uneven, MODEL, policy, 64)
    kept = (Sequence(33, KINDS, home_ranks=(0, 1)), Sequence(40, KINDS), Sequence(9, KINDS, home_ranks=(2,)))
    assert_lowers_alike(asked, (Batch.from_sequences(kept),))


def test_a_batch_is_a_microbatch_and_planned_as_by_itself() -> None:
    planned = plan_job(job("fcp"), batches()).plan
    assert planned.plans == tuple(api.plan(each, cluster(4), MODEL, "fcp") for each in batches())
    assert [own.tolist() for own in planned.indexes] == [[0, 1, 2, 3], [4, 5, 6]]


def test_a_packing_recipe_gets_the_figures_of_the_job() -> None:
    asked = job("wlb")
    (batch,) = batches(packs=True)
    planned = plan_job(asked, (batch,)).plan
    step = {"wlb": {"microbatches": 2, "tokens_per_rank": 64}}
    recipe = Recipe("wlb", find_recipe("wlb").to_data()["steps"] | {"pack": step})
    assert planned.encode() == plan_iteration(batch, cluster(4), MODEL, recipe).encode()
    assert len(planned.plans) == 2
    assert_lowers_alike(asked, (batch,))


def test_few_sequences_make_as_many_microbatches() -> None:
    asked = replace(job("wlb"), microbatches=5)
    batch = Batch.from_lengths([30, 20, 10], mask=KINDS)
    assert len(plan_job(asked, (batch,)).plan.plans) == 3
    assert_lowers_alike(asked, (batch,))


def test_deferring_is_refused() -> None:
    steps = find_recipe("wlb").to_data()["steps"] | {"pack": {"wlb": {"defer": True}}}
    with pytest.raises(ConfigError, match=r"recipe\.pack\.defer"):
        plan_job(job(Recipe("w", steps)), batches(packs=True))


def test_the_wrong_number_of_batches_is_refused() -> None:
    with pytest.raises(ConfigError, match="batches"):
        plan_job(job("wlb"), batches())
    with pytest.raises(CapacityError, match=r"batches\[0\]"):
        plan_job(job("fcp"), (Batch.from_lengths([300], mask=KINDS),))


PRINTS = """
import json, sys
{before}
from hashlib import sha256
from tests.planner.iteration import test_jobs as t
found = {{}}
for recipe in ("fcp", "blend", "distca", "wlb"):
    asked = t.job(recipe)
    planned = t.plan_job(asked, t.batches(asked.packs), verify=False)
    found[recipe] = [sha256(planned.assignment).hexdigest(), t.lower_job(planned.assignment).id.hex()]
print(json.dumps(found))
"""


def printed(before: str, hash_seed: str) -> object:
    env = os.environ | {"PYTHONHASHSEED": hash_seed}
    code = PRINTS.format(before=before)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    return json.loads(done.stdout)


def test_assignments_are_the_same_without_numba_and_under_another_hash_seed() -> None:
    assert printed("", "0") == printed("sys.modules['numba'] = None", "77")

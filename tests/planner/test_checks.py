"""Checks between steps: a fault is found in its own step, and plans do not change."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

import apportion as ap
from apportion.ir.errors import CapacityError, VerifyError
from apportion.planner.pipeline import placing, scheduling
from apportion.planner.pipeline.checks import Checks, checked_steps
from apportion.planner.pipeline.placing import PlacedProblem
from apportion.planner.pipeline.watch import SILENT
from apportion.planner.place.lpt import Lpt
from apportion.planner.problem import Placement, PlacePass, Problem, ShardPass, Shards
from apportion.planner.recipe.recipes import find_recipe, passes_of, with_block
from apportion.planner.route.gateways import Node
from apportion.planner.route.routes import Routes, Site
from apportion.planner.schedule.rounds import Matchings, Schedule
from apportion.planner.shard.blocks import Blocks
from apportion.planner.tasks.tasks import Edges, Tasks

STEPS = {"shard": {"blocks": {"block": 64}}, "place": {"lpt": {}}, "route": {"node": {}}}
RECIPE = ap.Recipe("mine", STEPS | {"schedule": {"matchings": {"coalesce": 1}}})


def problem() -> Problem:
    policy = ap.Policy(RECIPE, token_cap=1000)
    return Problem(ap.Batch.from_lengths([900, 70, 300]), ap.Cluster(2, 2), ap.Model(4, 2, 8), policy)


def placed(**passes: object) -> PlacedProblem:
    with checked_steps():
        return placing.place(problem(), replace(passes_of(RECIPE), **passes), SILENT)


@dataclass(frozen=True)
class LosingToken(ShardPass):
    """Loses the last token."""

    def __call__(self, problem: Problem) -> Shards:
        made = Blocks(64)(problem)
        return replace(made, starts=made.starts - (made.starts == made.starts[-1]))


@dataclass(frozen=True)
class UnknownRank(PlacePass):
    """Assigns a block to a rank that does not exist."""

    def __call__(self, problem: Problem, shards: Shards) -> Placement:
        made = Lpt()(problem, shards)
        return replace(made, home=np.where(np.arange(len(made.home)) == 3, problem.ranks, made.home))


@dataclass(frozen=True)
class ForgettingWork(PlacePass):
    """Loses the work of a block."""

    def __call__(self, problem: Problem, shards: Shards) -> Placement:
        made = Lpt()(problem, shards)
        return replace(made, weight=made.weight - (np.arange(len(made.home)) == 2))


class RelayingUnreceived(Node):
    """Relays tiles from ranks that never receive them."""

    def __call__(self, edges: Edges, site: Site) -> Routes:
        made = super().__call__(edges, site)
        relays = made.edges.parent >= 0
        assert relays.any()
        return replace(made, edges=replace(made.edges, src=np.where(relays, made.edges.home, made.edges.src)))


class RelayingTooEarly(Matchings):
    """Relays tiles before they arrive."""

    def __call__(self, routed: Routes, ranks: int) -> Schedule:
        made = super().__call__(routed, ranks)
        return replace(made, round=np.zeros_like(made.round))


@pytest.mark.parametrize(
    ("passes", "fault"),
    [
        ({"shard": LosingToken()}, r"shard \(LosingToken\(\)\): starts, from 0 to 1270 is wrong"),
        ({"place": UnknownRank()}, r"place \(UnknownRank\(\)\): home is wrong in 1 rows, first row 3"),
        ({"place": ForgettingWork()}, r"place \(ForgettingWork\(\)\): weight, total of all blocks is wrong"),
    ],
)
def test_a_fault_is_found_in_the_step_that_made_it(passes: dict, fault: str) -> None:
    with pytest.raises(VerifyError, match=fault):
        placed(**passes)


@pytest.mark.parametrize(
    ("passes", "fault"),
    [
        (
            {"route": RelayingUnreceived()},
            r"route \(RelayingUnreceived\(.*: parent, to where its children begin",
        ),
        ({"schedule": RelayingTooEarly(1)}, r"schedule \(RelayingTooEarly\(.*: round, after its parent's"),
    ],
)
def test_a_fault_of_a_schedule_is_found(passes: dict, fault: str) -> None:
    result = placed(**passes)
    with checked_steps(), pytest.raises(VerifyError, match=fault):
        scheduling.schedule(result)


def test_faults_of_tasks_and_stages_are_found() -> None:
    result = placed()
    low = scheduling.schedule(result)["default", "forward"]
    checks, bands = Checks(result.passes), result.problem.bands["default"]
    star = replace(low.tasks, edge=np.full(len(low.tasks), -1), query_edge=np.full(len(low.tasks), -1))
    none = low.edges.take(np.zeros(0, np.int64))
    with checked_steps():
        checks.lowering(low)
        checks.tasks(bands, low.rows.starts, star, none, 1)
        with pytest.raises(VerifyError, match="stage, after its tiles' is wrong"):
            checks.lowering(replace(low, stage=np.zeros_like(low.stage)))
        with pytest.raises(VerifyError, match="tasks, total pairs is wrong"):
            checks.tasks(bands, low.rows.starts, Tasks(*[column[1:] for column in star.columns]), none, 1)


def test_checks_do_not_change_plans() -> None:
    case = problem()
    whole = [case.batch, case.cluster, case.model]
    with checked_steps():
        checked = ap.plan(*whole, policy=case.policy)
    assert checked.id == ap.plan(*whole, policy=case.policy).id


@pytest.mark.parametrize("block", [1, 4])
def test_too_many_tasks_are_refused_before_they_are_made(block: int) -> None:
    """Two million tokens in small blocks: at least 10^11 tasks, which are counted without being made."""
    recipe = with_block(find_recipe("fcp"), block)
    with pytest.raises(CapacityError, match=r"\d{11,} tasks.*use larger blocks"):
        ap.plan(ap.Batch.from_lengths([1 << 21]), ap.Cluster(1, 64), ap.Model(2, 1, 16), recipe)

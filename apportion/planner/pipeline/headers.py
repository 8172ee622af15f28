"""The layouts of a plan and its header."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from apportion.ir.plan.tables import Header, Layout
from apportion.ir.version import __version__
from apportion.planner.inner.groups import HeadSets
from apportion.planner.lower.inputs import Lowered, leading
from apportion.planner.pipeline.placing import PlacedProblem
from apportion.planner.problem import Problem
from apportion.planner.tasks.rows import Rows


def build_layouts(problem: Problem, placed: PlacedProblem, lowered: Sequence[Lowered]) -> dict[str, Layout]:
    """Builds the layouts: home rows and, if these are the loader's, also the attention layout, unless its rows are on
    several ranks that split the heads."""
    if len(lowered) > 1:
        rows = Rows(placed.placement.starts, placed.placement.home, problem.ranks)
        return {"attention": rows.layout("attention", problem.batch)}
    low, reshuffle = leading(lowered[0]), placed.passes.reshuffle
    layouts = {}
    if not (reshuffle and low.groups.split):
        rows = low.rows if reshuffle else low.home
        layouts["attention"] = rows.layout("attention", problem.batch)
    if reshuffle:
        layouts["loader"] = low.home.layout("loader", problem.batch)
    return layouts


def home_layout(layouts: Mapping[str, Layout]) -> str:
    return "loader" if "loader" in layouts else "attention"


def build_header(problem: Problem, layouts: Mapping[str, Layout], sets: HeadSets) -> Header:
    model = problem.model
    return Header(
        ranks=problem.ranks,
        kinds=problem.batch.kinds,
        recipe=problem.policy.recipe.name,
        seed=problem.policy.seed,
        home_layout=home_layout(layouts),
        layouts=tuple(layouts),
        head_sets=sets.sets,
        q_heads=model.q_heads,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        v_head_dim=model.value_dim,
        dtype=model.dtype,
        engines={"apportion": __version__},
        diagonals={kind: problem.batch.diagonals(kind) for kind in problem.batch.kinds},
        sent_gradients=model.sent_gradients,
        recurrent=model.recurrent,
        latent=model.latent,
    )

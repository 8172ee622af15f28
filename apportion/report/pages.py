"""Whole pages: a report of plans, a comparison of recipes, a diff of two plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from apportion.ir.bytes.codec import Plan
from apportion.ir.request.hardware import Hardware
from apportion.planner.simulate import Simulation, simulate
from apportion.report.content import plan_data
from apportion.report.diff import PlanDiff
from apportion.web import REPORT


def report_html(plans: Sequence[tuple[str, Plan]], hardware: Hardware | None = None) -> str:
    """The page of several plans, given as (name, plan) and shown one at a time. Raises VerifyError for a plan that
    cannot run."""
    records = [plan_data(simulate(plan, hardware), name) for name, plan in plans]
    first = plans[0][1]
    title = f"{first.header.recipe} on {first.header.ranks} ranks"
    return REPORT.assemble(title, {"page": "report", "title": title, "plans": records})


def compare_html(record: Mapping[str, Any], simulations: Mapping[str, Simulation]) -> str:
    """The page of a comparison. record: as printed by `apportion compare --json`; simulations: recipe -> simulation of
    its plan for the batch of median time, if it has one."""
    records = [plan_data(simulation, name, masks=False) for name, simulation in simulations.items()]
    cluster = record["cluster"]
    title = f"{len(record['rows'])} recipes on {cluster['nodes'] * cluster['ranks_per_node']} ranks"
    return REPORT.assemble(title, {"page": "compare", "title": title, "plans": records, "comparison": record})


def diff_html(diff: PlanDiff, plans: Sequence[tuple[str, Plan]], hardware: Hardware | None = None) -> str:
    """The page of two plans and their differences."""
    records = [plan_data(simulate(plan, hardware), name) for name, plan in plans]
    title = " and ".join(name for name, _ in plans)
    return REPORT.assemble(title, {"page": "diff", "title": title, "plans": records, "diff": diff.to_data()})

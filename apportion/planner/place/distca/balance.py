"""The passes of DistCA's greedy migration over one attention kind: tolerance halved, cuts refined, until loads agree on
both sides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from apportion.ir.arrays import Ints
from apportion.planner.place.distca.board import Rules, Servers

#: (rules, deficit servers in order) -> moves made (-1: too little room), shares that caps forbade, servers below the
#: threshold
Run = Callable[[Rules, Ints], tuple[int, int, int]]


@dataclass(frozen=True)
class Limits:
    """What the migration keeps to: parameters of `Distca`; granularity in rows."""

    tolerance: float
    two_sided: bool
    granularity: int
    rules: Rules


@dataclass(frozen=True)
class Ended:
    """What it took, and why it stopped. forbidden: shares that caps kept back in the last pass; below: servers left
    short there as E fell below the threshold."""

    passes: int
    moves: int
    forbidden: int
    below: int


def fill(servers: Servers, limits: Limits, run: Run, refine: Callable[[], bool]) -> Ended | None:
    """Passes over the deficit servers: the paper's one, then, two-sided, with half the tolerance each and only from
    servers that still have more than the tolerance allows; finer cuts where nothing moves. None where there was too
    little room."""
    tolerance, excess, passes, moves = limits.tolerance, 0.0, 0, 0
    least = limits.tolerance / (2 * len(servers.load))
    while True:
        rules = limits.rules._replace(tolerance=tolerance, excess=excess)
        made, forbidden, below = run(rules, _by_deficit(servers, tolerance))
        if made < 0:
            return None
        passes, moves, excess = passes + 1, moves + made, limits.tolerance
        if not limits.two_sided or imbalance(servers) <= limits.tolerance or below:
            break
        if made or not _short(servers, tolerance):
            tolerance /= 2
            if tolerance >= least:
                continue
            tolerance = limits.tolerance
        if forbidden or not refine():
            break
    return Ended(passes, moves, forbidden, below)


def _by_deficit(servers: Servers, tolerance: float) -> Ints:
    deficit = servers.target - servers.load
    return np.argsort(-deficit, kind="stable")[: int((deficit > tolerance * servers.target).sum())]


def imbalance(servers: Servers) -> float:
    """The busiest server's load over its target, less 1."""
    busy = servers.target > 0
    return float((servers.load[busy] / servers.target[busy]).max(initial=1.0)) - 1.0


def _short(servers: Servers, tolerance: float) -> bool:
    return bool((servers.load < (1 - tolerance) * servers.target).any())

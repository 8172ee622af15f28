"""Move surplus rows to the ranks that lack them, cheaply (the remapping of Zeppelin, section 3).

Two-level costs have a closed form. Rows that can stay in their node do: never dearer, for the sum or for the worst
rank. For the sum it does not matter which rows these are. For the worst rank, where a node has more rows to give
than to take, its receivers are served from inside and its senders share out that cheap part by water-filling: what is
left to send dearly levels the ranks that pay most. Formula (2) of the paper prices senders only ("senders"); "minmax"
does the same for receivers in nodes that have more to take, and so is best for both sides at once.

Any other cost is a linear program on HiGHS. Its fractions are rounded to the integers below or above by a transport
problem of its own; that is totally unimodular, so its vertices are integers and all sums of rows stay exact.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from apportion._core import transport as core
from apportion.ir.arrays import Floats, Ints
from apportion.ir.errors import MissingDependencyError
from apportion.planner.solvers.contracts import Transport, TransportProblem, TwoLevelCost
from apportion.planner.solvers.status import Budget, Limit, Status, Termination

# HiGHS meets its rows within 1e-7 of the numbers it sees; the program is scaled so that these are about 1
_TOLERANCE = 1e-6


def solve(problem: TransportProblem, budget: Budget) -> Transport:
    """Rows for each pair of ranks.

    OPTIMAL for two-level costs and for the sum. For a worst rank on a matrix: FEASIBLE with the bound of the linear
    program, which rounding exceeds by less than the cost of one row on each link that it splits; FEASIBLE(engine)
    with a plain bound where HiGHS has no answer. Raises MissingDependencyError for a matrix without scipy.
    """
    if isinstance(problem.cost, TwoLevelCost):
        surplus, cost, objective = problem.surplus.astype(np.int64), problem.cost, problem.objective
        level = (objective != "sum", objective == "minmax")
        flows = core.two_level(surplus, cost.ranks_per_node, float(cost.intra), float(cost.inter), *level)
        value = flow_value(problem, *flows)
        return Transport(*flows, Termination(Status.OPTIMAL, value, value))
    return _by_program(problem)


def flow_value(problem: TransportProblem, src: Ints, dst: Ints, rows: Ints) -> float:
    """What the flows cost: the sum, or the most that one rank pays on a side that counts."""
    price = problem.prices(src, dst) * rows
    if problem.objective == "sum":
        return float(price.sum())
    ranks, sides = len(problem.surplus), (src, dst) if problem.objective == "minmax" else (src,)
    return max(float(np.bincount(side, price, ranks).max(initial=0.0)) for side in sides)


# ---- any cost


def _by_program(problem: TransportProblem) -> Transport:
    order = _canonical(problem)
    surplus, cost = problem.surplus[order], problem.matrix[np.ix_(order, order)]
    senders, receivers = np.flatnonzero(surplus > 0), np.flatnonzero(surplus < 0)
    if not len(senders):
        none = np.zeros(0, np.int64)
        return Transport(none, none, none, Termination(Status.OPTIMAL, 0.0, 0.0))
    give, take, prices = surplus[senders], -surplus[receivers], cost[np.ix_(senders, receivers)]
    rows, bound, limit = _program(give, take, prices, problem.objective)
    i, j = np.nonzero(rows)
    src, dst = order[senders[i]], order[receivers[j]]
    by = np.lexsort((dst, src))
    flows = (src[by], dst[by], rows[i, j][by])
    return Transport(*flows, _termination(flow_value(problem, *flows), bound, limit))


def _termination(value: float, bound: float, limit: Limit | None) -> Termination:
    if limit is None and value <= bound * (1 + _TOLERANCE):
        return Termination(Status.OPTIMAL, min(value, bound), value)
    return Termination(Status.FEASIBLE, min(value, bound), value, limit)


def _canonical(problem: TransportProblem) -> Ints:
    """An order of the ranks that does not depend on how they are numbered, so that neither does the answer."""
    matrix = problem.matrix
    return np.lexsort((np.sort(matrix, 0).T @ _weights(len(matrix)), _digest(matrix), problem.surplus))


def _digest(matrix: Floats) -> Floats:
    return np.sort(matrix, 1) @ _weights(len(matrix))


def _weights(count: int) -> Floats:
    return 1 + np.arange(count) / max(1, count)


def _program(give: Ints, take: Ints, prices: Floats, objective: str) -> tuple[Ints, float, Limit | None]:
    """(rows [senders, receivers], bound, limit) of the linear program, rounded."""
    scale = float(max(give.max(), take.max())), float(prices.max()) or 1.0
    shares = _relaxed(give / scale[0], take / scale[0], prices / scale[1], objective)
    rows = None if shares is None else _rounded(shares[0] * scale[0], give, take, prices / scale[1])
    if shares is None or rows is None:
        return _plain(give, take), _plain_bound(give, take, prices, objective), Limit.ENGINE
    return rows, shares[1] * scale[0] * scale[1], None


def _relaxed(give: Floats, take: Floats, prices: Floats, objective: str) -> tuple[Floats, float] | None:
    """Fractional flows and their value, or None where HiGHS has no answer."""
    sums = _sums(*prices.shape)
    if objective == "sum":
        done = _linprog(prices.ravel(), sums, np.concatenate([give, take]), (0, None))
        return None if done is None else (done[0].reshape(prices.shape), done[1])
    worst = np.append(np.zeros(prices.size), 1.0)
    priced = sums if objective == "minmax" else sums[: len(give)]
    pays = _scipy().hstack([priced.multiply(prices.ravel()), -np.ones((priced.shape[0], 1))], format="csr")
    wide = _scipy().hstack([sums, np.zeros((sums.shape[0], 1))], format="csr")
    done = _linprog(worst, wide, np.concatenate([give, take]), (0, None), pays)
    return None if done is None else (done[0][:-1].reshape(prices.shape), done[1])


def _rounded(flows: Floats, give: Ints, take: Ints, prices: Floats) -> Ints | None:
    """Each flow to the integer below or above, with exact sums; None where HiGHS has no answer."""
    low = np.floor(flows + _TOLERANCE)
    high = np.maximum(np.ceil(flows - _TOLERANCE), low)
    rest = np.concatenate([give - low.sum(1), take - low.sum(0)])
    bounds = np.stack([np.zeros(flows.size), (high - low).ravel()], 1)
    done = _linprog(prices.ravel(), _sums(*flows.shape), rest, bounds)
    return None if done is None else (low + np.rint(done[0]).reshape(flows.shape)).astype(np.int64)


def _sums(senders: int, receivers: int) -> Any:
    """The sparse rows that add up what each sender sends, then what each receiver gets."""
    sparse = _scipy()
    sends = sparse.kron(sparse.eye_array(senders), np.ones((1, receivers)))
    gets = sparse.kron(np.ones((1, senders)), sparse.eye_array(receivers))
    return sparse.vstack([sends, gets], format="csr")


def _linprog(
    objective: Floats, sums: Any, wanted: Floats, bounds: Any, pays: Any = None
) -> tuple[Floats, float] | None:
    from scipy.optimize import linprog

    most = None if pays is None else np.zeros(pays.shape[0])
    done = linprog(objective, pays, most, sums, wanted, bounds, method="highs-ds")
    return None if done.x is None or done.status else (done.x, float(done.fun))


def _scipy() -> Any:
    try:
        from scipy import sparse
    except ImportError as error:
        raise MissingDependencyError(
            "scipy", "solvers", "solver flow, for costs of more than two levels,"
        ) from error
    return sparse


def _plain(give: Ints, take: Ints) -> Ints:
    """Some flows with the right sums."""
    src, dst, rows = core.north_west(np.concatenate([give, -take]))
    plain = np.zeros((len(give), len(take)), np.int64)
    plain[src, dst - len(give)] = rows
    return plain


def _plain_bound(give: Ints, take: Ints, prices: Floats, objective: str) -> float:
    """Every row at its cheapest."""
    sends, gets = give * prices.min(1), take * prices.min(0)
    if objective == "sum":
        return float(max(sends.sum(), gets.sum()))
    return float(sends.max() if objective == "senders" else max(sends.max(), gets.max()))

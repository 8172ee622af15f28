"""Move surplus rows to the ranks that lack them, cheaply (the remapping of Zeppelin, section 3).

Two-level costs have a closed form. Rows that can stay in their node do: never dearer, for the sum or for the worst
rank. For the sum it does not matter which rows these are. For the worst rank, where a node has more rows to give
than to take, its receivers are served from inside and its senders share out that cheap part by water-filling: what is
left to send dearly levels the ranks that pay most. (Zeppelin prices senders only; here both sides count.)

Any other cost is a linear program on HiGHS. Its fractions are rounded to the integers below or above by a transport
problem of its own; that is totally unimodular, so its vertices are integers and all sums of rows stay exact.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from apportion.ir.errors import MissingDependencyError
from apportion.planner.solvers.contracts import Transport, TransportProblem, TwoLevelCost
from apportion.planner.solvers.status import Budget, Clock, Limit, Status, Termination

Ints = NDArray[np.integer[Any]]
Floats = NDArray[np.float64]

# HiGHS meets its rows within 1e-7 of the numbers it sees; the program is scaled so that these are about 1
_TOLERANCE = 1e-6


def solve(problem: TransportProblem, budget: Budget) -> Transport:
    """Rows for each pair of ranks.

    OPTIMAL for two-level costs and for the sum. For "minmax" on a matrix: FEASIBLE with the bound of the linear
    program, which rounding exceeds by less than the cost of one row on each link that it splits; FEASIBLE(time) with
    a plain bound where the deadline came first. Raises MissingDependencyError for a matrix without scipy.
    """
    if isinstance(problem.cost, TwoLevelCost):
        flows = _two_level(problem.surplus, problem.cost, problem.objective == "minmax")
        value = flow_value(problem, *flows)
        return Transport(*flows, Termination(Status.OPTIMAL, value, value))
    return _by_program(problem, budget.start())


def flow_value(problem: TransportProblem, src: Ints, dst: Ints, rows: Ints) -> float:
    """What the flows cost: the sum, or the most that one rank pays for sending or for receiving."""
    price = problem.matrix[src, dst] * rows
    if problem.objective == "sum":
        return float(price.sum())
    ranks = len(problem.surplus)
    sides = np.concatenate([np.bincount(src, price, ranks), np.bincount(dst, price, ranks)])
    return float(sides.max(initial=0.0))


# ---- two levels


def _two_level(surplus: Ints, cost: TwoLevelCost, level: bool) -> tuple[Ints, Ints, Ints]:
    near = np.zeros(len(surplus), np.int64)  # of each rank's rows, those that stay in the node
    for first in range(0, len(surplus), cost.ranks_per_node):
        node = slice(first, first + cost.ranks_per_node)
        give, take = np.maximum(surplus[node], 0), np.maximum(-surplus[node], 0)
        shared = int(min(give.sum(), take.sum()))
        share = (lambda rows, total: _water_fill(rows, total, cost)) if level else _first_come
        near[node] = share(give, shared) - share(take, shared)
    inside = [
        _north_west(near[at : at + cost.ranks_per_node], at)
        for at in range(0, len(surplus), cost.ranks_per_node)
    ]
    return _ordered([*inside, _north_west(surplus - near, 0)])


def _first_come(rows: Ints, total: int) -> Ints:
    """The first `total` of the rows, rank by rank."""
    taken: Ints = np.diff(np.minimum(np.cumsum(np.append(0, rows)), total))
    return taken


def _water_fill(rows: Ints, total: int, cost: TwoLevelCost) -> Ints:
    """`total` of the rows at the near price so that the largest price is least: int64 [ranks].

    A rank pays inter * rows - (inter - intra) * near, so the total goes to those that pay most, down to one level.
    """
    saving = cost.inter - cost.intra
    if saving <= 0 or total >= int(rows.sum()):
        return _first_come(rows, total)
    prices = (cost.inter * rows).astype(np.float64)
    falling = np.sort(prices)[::-1]
    # above a level at the i-th price, the i dearest ranks have this much to lose
    above = np.cumsum(falling) - np.arange(1, len(falling) + 1) * falling
    count = int(np.searchsorted(above, total * saving, "right"))
    level = (falling[:count].sum() - total * saving) / count
    near = np.clip(np.floor((prices - level) / saving), 0, rows).astype(np.int64)
    return _settle(near, rows, prices, saving, total)


def _settle(near: Ints, rows: Ints, prices: Floats, saving: float, total: int) -> Ints:
    """Rows that rounding lost (or won) one by one, to the rank that pays most (from the one that pays least)."""
    while (missing := total - int(near.sum())) != 0:
        now = prices - saving * near
        if missing > 0:
            near[int(np.argmax(np.where(near < rows, now, -np.inf)))] += 1
        else:
            near[int(np.argmin(np.where(near > 0, now, np.inf)))] -= 1
    return near


def _north_west(surplus: Ints, first: int) -> tuple[Ints, Ints, Ints]:
    """Senders to receivers in the order of ranks, as along the north-west rule; ranks count from `first`."""
    senders, receivers = np.flatnonzero(surplus > 0), np.flatnonzero(surplus < 0)
    sent, received = np.cumsum(surplus[senders]), np.cumsum(-surplus[receivers])
    stops = np.unique(np.concatenate([sent, received]))
    rows = np.diff(np.append(0, stops))
    src, dst = senders[np.searchsorted(sent, stops)], receivers[np.searchsorted(received, stops)]
    return src + first, dst + first, rows


def _ordered(parts: list[tuple[Ints, Ints, Ints]]) -> tuple[Ints, Ints, Ints]:
    src, dst, rows = (np.concatenate([part[i] for part in parts]).astype(np.int64) for i in range(3))
    order = np.lexsort((dst, src))
    return src[order], dst[order], rows[order]


# ---- any cost


def _by_program(problem: TransportProblem, clock: Clock) -> Transport:
    order = _canonical(problem)
    surplus, cost = problem.surplus[order], problem.matrix[np.ix_(order, order)]
    senders, receivers = np.flatnonzero(surplus > 0), np.flatnonzero(surplus < 0)
    if not len(senders):
        none = np.zeros(0, np.int64)
        return Transport(none, none, none, Termination(Status.OPTIMAL, 0.0, 0.0))
    give, take, prices = surplus[senders], -surplus[receivers], cost[np.ix_(senders, receivers)]
    rows, bound, limit = _program(give, take, prices, problem.objective == "minmax", clock)
    i, j = np.nonzero(rows)
    flows = _ordered([(order[senders[i]], order[receivers[j]], rows[i, j])])
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


def _program(
    give: Ints, take: Ints, prices: Floats, level: bool, clock: Clock
) -> tuple[Ints, float, Limit | None]:
    """(rows [senders, receivers], bound, limit) of the linear program, rounded."""
    scale = float(max(give.max(), take.max())), float(prices.max()) or 1.0
    shares = _relaxed(give / scale[0], take / scale[0], prices / scale[1], level, clock)
    rows = None if shares is None else _rounded(shares[0] * scale[0], give, take, prices / scale[1], clock)
    if shares is None or rows is None:
        return _plain(give, take), _plain_bound(give, take, prices, level), Limit.TIME
    return rows, shares[1] * scale[0] * scale[1], None


def _relaxed(
    give: Floats, take: Floats, prices: Floats, level: bool, clock: Clock
) -> tuple[Floats, float] | None:
    """Fractional flows and their value, or None where time ran out."""
    sums = _sums(*prices.shape)
    if not level:
        done = _linprog(prices.ravel(), sums, np.concatenate([give, take]), (0, None), clock)
        return None if done is None else (done[0].reshape(prices.shape), done[1])
    objective = np.append(np.zeros(prices.size), 1.0)
    pays = _scipy().hstack([sums.multiply(prices.ravel()), -np.ones((sums.shape[0], 1))], format="csr")
    wide = _scipy().hstack([sums, np.zeros((sums.shape[0], 1))], format="csr")
    done = _linprog(objective, wide, np.concatenate([give, take]), (0, None), clock, pays)
    return None if done is None else (done[0][:-1].reshape(prices.shape), done[1])


def _rounded(flows: Floats, give: Ints, take: Ints, prices: Floats, clock: Clock) -> Ints | None:
    """Each flow to the integer below or above, with exact sums; None where time ran out."""
    low = np.floor(flows + _TOLERANCE)
    high = np.maximum(np.ceil(flows - _TOLERANCE), low)
    rest = np.concatenate([give - low.sum(1), take - low.sum(0)])
    bounds = np.stack([np.zeros(flows.size), (high - low).ravel()], 1)
    done = _linprog(prices.ravel(), _sums(*flows.shape), rest, bounds, clock)
    return None if done is None else (low + np.rint(done[0]).reshape(flows.shape)).astype(np.int64)


def _sums(senders: int, receivers: int) -> Any:
    """The sparse rows that add up what each sender sends, then what each receiver gets."""
    sparse = _scipy()
    sends = sparse.kron(sparse.eye_array(senders), np.ones((1, receivers)))
    gets = sparse.kron(np.ones((1, senders)), sparse.eye_array(receivers))
    return sparse.vstack([sends, gets], format="csr")


def _linprog(
    objective: Floats, sums: Any, wanted: Floats, bounds: Any, clock: Clock, pays: Any = None
) -> tuple[Floats, float] | None:
    from scipy.optimize import linprog

    if clock.expired:
        return None
    options = {"time_limit": clock.left_s} if np.isfinite(clock.left_s) else {}
    most = None if pays is None else np.zeros(pays.shape[0])
    done = linprog(objective, pays, most, sums, wanted, bounds, method="highs-ds", options=options)
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
    src, dst, rows = _north_west(np.concatenate([give, -take]), 0)
    plain = np.zeros((len(give), len(take)), np.int64)
    plain[src, dst - len(give)] = rows
    return plain


def _plain_bound(give: Ints, take: Ints, prices: Floats, level: bool) -> float:
    """Every row at its cheapest."""
    sends, gets = give * prices.min(1), take * prices.min(0)
    return float(max(sends.max(), gets.max()) if level else max(sends.sum(), gets.sum()))

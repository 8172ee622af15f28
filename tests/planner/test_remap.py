"""Even tokens for linear layers: rows kept, sent and received, when it pays off, and detection of wrong moves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import apportion as ap
from apportion import ConfigError, Model, Plan, VerifyError, verify
from apportion.backends import numpy as executor
from apportion.ir.bytes import codec
from apportion.ir.plan.tables import Layout, Move, Table
from apportion.ir.request.policy import Step
from apportion.planner.problem import Problem
from apportion.planner.recipe.registry import build
from apportion.planner.remap import LINEAR, Flow, Remapping, even_parameters, even_tokens, row_costs
from apportion.planner.tasks.rows import Rows
from tests.support.moves import remap
from tests.support.parse import parse

MODEL = ap.Model(q_heads=2, kv_heads=1, head_dim=4, dtype="fp64", hidden=8, ffn=16, layers=1)
RECIPE = ap.Recipe("test", {"shard": {"sequences": {}}})
ALWAYS = Flow(when="always")


def laid_out(
    load: list[int], per_node: int = 2, model: Model = MODEL, **cluster: float
) -> tuple[Problem, Layout]:
    """A batch whose ranks hold one sequence of the given numbers of tokens each, and its layout."""
    batch = ap.Batch.from_lengths(load)
    problem = Problem(batch, ap.Cluster(len(load) // per_node, per_node, **cluster), model, ap.Policy(RECIPE))
    return problem, Rows(batch.starts, np.arange(len(load)), len(load)).layout("attention", batch)


def remapped(load: list[int], flow: Flow = ALWAYS, per_node: int = 2, **extra: Any) -> Remapping:
    return flow(*laid_out(load, per_node, **extra))


def letters(layout: Layout) -> list[str]:
    """The token of every row of each rank: token 0 is a."""
    ranks = range(layout.spans.ranks)
    return ["".join(chr(ord("a") + token) for token in layout.tokens(rank).tolist()) for rank in ranks]


def planned(lengths: list[int], nodes: int, ranks: int, flow: dict | None = None, **steps: Any) -> Plan:
    recipe = {"shard": {"sequences": {}}, "place": {"zeppelin": {"cap": "paper"}}, "schedule": {"queues": {}}}
    recipe["remap"] = {"flow": {"when": "always", **(flow or {})}}
    batch, cluster = ap.Batch.from_lengths(lengths), ap.Cluster(nodes, ranks)
    return ap.plan(batch, cluster, MODEL, ap.Recipe("test", {**recipe, **steps}))


# --- rows


def test_the_last_rows_of_full_ranks_move_to_emptier_ranks() -> None:
    problem, layout = laid_out([8, 2, 3, 3])
    made = ALWAYS(problem, layout)
    assert letters(layout) == ["abcdefgh", "ij", "klm", "nop"]
    assert letters(made.layouts[LINEAR]) == ["abcd", "ijef", "klmg", "noph"]
    (move,) = made.moves
    assert (move.source, move.target) == ("attention", LINEAR)
    rows = list(zip(*(move.table.rank(0)[name].tolist() for name in move.table.columns), strict=True))
    assert rows == [(1, 0, 0, 4), (1, 1, 4, 2), (1, 2, 6, 1), (1, 3, 7, 1), (0, 0, 0, 4)]


def test_remainder_tokens_stay_on_the_fullest_ranks() -> None:
    assert even_tokens(np.array([7, 0, 4])).tolist() == [4, 3, 4]
    assert even_tokens(np.array([5, 0, 0, 1])).tolist() == [2, 1, 1, 2]


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=20),
    nodes=st.integers(1, 3),
    ranks=st.integers(1, 3),
    objective=st.sampled_from(["paper", "two_sided", "sum"]),
    data=st.data(),
)
def test_any_layout_becomes_even(lengths: Any, nodes: int, ranks: int, objective: str, data: Any) -> None:
    count = nodes * ranks
    homes = st.lists(st.integers(0, count - 1), min_size=len(lengths), max_size=len(lengths))
    batch = ap.Batch.from_lengths(lengths)
    problem = Problem(batch, ap.Cluster(nodes, ranks), MODEL, ap.Policy(RECIPE))
    layout = Rows(batch.starts, np.array(data.draw(homes)), count).layout("attention", batch)
    made = Flow(objective, "always")(problem, layout)
    load = layout.rows_per_rank
    assert made.entry["rows"] == int(np.maximum(load - even_tokens(load), 0).sum())
    if not made.entry["used"]:
        assert load.max() - load.min() <= 1
        return
    even = made.layouts[LINEAR].rows_per_rank
    assert even.max() - even.min() <= 1
    (move,) = made.moves
    sent = move.table["rows"][(move.table["send"] == 1) & (move.table["peer"] != move.table.rank_of_row())]
    assert sent.sum() == made.entry["rows"]


@pytest.mark.parametrize("objective", ["paper", "two_sided", "sum"])
@pytest.mark.parametrize(("nodes", "ranks"), [(1, 3), (2, 2), (2, 4), (3, 2)])
def test_plans_carry_moves_that_verify_and_run(objective: str, nodes: int, ranks: int) -> None:
    plan = planned([61, 30, 9, 7, 1], nodes, ranks, {"objective": objective})
    assert plan.report["remap"]["used"]
    assert ap.Plan.decode(plan.encode()) == plan
    assert parse(plan.text()) == plan
    x = np.random.default_rng(0).standard_normal((plan.request.batch.tokens, 3))
    home, even = plan.layout("attention"), plan.layout(LINEAR)
    moved = remap(plan, 0, executor.scatter(home, x))
    for ours, theirs in zip(moved, executor.scatter(even, x), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    back = remap(plan, 0, moved, inverse=True)
    np.testing.assert_array_equal(executor.gather(home, back), x)


def test_a_remap_works_under_groups_that_split_heads() -> None:
    inner = {"inner": {"ulysses": {"degree": 2}}}
    plan = planned([61, 30, 9, 7, 1], 2, 4, **inner)
    assert sorted(plan.layout(LINEAR).rows_per_rank.tolist()) == [13] * 4 + [14] * 4


def test_reshuffled_rows_need_no_remap() -> None:
    plan = planned([61, 30, 9, 7, 1], 2, 4, reshuffle=True)
    assert plan.report["remap"]["rows"] == 0
    assert not plan.report["remap"]["used"]
    assert plan.moves == ()


# --- cost


def test_formula_2_prices_senders_and_two_sided_prices_receivers_too() -> None:
    """Rank 0 has 10 rows for its node, which lacks 20; if one receiver gets all, the other needs 10 from the other
    node."""
    rows, load = {}, [30, 10, 10, 25, 25, 20]
    for objective in ("paper", "two_sided"):
        (move,) = remapped(load, Flow(objective, "always"), per_node=3).moves
        rows[objective] = [
            {peer: n for send, peer, _, n in move.table.rank(rank).values.T.tolist() if send and peer != rank}
            for rank in (0, 3, 4)
        ]
    assert rows["paper"] == [{1: 10}, {2: 5}, {2: 5}]
    assert rows["two_sided"] == [{1: 5, 2: 5}, {1: 5}, {2: 5}]
    many = [1000 * tokens for tokens in load]
    times = [remapped(many, Flow(o, "always"), per_node=3).entry["moves_us"] for o in ("paper", "two_sided")]
    assert times[0] > times[1]


def test_a_remap_is_used_if_linear_layers_gain_more_than_moves_cost() -> None:
    large = ap.Model(hidden=4096, ffn=14336)
    load = [9000, 1000, 1000, 1000]
    assert remapped(load, Flow(), model=large).entry["used"]
    slow = remapped(load, Flow(), model=large, intra_gbs=0.5, inter_gbs=0.5)
    assert not slow.entry["used"]
    assert slow.layouts == {}
    assert slow.moves == ()
    assert remapped(load, Flow(when="always"), model=large, intra_gbs=0.5, inter_gbs=0.5).entry["used"]
    assert not remapped([1000] * 4, ALWAYS, model=large).entry["used"]


def test_the_report_has_the_numbers_of_the_decision() -> None:
    large = ap.Model(hidden=4096, ffn=14336)
    problem, layout = laid_out([9000, 1000, 1000, 1000], model=large)
    entry = Flow()(problem, layout).entry
    assert entry["rows"] == 6000
    assert entry["most_tokens"] == {"attention": 9000, LINEAR: 3000}
    share = even_parameters(large) / problem.cost.linear_parameters
    assert share == pytest.approx(1 - 4096 * (32 * 128 + 2 * 8 * 128) / problem.cost.linear_parameters)
    assert entry["linear_us"]["attention"] == pytest.approx(3 * share * float(problem.cost.linear_us(9000)))
    # 2,000 rows of 8 KB inside the node at 450 GB/s and 4,000 to the other at 50 GB/s, there and back, in both phases
    assert entry["moves_us"] == pytest.approx(4 * (8192 * (2000 / 450e3 + 4000 / 50e3) + 10))


def test_local_rows_are_copied_during_transfers() -> None:
    large = ap.Model(hidden=4096, ffn=14336)
    problem, layout = laid_out([100_001, 99_999], model=large)
    entry = Flow()(problem, layout).entry
    assert entry["moves_us"] == pytest.approx(4 * (float(problem.cost.rowop_us(2 * 8192 * 100_000)) + 5))
    assert not entry["used"]


def test_ranks_that_share_a_nic_pay_more() -> None:
    one, half = (row_costs(ap.Cluster(2, 8, nics_per_node=nics), 100).inter for nics in (8, 4))
    assert half == 2 * one


def test_wrong_parameters_are_refused() -> None:
    for wrong in ({"objective": "none"}, {"when": "never"}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            build(Step("remap", "flow", wrong))
    with pytest.raises(ConfigError, match="remap"):
        planned([8], 1, 2, remap={"flow": {"cost": 1}})


# --- verification


def with_move(plan: Plan, table: Table) -> Plan:
    return codec.seal(replace(plan, moves=(Move("attention", LINEAR, table),)))


@pytest.mark.parametrize("column", ["row", "rows", "peer", "send"])
def test_a_wrong_move_is_refused(column: str) -> None:
    message = "makes rows" if column == "row" else "sends and receives do not match"
    plan = planned([61, 30, 9, 7, 1], 2, 2)
    (move,) = plan.moves
    kept = np.flatnonzero((move.table["peer"] != move.table.rank_of_row()) & (move.table["send"] == 1))
    columns = {name: np.array(values) for name, values in move.table.columns.items()}
    one = kept[0]
    changes = {"peer": (columns["peer"][one] + 2) % 4, "send": 0}
    columns[column][one] = changes.get(column, columns[column][one] - 1)
    with pytest.raises(VerifyError, match=rf"\[layouts\].* move attention -> linear: .*{message}"):
        verify(with_move(plan, Table.of(move.table.ptr, columns)))


def test_a_move_that_omits_rows_is_refused() -> None:
    plan = planned([61, 30, 9, 7, 1], 2, 2)
    (move,) = plan.moves
    table, rank = move.table, move.table.rank_of_row()
    stays = ~((rank == 0) & (table["peer"] == 0))
    ptr = np.searchsorted(rank[stays], np.arange(5))
    fewer = Table.of(ptr, {name: column[stays] for name, column in table.columns.items()})
    with pytest.raises(VerifyError, match="move attention -> linear"):
        verify(with_move(plan, fewer))

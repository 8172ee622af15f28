"""Messages of rounds: which tiles travel together, and which need no copy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from apportion import Batch, Cluster, Model, Plan, Policy, Recipe
from apportion.ir.isa import ALL_TO_ALL, Op
from apportion.ir.plan.messages import Messages, find_messages
from apportion.ir.plan.tables import ProgramSet, Table
from apportion.ir.tensors import PHASES, Tensor
from apportion.planner import api
from tests.support.parse import parse
from tests.support.strategies import STRATEGIES, cluster, is_uncapped

ROOT = Path(__file__).parents[1]
MODEL = Model(4, 2, 8, dtype="fp32")


def plan_of(name: str, lengths: tuple[int, ...] = (40, 25, 3, 12), ranks: int = 4) -> Plan:
    batch, recipe = Batch.from_lengths(lengths), Recipe(name, STRATEGIES[name])
    cap = None if is_uncapped(recipe) else batch.tokens
    model = Model(8, 2, 8, dtype="fp32") if "upipe" in name else MODEL
    return api.plan(batch, cluster(ranks), model, policy=Policy(recipe, token_cap=cap))


@pytest.mark.parametrize(
    "name", ["fcp", "ring", "ulysses", "distca", "node", "zeppelin", "flexsp_reshuffled"]
)
def test_tiles_between_two_ranks_in_a_round_are_one_message(name: str) -> None:
    plan = plan_of(name)
    for phase in PHASES:
        programs = plan.programs["default", phase]
        found = find_messages(programs, plan.header)
        table, instructions = programs["transfers"], programs["instructions"]
        launches = np.flatnonzero(instructions["op"] == Op.LAUNCH)
        launch = np.repeat(launches, instructions["count"][launches])
        ends = list(zip(launch.tolist(), table["send"].tolist(), table["peer"].tolist(), strict=True))
        assert len(found) == len(set(ends))
        assert len({(of, end) for of, end in zip(found.of.tolist(), ends, strict=True)}) == len(found)
        rows = zip(found.instruction.tolist(), found.send.tolist(), found.peer.tolist(), strict=True)
        assert [(at, bool(send), peer) for at, send, peer in sorted(set(ends))] == list(rows)


def test_messages_of_one_rank_equal_its_part_of_all_messages() -> None:
    plan = plan_of("fcp")
    programs = plan.programs["default", "backward"]
    messages = find_messages(programs, plan.header)
    ptr = programs["instructions"].ptr
    for rank in range(4):
        is_own = (messages.instruction >= ptr[rank]) & (messages.instruction < ptr[rank + 1])
        own = find_messages(programs.rank(rank), plan.header)
        for name in ("peer", "send", "staged"):
            np.testing.assert_array_equal(getattr(own, name), getattr(messages, name)[is_own])


def messages_of_rank_1(plan: Plan, phase: str) -> tuple[Messages, ProgramSet]:
    """The messages of rank 1, and its program."""
    programs = plan.programs["default", phase].rank(1)
    found = find_messages(programs, plan.header)
    return found, programs


def test_keys_and_values_at_home_are_staged_and_relayed_ones_are_not() -> None:
    plan = plan_of("ring")
    found, _ = messages_of_rank_1(plan, "forward")
    assert not found.staged[~found.send].any()  # rows of a work arena, side by side
    first = found.instruction == found.instruction.min()
    assert found.staged[found.send & first].all()  # k and v are two arrays
    assert not found.staged[found.send & ~first].any()


def test_tiles_that_are_not_adjacent_are_staged() -> None:
    plan = plan_of("fcp")
    found, programs = messages_of_rank_1(plan, "forward")
    operands = programs["operands"]
    for number in np.flatnonzero(~found.send):
        tiles = programs["transfers"]["operand"][found.of == number]
        row, rows = operands["row"][tiles], operands["rows"][tiles]
        assert found.staged[number] == (row[1:] != row[:-1] + rows[:-1]).any()


def test_all_to_all_exchanges_are_staged() -> None:
    plan = plan_of("ulysses")
    found, programs = messages_of_rank_1(plan, "forward")
    assert (programs["instructions"]["mode"] == ALL_TO_ALL).any()
    assert found.staged.all()


@pytest.mark.parametrize(("heads", "is_staged"), [((0, 1), False), ((1, 0), True), ((0,), True)])
def test_home_rows_sent_in_another_order_of_heads_are_staged(heads: tuple[int, ...], is_staged: bool) -> None:
    plan = parse((ROOT / "plans" / "q_moves.txt").read_text())
    programs = plan.programs["default", "forward"].rank(2)  # sends its queries to both other ranks
    table = programs["operands"]
    columns = {**table.columns, "heads": (table["tensor"] == Tensor.Q).astype(np.int64)}
    programs = ProgramSet({**programs.tables, "operands": Table.of(table.ptr, columns)})
    found = find_messages(programs, replace(plan.header, head_sets=(heads,)))
    assert set(found.staged[found.send].tolist()) == {is_staged}


def test_a_plan_without_rounds_has_no_messages() -> None:
    plan = api.plan(Batch.from_lengths([9]), Cluster(1, 1), MODEL, "fcp")
    assert len(find_messages(plan.programs["default", "forward"], plan.header)) == 0

"""Launches of the executor: kernels and messages counted by hand, and naively on plans of all kinds."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from apportion import Batch, Cluster, Model, Plan
from apportion.ir.isa import Op
from apportion.ir.plan.messages import find_messages
from apportion.ir.plan.ops import instruction_of
from apportion.ir.plan.tables import Table
from apportion.ir.tensors import HEADLESS, KV_SIDE, Space, Tensor
from apportion.planner import api
from apportion.planner.simulate import Run, simulate, simulate_with
from tests.support.parse import parse
from tests.support.timelines import PLANS, STRATEGIES, Unit, plan_of
from tests.support.walks import complete_rows, computed_statistics

#: rank 0 sends one tile straight from memory (Q home rows), and two that must be copied together (two arrays)
FETCH = (
    "launch 0: send Q.home[0:8) to 1, send KV.home[0:4) to 1, receive KV.work[0:4) from 2\nwait 0",
    "launch 0: receive Q.work[0:8) from 0, receive KV.work[0:4) from 0\nwait 0",
    "launch 0: send KV.home[0:4) to 0\nwait 0",
)


def started(*programs: str, phase: str = "forward") -> Run:
    return simulate_with(plan_of(*programs, phase=phase), Unit()).runs["default", phase]


def test_a_projection_counts_the_kernel_that_stores_its_rows() -> None:
    assert started("project X.home[0:4) -> Q.work[0:4) KV.work[0:4)").launches.tolist() == [1]
    grad = "project_grad X.home[0:4) dQ.work[0:4) dKV.work[0:4) -> dX.home[0:4)"
    # accumulated gradients are cast at the end
    assert started(grad, phase="backward").launches.tolist() == [1 + 1]
    assert started(f"{grad} first", phase="backward").launches.tolist() == [1]


def test_staged_messages_are_packed_and_unpacked() -> None:
    """KV home rows are two arrays, KV work rows one: rank 0 packs the rows that it sends to rank 1, and receives rows
    straight into its arena; rank 1 gets two tensors in one message, and unpacks them."""
    run = started(*FETCH)
    assert run.launches.tolist() == [1, 1, 1]
    assert run.messages.tolist() == [2, 1, 1]
    assert run.rounds.tolist() == [1, 1, 1]


def test_ranks_without_home_rows_launch_no_cast() -> None:
    model = Model(q_heads=2, kv_heads=1, head_dim=8)
    plan = api.plan(Batch.from_lengths([2]), Cluster(1, 3), model, recipe="contiguous")
    empty = plan.layouts["attention"].rows_per_rank == 0
    assert empty.any()
    launches = simulate(plan).runs["default", "backward"].launches
    assert (launches[empty] == 0).all()
    assert (launches[~empty] > 1).all()


def test_the_busiest_rank_is_found_over_all_runs() -> None:
    found = simulate_with(plan_of(*FETCH), Unit())
    assert found.busiest == {"rank": 0, "instructions": 2, "launches": 1, "messages": 2, "rounds": 1}
    assert found.to_data()["busiest"] == found.busiest
    assert found.to_data()["runs"][0]["ranks"]["messages"] == [2, 1, 1]


# --- the naive count


def rows_of(table: Table) -> list[dict[str, int]]:
    columns = {name: values.tolist() for name, values in table.columns.items()}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


class NaiveLaunches:
    """One rank's program with rows of tables as dictionaries, counted naively."""

    def __init__(self, plan: Plan, key: tuple[str, str], rank: int) -> None:
        self.header, self.key = plan.header, key
        program = plan.programs[key].rank(rank)
        columns = ("o",) if key[1] == "forward" else ("dq", "dkv")
        done = {column: complete_rows(program, key[1], column) for column in columns}
        self.complete = {column: rows for column, (_, rows, _) in done.items()}
        self.placed = {one for _, _, placed in done.values() for one in placed}
        self.stated = computed_statistics(program)[1] if key[1] == "backward" else set()
        self.rows = {name: rows_of(table) for name, table in program.tables.items()}
        self.arenas = {row["tensor"]: row["heads"] for row in self.rows["arenas"]}
        self.home = set(range(int(plan.layout(plan.header.home_layout).rows_per_rank[rank])))

    def messages(self, instruction: dict[str, int], rows: list[dict[str, int]]) -> dict[Any, bool]:
        """(send, peer) -> staged."""
        tiles = defaultdict(list)
        for row in rows:
            tiles[row["send"], row["peer"]].append(self.rows["operands"][row["operand"]])
        swapped = instruction["mode"] != 0  # an all-to-all is one buffer; results are rounded
        return {ends: swapped or not self.are_contiguous(group) for ends, group in sorted(tiles.items())}

    def are_contiguous(self, tiles: list[dict[str, int]]) -> bool:
        return all(map(self.is_whole, tiles)) and all(self.follows(*two) for two in pairwise(tiles))

    def is_whole(self, tile: dict[str, int]) -> bool:
        tensor, work = Tensor(tile["tensor"]), tile["space"] == Space.WORK
        if self.header.sent_gradients == "model" and tensor in (Tensor.DX, Tensor.DQ, Tensor.DKV):
            return False  # rounded in transit
        if tensor == Tensor.O or (tensor == Tensor.KV and not work):
            return False
        return self.columns(tile) == (self.arenas[tensor] if work else self.all_columns(tensor))

    def all_columns(self, tensor: Tensor) -> int:
        if tensor in HEADLESS:
            return 1
        return self.header.kv_heads if tensor in KV_SIDE else self.header.q_heads

    def columns(self, tile: dict[str, int]) -> int:
        heads, tensor = tile["heads"], Tensor(tile["tensor"])
        return len(self.header.head_sets[heads - 1]) if heads else self.all_columns(tensor)

    def follows(self, first: dict[str, int], second: dict[str, int]) -> bool:
        same = all(first[name] == second[name] for name in ("tensor", "space"))
        model, wide = {"fp32": (4, 4), "fp64": (8, 8)}.get(self.header.dtype, (2, 4))
        key, value = self.header.head_dim, self.header.v_head_dim
        numbers = {Tensor.Q: key * model, Tensor.KV: (key + value) * model, Tensor.DO: value * model}
        numbers |= {Tensor.DQ: key * wide, Tensor.DKV: (key + value) * wide, Tensor.DELTA: 2 * wide}
        size = first["rows"] * self.columns(first) * numbers.get(Tensor(first["tensor"]), 1)
        return same and second["row"] == first["row"] + first["rows"] and size % 16 == 0

    def walk(self) -> tuple[list[tuple[int, int, int, bool]], int]:
        """(launch, send, peer, staged) of all messages, and kernels."""
        messages, kernels, place, unpacked = [], 0, defaultdict(int), set()
        for number, instruction in enumerate(self.rows["instructions"]):
            op, name = Op(instruction["op"]), Op(instruction["op"]).rule.list
            rows = self.rows[name][place[name] : place[name] + instruction["count"]] if name else []
            place[name] += instruction["count"]
            if op == Op.LAUNCH:
                found = self.messages(instruction, rows)
                messages += [(number, *ends, staged) for ends, staged in found.items()]
                packed = [row for row in rows if row["send"] and found[1, row["peer"]]]
                kernels += any(map(self.unplaced_rows, (row["operand"] for row in packed)))
                if any(staged for (send, _), staged in found.items() if not send):
                    unpacked.add(instruction["round"])
            elif op == Op.WAIT:
                kernels += instruction["round"] in unpacked
            elif op == Op.DELIVER:
                kernels += any(self.unplaced_rows(row["a"]) for row in rows)
            elif op == Op.DELTA:
                first = place[name] - len(rows)
                every = {(first + i, one) for i, row in enumerate(rows) for one in self.has(row["c"])}
                kernels += bool(every - self.stated)
            elif op == Op.FINISH:
                kernels += any(self.has(row["c"]) - self.complete["o"] for row in rows)
            else:
                kernels += 2 if op == Op.ATTEND_GRAD else 1
        return messages, kernels + self.casts()

    def unplaced_rows(self, operand: int) -> set[int]:
        """Rows that no task has written in place."""
        return {row for row in self.has(operand) if (operand, row) not in self.placed}

    def has(self, operand: int) -> set[int]:
        found = self.rows["operands"][operand]
        return set(range(found["row"], found["row"] + found["rows"]))

    def casts(self) -> int:
        if self.key[1] == "forward":
            return 0
        if any(row["op"] == Op.PROJECT_GRAD for row in self.rows["instructions"]):
            return int(bool(self.home))
        return int(any(self.home - done for done in self.complete.values()))


def check(plan: Plan) -> None:
    for key, run in simulate(plan).runs.items():
        slow = [NaiveLaunches(plan, key, rank) for rank in range(plan.header.ranks)]
        found = [program.walk() for program in slow]
        assert run.launches.tolist() == [kernels for _, kernels in found]
        assert run.messages.tolist() == [len(messages) for messages, _ in found]
        assert run.rounds.tolist() == [
            sum(row["op"] == Op.LAUNCH for row in program.rows["instructions"]) for program in slow
        ]
        check_messages(plan, key, [messages for messages, _ in found])


def check_messages(plan: Plan, key: tuple[str, str], expected: list[Any]) -> None:
    """Checks messages of all ranks at once, and of each rank alone, and the message of each tile."""
    programs, every = plan.programs[key], []
    for rank, mine in enumerate(expected):
        alone = find_messages(programs.rank(rank), plan.header)
        columns = (alone.instruction, alone.send, alone.peer, alone.staged)
        assert list(zip(*(column.tolist() for column in columns), strict=True)) == mine
        first = int(programs["instructions"].ptr[rank])
        every += [(first + number, *rest) for number, *rest in mine]
    found = find_messages(programs, plan.header)
    columns = (found.instruction, found.send, found.peer, found.staged)
    assert list(zip(*(column.tolist() for column in columns), strict=True)) == every
    transfers, instructions = programs["transfers"], programs["instructions"]
    launch = instruction_of(instructions["op"], instructions.wide("count"), "transfers")
    np.testing.assert_array_equal(found.instruction[found.of], launch)
    for column in ("send", "peer"):
        np.testing.assert_array_equal(getattr(found, column)[found.of], transfers[column])


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_counts_of_hand_written_plans_equal_a_naive_count(path: Any) -> None:
    check(parse(path.read_text()))


@pytest.mark.parametrize("sent", ["wide", "model"])
@pytest.mark.parametrize("recipe", [*STRATEGIES, "distca", "blend", "upipe"])
def test_counts_of_recipes_equal_a_naive_count(recipe: str, sent: str) -> None:
    batch = Batch.from_lengths([700, 500, 292, 300, 200, 80])
    model = Model(q_heads=8, kv_heads=4, head_dim=64, sent_gradients=sent)
    check(api.plan(batch, Cluster(2, 4, nics_per_node=2), model, recipe=recipe, verify=False))

"""Rows that arrive as results: their transfer, their cost, and instructions that must not touch them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import apportion as ap
from apportion import Plan, Sequence, masks
from apportion.ir import verify
from apportion.ir.isa import RESULTS
from apportion.ir.plan import totals
from apportion.ir.plan.fusion import find_complete_rows
from apportion.ir.plan.ops import instruction_of
from apportion.ir.tensors import PHASES, Space, Tensor
from tests.support.parse import parse

PLAN = (Path(__file__).resolve().parents[1] / "plans/results.txt").read_text()


def plan_of(dtype: str = "bf16", recipe: str = "ulysses", kv_heads: int = 4) -> Plan:
    model = ap.Model(4, kv_heads, 16, dtype=dtype)
    return ap.plan(ap.Batch.from_lengths([300, 200, 100, 80, 60]), ap.Cluster(1, 4), model, recipe=recipe)


def messages_after(*changes: tuple[str, str]) -> str:
    text = PLAN
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return " ".join(map(str, verify.check(parse(text))))


# ---- transfers


@pytest.mark.parametrize("dtype", ["bf16", "fp32", "fp64"])
def test_results_travel_in_the_models_dtype(dtype: str) -> None:
    plan = plan_of(dtype)
    model, size = plan.request.model, {"bf16": 2, "fp32": 4, "fp64": 8}[dtype]
    moved = totals.communication_volumes(plan.programs, plan.header.head_sets, model, plan.request.cluster)
    rows = plan.request.batch.tokens * 3 / 4  # three quarters of the heads of each row are computed elsewhere
    lse = max(size, 4)
    assert moved["default", "forward"].sent.sum() == rows * 4 * (3 * 16 * size + 16 * size + lse)
    assert moved["default", "backward"].sent.sum() == rows * 4 * (4 * 16 * size + 2 * lse + 3 * 16 * size)


def test_gradients_of_shared_kv_heads_are_summed_at_home() -> None:
    plan = plan_of(kv_heads=2)
    modes = {phase: set(plan.programs["default", phase]["instructions"]["mode"].tolist()) for phase in PHASES}
    assert {mode & RESULTS for mode in modes["forward"]} == {0, RESULTS}
    assert {mode & RESULTS for mode in modes["backward"]} == {0}


def test_rows_that_arrive_as_results_need_no_finish_and_no_cast() -> None:
    plan = plan_of()
    for phase, columns in (("forward", "o"), ("backward", "dq dkv")):
        programs = plan.programs["default", phase]
        for column in columns.split():
            found = find_complete_rows(programs, phase)[column]
            assert (found.home.row1 - found.home.row0).sum() == plan.request.batch.tokens
    run = ap.simulate(plan).runs["default", "forward"]
    # pack, copy, unpack, attend, unpack; results are in place, finish has no rows
    assert set(run.launches.tolist()) == {1 + 1 + 1 + 1 + 1}


MASKS = {"causal": masks.causal(), "window": masks.sliding_window(120)}
MASKS["questions"] = masks.shared_question(40, [100, 60])


@pytest.mark.parametrize("recipe", ["distca", "distca_paper"])
@pytest.mark.parametrize("mask", MASKS)
def test_rows_of_a_tile_return_as_results_if_nothing_else_touches_them(mask: str, recipe: str) -> None:
    sequences = [Sequence(2000, masks.causal()), *[Sequence(200, MASKS[mask])] * 6]
    plan = ap.plan(ap.Batch.from_sequences(sequences), ap.Cluster(1, 4), ap.Model(4, 2, 16), recipe=recipe)
    returned = 0
    for phase, table, column, tensor in (
        ("forward", "tasks", "o", Tensor.O),
        ("backward", "grads", "dq", Tensor.DQ),
    ):
        for rank in range(4):
            program = plan.programs["default", phase].rank(rank)
            operands, transfers, rowops = (program[name] for name in ("operands", "transfers", "rowops"))
            instructions = program["instructions"]
            at = instruction_of(instructions["op"], instructions.wide("count"), "transfers")
            is_received = (transfers["send"] == 0) & (operands["tensor"][transfers["operand"]] == tensor)
            results = transfers["operand"][is_received & (instructions["mode"][at] & RESULTS > 0)].tolist()
            added = rowops["c"][np.isin(rowops["a"], transfers["operand"][is_received])].tolist()
            own = [x for x in np.unique(program[table][column]) if operands["space"][x] == Space.HOME]
            spans = [
                slice(row, row + rows) for row, rows in zip(operands["row"], operands["rows"], strict=True)
            ]
            computed = np.zeros(plan.layout("attention").rows_per_rank[rank], bool)
            for x in own:
                computed[spans[x]] = True
            users = computed.astype(int)
            for x in results + added:
                users[spans[x]] += 1
            assert all((users[spans[x]] == 1).all() for x in results)
            assert all((users[spans[x]] > 1).any() for x in added)
            returned += len(results)
    assert returned


def test_the_same_plan_without_results_verifies_too() -> None:
    assert not messages_after((" results", ""), ("  deliver ", "  copy "))


# ---- violations


def test_nothing_is_added_to_results() -> None:
    old = "  wait 1\n  finish O.home[0:8)\n"
    added = (
        "  wait 1\n  clear O.work[0:8).h1\n  merge O.work[0:8).h1 -> O.home[0:8).h1\n  finish O.home[0:8)\n"
    )
    found = " ".join(map(str, verify.check(parse(PLAN.replace(old, added, 1)))))
    assert "[results] rank 0" in found
    assert "uses O home rows [0, 8) of head set 1, which arrive as results" in found


def test_a_row_receives_results_in_all_heads_or_none() -> None:
    found = messages_after(
        ("deliver O.work[0:8).h1 -> O.home[0:8).h1", "copy O.work[0:8).h1 -> O.home[0:8).h1")
    )
    assert "uses O home rows [0, 8) of head set 1, which arrive as results" in found


def test_results_travel_only_from_work_rows_to_home_rows() -> None:
    found = messages_after(("launch 0 all_to_all: send Q.home", "launch 0 all_to_all results: send Q.home"))
    assert "Q home rows [0, 8) of head set 3 cannot be a result: sums go from work rows to home rows" in found


def test_ranks_must_agree_on_results() -> None:
    first = PLAN.index("launch 1 all_to_all results")
    text = PLAN[:first] + PLAN[first:].replace(" results", "", 1)
    found = " ".join(map(str, verify.check(parse(text))))
    assert "[transfers]" in found
    assert "with mode 3, but rank 0 with mode 1" in found


def test_only_sums_can_be_delivered() -> None:
    found = messages_after(
        ("copy Q.home[0:8).h1 -> Q.work[0:8).h1 first,", "deliver Q.home[0:8).h1 -> Q.work[0:8).h1 first,")
    )
    assert "operand a must be O or dQ or dKV" in found

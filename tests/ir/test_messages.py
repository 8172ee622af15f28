"""Messages of rounds: heads in another order need a copy. `planner/simulate/test_launches.py` compares the messages of
recipes with a naive grouping."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from apportion import Batch, Cluster, Model
from apportion.ir.plan.messages import find_messages
from apportion.ir.plan.tables import ProgramSet, Table
from apportion.ir.tensors import Tensor
from apportion.planner import api
from tests.support.parse import parse

ROOT = Path(__file__).parents[1]


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
    plan = api.plan(Batch.from_lengths([9]), Cluster(1, 1), Model(4, 2, 8), "fcp")
    assert len(find_messages(plan.programs["default", "forward"], plan.header)) == 0

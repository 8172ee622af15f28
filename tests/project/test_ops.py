"""Adding an op takes a row of `ir.isa.Op` and its handlers: tables follow from the row; a missing handler is an
error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from apportion.backends import numpy as executor
from apportion.backends.interp import Machine, Operand, Step, compile_program
from apportion.backends.numpy import Rank
from apportion.ir.errors import ExecutionError
from apportion.ir.isa import RULES, Argument, Op, Rule, Use
from apportion.ir.plan.ops import LISTS, list_table
from apportion.ir.tensors import PARTIALS, Tensor
from apportion.ir.text.words import form_of
from apportion.ir.verify.explain.operands import tensors_of
from apportion.planner.simulate.launches import kernel_table
from apportion.planner.simulate.program import pass_table
from tests.project.test_newcomers import CHANGES
from tests.support.changed import change
from tests.support.parse import parse
from tests.support.programs import run_python

ROOT = Path(__file__).resolve().parents[2]
PLAN = ROOT / "tests/plans/clear.txt"
NEW_OP = 14
NEW_RULE = Rule(
    "rowops", (Argument("a", Use.TAKE, PARTIALS), Argument("c", Use.WRITE, PARTIALS, like="a")), kernels=3
)
EXTENDED = {**RULES, NEW_OP: NEW_RULE}


def test_tables_follow_from_an_added_row() -> None:
    form = form_of(NEW_RULE)
    assert (form.reads, form.writes, form.flags) == (("a",), ("c",), {"first": 1})
    assert list_table(EXTENDED)[NEW_OP] == LISTS.index("rowops")
    assert kernel_table(EXTENDED)[NEW_OP] == 3
    assert pass_table(EXTENDED)[:, NEW_OP].tolist() == [[1, 0, 1, 0]] * 2
    assert [tensors_of(NEW_RULE.argument(column)) for column in "ab"] == [PARTIALS, (Tensor.NONE,)]


@pytest.mark.parametrize("table", [list_table, kernel_table, pass_table], ids=lambda f: f.__name__)
def test_adding_an_op_changes_no_other_op(table: Callable[..., Any]) -> None:
    ours, theirs = (
        np.moveaxis(table(rules), 1, 0) if table is pass_table else table(rules)
        for rules in (RULES, EXTENDED)
    )
    assert np.array_equal(theirs[:NEW_OP], ours)


def test_rows_of_the_table_fit_their_list() -> None:
    for op in Op:
        columns, sums = op.rule.columns, [a for a in op.rule.arguments if a.use is Use.ADD]
        named = [argument.column for argument in op.rule.arguments]
        assert named == [column for column in columns if column in named], op
        assert len({argument.flag for argument in sums}) == len(sums), op
        for argument in op.rule.arguments:
            assert argument.like is None or op.rule.argument(argument.like).like is None, op


def test_a_machine_names_the_op_that_it_does_not_implement() -> None:
    class IncompleteMachine(Machine[None]):
        def view(self, operand: Operand) -> None: ...

        def launch(self, step: Step) -> None: ...

        wait = attend = launch

    plan = parse(PLAN.read_text())
    program = compile_program(plan.programs["default", "forward"].rank(0), plan.header)
    with pytest.raises(
        ExecutionError, match="IncompleteMachine has no handler for the op clear, which the program uses"
    ):
        IncompleteMachine(program)
    Rank.require(program)


SCRIPT = """
import sys
from pathlib import Path
import numpy as np
from apportion.backends import numpy as executor
from apportion.ir.bytes import codec
from apportion.ir import verify
from tests.support.parse import parse
from apportion.planner.simulate import simulate

source = Path(sys.argv[1]).read_text()
def written(line):
    return parse(source.replace("merge O.work[0:8) -> O.home[0:8) first", line))

added, plan = parse(source), written("give O.work[0:8) -> O.home[0:8)")
assert "give O.work[0:8) -> O.home[0:8)" in plan.text()
assert parse(plan.text()) == plan == codec.decode(plan.encode())
verify.verify(plan)
spans = simulate(plan).runs["default", "forward"].spans
(took,) = (spans.end_us - spans.start_us)[spans.op == 14]
assert took > 0
rng = np.random.default_rng(0)
q, k, v, do = (rng.normal(size=(16, heads, width)) for heads, width in ((8, 4), (1, 4), (1, 2), (8, 2)))
for ours, theirs in zip(*(executor.run(p, "default", q, k, v, do) for p in (plan, added)), strict=True):
    assert ours is theirs or np.array_equal(ours, theirs)

def broken(line):
    return " ".join(map(str, verify.check(written(line))))

assert "whose partial was merged, added or sent before" in broken(
    "give O.work[0:8) -> O.home[0:8), O.work[0:8) -> O.home[0:8)"
)
assert "operand a must be O or dX or dQ or dKV" in broken("give Q.home[0:8) -> O.home[0:8)")
assert "operand c has a different number of rows" in broken("give O.work[0:8) -> O.home[0:4)")
"""


@pytest.mark.slow  # rebuilds the core
def test_an_op_is_added_by_its_row_and_its_handlers(tmp_path: Path) -> None:
    """In a copy of the package, the op of docs/how-to/own-op.md has text, bytes, verification, price and execution."""
    environment = change(CHANGES["op"][0], tmp_path)
    run_python("-c", SCRIPT, PLAN, cwd=tmp_path, env=environment)


def test_the_code_that_the_diff_replaces_runs_unchanged() -> None:
    assert "merge O.work[0:8) -> O.home[0:8) first" in PLAN.read_text()
    plan = parse(PLAN.read_text())
    q, k, v = (np.ones((16, heads, width)) for heads, width in ((8, 4), (1, 4), (1, 2)))
    assert executor.run(plan, "default", q, k, v).o.shape == (16, 8, 2)

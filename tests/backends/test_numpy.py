"""The numpy executor on the hand-written plans, which together use every op."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from apportion import ExecutionError, Plan, UnknownNameError
from apportion.backends import numpy as executor
from apportion.backends.interp import compile_program
from apportion.backends.numpy import LocalLayer
from apportion.ir import verify
from apportion.ir.bytes import codec
from apportion.ir.isa import ALL_TO_ALL, Op
from apportion.ir.masks import bands
from apportion.ir.plan.tables import ProgramSet
from tests.support import oracle
from tests.support.moves import remap
from tests.support.parse import parse
from tests.support.projection import Weights

PLANS = sorted((Path(__file__).parent.parent / "plans").glob("*.txt"))
EXACT = 1e-10


def load(name: str) -> Plan:
    path = next(path for path in PLANS if path.stem == name)
    return parse(path.read_text())


def projects(plan: Plan) -> bool:
    return any(Op.PROJECT in programs["instructions"]["op"] for programs in plan.programs.values())


CASES = [
    (path.stem, kind)
    for path in PLANS
    for plan in [parse(path.read_text())]
    if not projects(plan)
    for kind in plan.header.kinds
]


def problem(plan: Plan, sinks: bool = False, softcap: float | None = None) -> oracle.Problem:
    head = plan.header
    shape = (head.q_heads, head.kv_heads, head.head_dim, head.v_head_dim)
    return oracle.Problem.random(7, plan.request.batch.tokens, *shape, sinks=sinks, softcap=softcap)


def allowed(plan: Plan, kind: str) -> np.ndarray:
    tokens = plan.request.batch.tokens
    return bands.dense(plan.request.batch.bands(kind), tokens, tokens)


def run(plan: Plan, kind: str, p: oracle.Problem) -> executor.Result:
    return executor.run(plan, kind, p.q, p.k, p.v, p.do, LocalLayer(p.sinks, p.scale, p.softcap))


def assert_close(found: tuple, expected: tuple, tolerance: float = EXACT) -> None:
    for name, actual, expected_part in zip(oracle.Answer._fields, found, expected, strict=True):
        assert (actual is None) == (expected_part is None), name
        if actual is not None:
            np.testing.assert_allclose(actual, expected_part, rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.parametrize(("name", "kind"), CASES)
@pytest.mark.parametrize(("sinks", "softcap"), [(False, None), (True, None), (False, 1.5), (True, 1.5)])
def test_hand_written_plan_equals_dense_attention(name: str, kind: str, sinks: bool, softcap: float) -> None:
    plan = load(name)
    p = problem(plan, sinks, softcap)
    assert_close(run(plan, kind, p), oracle.dense(p, allowed(plan, kind)))


def test_hand_written_plans_use_every_op() -> None:
    plans = [parse(path.read_text()) for path in PLANS]
    tables = [programs["instructions"] for plan in plans for programs in plan.programs.values()]
    assert {op for table in tables for op in table["op"].tolist()} == set(Op)
    assert any(ALL_TO_ALL in table["mode"] for table in tables)
    assert any(table["channel"].any() for table in tables)


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_hand_written_plan_verifies_and_survives_its_encodings(path: Path) -> None:
    plan = parse(path.read_text())
    assert codec.decode(plan.encode()) == plan
    assert parse(plan.text()) == plan
    assert verify.check(plan) == ()


def test_projected_heads_and_their_gradients_equal_dense_attention() -> None:
    plan = load("heads")
    rng, batch, head = np.random.default_rng(5), plan.request.batch, plan.header
    x, sinks = rng.standard_normal((batch.tokens, 6)), rng.standard_normal(head.q_heads)
    do = rng.standard_normal((batch.tokens, head.q_heads, head.v_head_dim))
    keys = (head.kv_heads, 6)
    shapes = (head.q_heads, 6, head.head_dim), (*keys, head.head_dim), (*keys, head.v_head_dim)
    weights = Weights(*map(rng.standard_normal, shapes))
    projection_inputs = x, batch.positions(), range(head.q_heads), range(head.kv_heads)
    q, k, v = weights.project(*projection_inputs)
    answer = oracle.dense(oracle.Problem(q, k, v, do, sinks), allowed(plan, "default"))
    o, lse, saved = executor.forward(plan, "default", [x], LocalLayer(sinks, project=weights))
    dx, dsinks = executor.backward(plan, "default", saved, do)
    expected = weights.gradient(*projection_inputs, (answer.dq, answer.dk, answer.dv))
    for found, expected_array in [(o, answer.o), (lse, answer.lse), (dx, expected), (dsinks, answer.dsinks)]:
        np.testing.assert_allclose(found, expected_array, rtol=EXACT, atol=EXACT)


def test_backward_may_run_twice_from_one_forward() -> None:
    plan = load("q_moves")
    p = problem(plan)
    _, _, saved = executor.forward(plan, "default", [p.q, p.k, p.v])
    first, second = (executor.backward(plan, "default", saved, p.do)[:3] for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


def test_remap_moves_rows_between_layouts_and_back() -> None:
    plan = load("reshuffle")
    x = np.random.default_rng(0).standard_normal((16, 3))
    source, target = (plan.layout(name) for name in ("attention", "linear"))
    remapped = remap(plan, 0, executor.scatter(source, x))
    for actual, expected_part in zip(remapped, executor.scatter(target, x), strict=True):
        np.testing.assert_array_equal(actual, expected_part)
    back = remap(plan, 0, remapped, inverse=True)
    np.testing.assert_array_equal(executor.gather(source, back), x)


def test_unmatched_moves_are_an_error() -> None:
    plan = load("reshuffle")
    parts = executor.scatter(plan.layout("attention"), np.zeros((16, 1)))
    crossed = edited("reshuffle", "send 1 row=4 rows=4; receive 1", "send 1 row=4 rows=3; receive 1")
    with pytest.raises(ExecutionError, match="rank 1 receives 4 rows from rank 0"):
        remap(crossed, 0, parts)


# --- plans that cannot run: the error names the rank, the place and the reason


def edited(name: str, old: str, new: str) -> Plan:
    """A hand-written plan with the first `old` replaced by `new`, sealed again by the parser."""
    source = next(path for path in PLANS if path.stem == name).read_text()
    assert old in source
    return parse(source.replace(old, new, 1))


_Q_ATTEND = "attend Q.work[0:8) KV.home[0:8) -> O.work[0:8) full first\n"
_ATTEND = "  attend Q.home[0:8) KV.home[0:8) -> O.home[0:8) causal first\n"
_LAUNCH = "launch 0: send Q.home[0:8) to 0, send Q.home[0:8) to 1\n"
_MERGE = "merge O.work[8:16) -> O.home[0:8)\n"
_WAITS = r"deadlock(.|\n)*rank 0, instruction 2 of 7: waits for ranks \[2\](.|\n)*→ 2: wait round 0"
FAULTS = {  # name -> plan, text, replacement, error
    "a deadlock, where each rank waits": ("q_moves", f"  {_LAUNCH}{_ATTEND}  wait 0\n", _ATTEND, _WAITS),
    "a deadlock, the rank that skips a round": (
        "q_moves",
        f"  {_LAUNCH}{_ATTEND}  wait 0\n",
        _ATTEND,
        r"rank 2, instruction 2 of 5: waits for ranks \[0, 1\]",
    ),
    "a deadlock, a rank that skips an exchange of all": (
        "q_moves",
        "launch 1: send dQ.work[0:8) to 1, send dQ.work[8:16) to 2\n  wait 1\n",
        "launch 1: send dQ.work[0:8) to 1, send dQ.work[8:16) to 2\n  wait 1\n"
        "  launch 2 all_to_all:\n  wait 2\n",
        r"rank 0, instruction 9 of 10: waits for ranks \[1, 2\]",
    ),
    "read rows in flight": (
        "q_moves",
        f"wait 0\n  {_Q_ATTEND}",
        f"{_Q_ATTEND}  wait 0\n",
        r"rank 1, instruction 2 of 8: reads Q.work\[0:8\).*in flight",
    ),
    "use a partial twice": ("q_moves", _MERGE, f"{_MERGE}  {_MERGE}", r"rank 1, instruction 7 .*consumed"),
    "overwrite rows in flight": (
        "q_moves",
        _LAUNCH,
        f"{_LAUNCH}  clear Q.home[0:8)\n",
        r"rank 2, instruction 3 .*Q.home\[0:8\).* was overwritten while round 0 was in flight",
    ),
    "a send that nobody receives": (
        "q_moves",
        "send Q.home[0:8) to 0, rec",
        "send Q.home[0:8) to 0, send KV.home[0:8) to 0, rec",
        r"round 0: rank 0 does not receive KV.home\[0:8\).* from rank 1",
    ),
    "a receive that nobody sends": (
        "q_moves",
        "1: receive O.work[8:16) from 0, send",
        "1: receive O.work[8:16) from 2, send",
        r"rank 1, instruction 5 .*receives O.work\[8:16\).* from rank 2, which has no more to send in round 1",
    ),
    "a receive of another number of rows": (
        "q_moves",
        "launch 1: send O.work[0:8) to 1",
        "launch 1: send O.work[0:7) to 1",
        r"receives O.work\[8:16\).* from rank 0, which sends O.work\[0:7\)",
    ),
    "gradients that are never written": (
        "clear",
        "clear dQ.home[4:8), dKV.home[0:8)",
        "clear dKV.home[0:8)",
        "rank 0: home rows of dQ were never written",
    ),
    "read an unwritten row of the output": (
        "clear",
        "  clear O.home[0:8)\n",
        "  clear O.home[0:4)\n",
        r"O.home\[0:8\).*row 4 is unwritten",
    ),
    "a round without a wait": ("relay", "  wait 0\n  finish", "  finish", r"without a wait for rounds \[0\]"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_plan_that_cannot_run_is_an_error_with_rank_place_and_reason(fault: str) -> None:
    name, old, new, error = FAULTS[fault]
    plan = edited(name, old, new)
    with pytest.raises(ExecutionError, match=error):
        run(plan, plan.header.kinds[0], problem(plan))


def test_entries_of_a_list_without_an_instruction_are_refused() -> None:
    plan = load("clear")
    program = plan.programs[plan.header.kinds[0], "forward"].rank(0)
    count = len(tasks := program["tasks"])
    more = tasks.take(np.array([*range(count), 0]), np.array([0, count + 1]))
    with pytest.raises(ExecutionError, match="1 tasks belong to no instruction"):
        compile_program(ProgramSet({**program.tables, "tasks": more}), plan.header)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_wrong_shapes_are_named(name: str) -> None:
    plan = load("q_moves")
    p = problem(plan)
    truncated = replace(p, **{name: getattr(p, name)[..., :-1]})
    with pytest.raises(ExecutionError, match=rf"^{name} has shape"):
        run(plan, "default", truncated)


def test_unknown_kind_is_named() -> None:
    plan = load("q_moves")
    with pytest.raises(UnknownNameError, match="the plan has default"):
        run(plan, "local", problem(plan))


def test_a_projecting_plan_needs_a_projection() -> None:
    plan = load("heads")
    p = problem(plan)
    with pytest.raises(ExecutionError, match=r"X\.home"):
        run(plan, "default", p)


# --- compiled programs


def test_programs_compile_to_steps_with_their_rows() -> None:
    plan = load("heads")
    program = compile_program(plan.program(0, "default", "forward"), plan.header)
    assert program.uses_project
    assert [step.op for step in program.steps[:3]] == [Op.PROJECT, Op.LAUNCH, Op.PROJECT]
    attend = next(step for step in program.steps if step.op == Op.ATTEND)
    assert [task.kv_of for task in attend.tasks] == [(0,), (0,)]
    scattered = next(o for o in program.operands if o.heads == (0, 2))
    assert scattered.columns == slice(0, 3, 2)

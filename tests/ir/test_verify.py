"""Each rule of the verifier: a good plan broken in one place is refused; the first violation names rule and place."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import apportion as ap
from apportion import Plan, VerifyError
from apportion.ir.bytes import codec
from apportion.ir.plan.tables import Layout, ProgramSet, Table
from apportion.ir.tensors import Tensor
from apportion.ir.verify import RULES, Violation, check, verify
from tests.support.broken_plans import CASES, GOOD, broken
from tests.support.parse import parse

PLANS = Path(__file__).parent.parent / "plans"


def first(plan: Plan) -> Violation:
    violations = check(plan)
    assert violations
    return violations[0]


def test_the_good_plan_verifies() -> None:
    verify(parse(GOOD))


def test_the_table_of_rules_has_all_ten() -> None:
    assert {rule.number for rule in RULES} == {None, *range(1, 11)}


@pytest.mark.parametrize("case", CASES)
def test_a_plan_broken_in_one_place_is_refused_there(case: str) -> None:
    rule, rank, phase, instruction, edit, words = CASES[case]
    found = first(broken(edit, rank=rank, phase=phase))
    place = (found.rule, found.rank, found.phase, found.instruction)
    assert place == (rule, rank, phase, instruction), str(found)
    assert words in found.message
    assert (found.excerpt == "") == (instruction is None)


def test_a_send_to_another_rank_is_shown_at_both_ends() -> None:
    found = check(broken(("send Q.home[0:8).h3 to 1", "send Q.home[0:8).h3 to 0"), rank=2))
    assert {(v.rule, v.rank, v.instruction) for v in found[:2]} == {("transfers", 1, 0), ("transfers", 2, 0)}
    assert all("no matching tile" in violation.message for violation in found[:2])


def test_the_error_shows_rank_instruction_numbers_and_lines() -> None:
    edit = ("receive KV.work[0:8) from 0", "receive KV.work[0:7) from 0")
    with pytest.raises(VerifyError) as error:
        verify(broken(edit, rank=2))
    message = str(error.value)
    assert "rank 2, default forward, instruction 0: receives KV rows [0, 7) in round 0" in message
    assert ">    0  launch 0: receive KV.work[0:7) from 0, send Q.home[0:8).h1 to 1, send Q.home" in message
    assert error.value.violations[0].rule == "transfers"


# ---- layouts, limits, digests, report


def with_spans(plan: Plan, column: str, span: int, value: int) -> Plan:
    spans = plan.layouts["attention"].spans
    columns = {name: np.array(values, np.int64) for name, values in spans.columns.items()}
    columns[column][span] = value
    return codec.seal(replace(plan, layouts={"attention": Layout("attention", Table.of(spans.ptr, columns))}))


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("token", 9, "tokens [8, 9) are in no span"),
        ("token", 7, "tokens [7, 8) are also on another row"),
        ("row", 1, "begins at row 1, but the rows before it end at 0"),
        ("position", 3, "has position 3, but its first token has position 8"),
        ("sequence", 1, "has sequence 1, but its tokens belong to sequence 0"),
        ("length", 7, "tokens [15, 16) are in no span"),
    ],
)
def test_wrong_spans_of_a_layout_are_named(column: str, value: int, words: str) -> None:
    found = check(with_spans(parse(GOOD), column, 1, value))
    assert found[0].rule == "layouts"
    assert any(words in violation.message for violation in found)


def test_a_span_across_a_restart_of_positions_is_refused() -> None:
    plan = parse((PLANS / "heads.txt").read_text())
    spans = plan.layouts["attention"].spans
    rows = {"row": [0, 0], "token": [0, 8], "length": [8, 8], "sequence": [0, 0], "position": [0, 8]}
    columns = {name: np.array(values) for name, values in rows.items()}
    assert set(columns) == set(spans.columns)
    table = Table.of(np.array([0, 1, 2]), columns)
    violation = first(codec.seal(replace(plan, layouts={"attention": Layout("attention", table)})))
    assert (violation.rule, violation.rank) == ("layouts", 1)
    assert "continues past token 11, at which the position jumps" in violation.message


def with_policy(plan: Plan, **fields: object) -> Plan:
    policy = replace(plan.request.policy, **fields)
    return codec.seal(replace(plan, request=replace(plan.request, policy=policy)))


@pytest.mark.parametrize(
    ("fields", "rank", "words"),
    [
        ({"token_cap": 7}, 0, "holds 8 tokens in layout attention; the token cap is 7"),
        ({"memory_cap_gib": 1e-7}, 0, "GiB of work rows; the memory cap is 1e-07 GiB"),
        ({"tolerance": 0.2}, 1, "more than the mean rank; the tolerance is 20 %"),
    ],
)
def test_plans_that_exceed_a_limit_are_refused(fields: dict[str, object], rank: int, words: str) -> None:
    found = first(with_policy(parse(GOOD), **fields))
    assert found.rule == "limits"
    assert words in found.message
    assert found.rank is not None


def test_plans_within_every_limit_verify() -> None:
    assert check(with_policy(parse(GOOD), token_cap=8, memory_cap_gib=1.0, tolerance=1.0)) == ()


def test_wrong_digests_are_refused() -> None:
    plan = parse(GOOD)
    forged = replace(plan, sections=replace(plan.sections, id=bytes(32)))
    assert first(forged).rule == "digests"
    parts = [plan.sections.parts[0], plan.sections.parts[1], plan.sections.parts[1]]
    assert first(replace(plan, sections=replace(plan.sections, parts=parts))).rule == "digests"
    edited = replace(broken(("causal", "full"), rank=0), sections=plan.sections)
    assert (first(edited).rule, first(edited).rank) == ("digests", 0)
    assert "seal the plan after a change" in first(edited).message


def test_a_head_that_no_rank_computes_is_named() -> None:
    plan = parse(GOOD)
    operands = plan.programs["default", "forward"]["operands"]
    narrow = {Tensor.Q: 1, Tensor.KV: 2, Tensor.O: 1}
    heads = np.array([narrow.get(Tensor(int(tensor)), 0) for tensor in operands["tensor"]])
    narrowed = {**operands.columns, "heads": heads}
    found = first(with_table(plan, "operands", Table.of(operands.ptr, narrowed)))
    assert (found.rule, found.message) == ("heads", "no task computes query heads 2, 3 (2 of 4 heads)")


def with_table(plan: Plan, name: str, table: Table) -> Plan:
    key = ("default", "forward")
    programs = {**plan.programs, key: ProgramSet({**plan.programs[key].tables, name: table})}
    return codec.seal(replace(plan, programs=programs))


#: figures of a report, and the messages that do not begin with the figure's name
FIGURES = """bytes.total bytes.max_rank bytes.inter_node plan_bytes.total plan_bytes.largest_rank imbalance.compute
    imbalance.tokens area.default tokens ranks recipe slots max_degree rounds exchanges.0.bytes bounds.makespan.value
    bounds.kv_bytes.value bounds.slots.value bounds.kv_bytes.bound"""
MESSAGES = {"exchanges.0.bytes": "according to the report, its exchanges move "}
MESSAGES["bounds.kv_bytes.bound"] = "the report has kv_bytes = "


@pytest.fixture(scope="module")
def original() -> Plan:
    batch = ap.Batch.from_lengths([4096, 1000, 700, 300], mask=ap.masks.causal())
    return ap.plan(batch, ap.Cluster(2, 2), ap.Model(8, 4, 64), recipe="fcp", verify=False)


@pytest.mark.parametrize("place", FIGURES.split())
def test_a_report_that_the_programs_contradict_is_refused(place: str, original: Plan) -> None:
    report = copy.deepcopy(dict(original.report))
    *path, last = place.split(".")
    inner = report
    for name in path:
        inner = inner[int(name)] if name.isdigit() else inner[name]  # type: ignore[index]
    inner[last] = inner[last] * 3 + (inner[last] if isinstance(inner[last], str) else 1) if inner[last] else 7
    found = check(codec.seal(replace(original, report=report)))
    message = MESSAGES.get(place, f"the report has {place} = ")
    assert {violation.rule for violation in found} == {"report"}
    assert any(violation.message.startswith(message) for violation in found)


def test_a_report_may_lack_fields_or_have_unknown_ones(original: Plan) -> None:
    assert check(original) == ()
    assert check(codec.seal(replace(original, report={}))) == ()
    assert check(codec.seal(replace(original, report={**original.report, "weather": "fine"}))) == ()


@pytest.mark.parametrize(
    "change",
    [
        {"bytes": "many"},
        {"bytes": {"total": None}},
        {"exchanges": [1]},
        {"exchanges": []},
        {"exchanges": None},
        {"rounds": -5},
        {"slots": 3.0},
        {"imbalance": [0.0]},
        {"bounds": {"makespan": [1]}},
        {"bounds": {"kv_bytes": {"bound": -1, "value": 3.0, "gap": None}}},
        {"bounds": {"makespan": {"bound": 1.0, "value": 3.0, "gap": 1.0}}},
        {"termination": {"status": "OPTIMAL", "limit": None, "bound": 1.0, "value": 1.0}},
        {"imbalance_bound": -3.0},
    ],
    ids=str,
)
def test_a_report_that_is_malformed_or_contradicts_itself_is_refused(change: dict, original: Plan) -> None:
    found = check(codec.seal(replace(original, report={**original.report, **change})))
    assert {violation.rule for violation in found} == {"report"}

"""Each rule of the verifier: a good plan, broken in one place, is refused by the rule that names the place first."""

# ruff: noqa: E501  plans are one instruction a line

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import apportion as ap
from apportion.ir import codec, text
from apportion.ir.codec import Plan
from apportion.ir.errors import VerifyError
from apportion.ir.isa import Tensor
from apportion.ir.plan import Layout, Move, ProgramSet, Table
from apportion.ir.verify import RULES, Violation, check, verify

PLANS = Path(__file__).parent.parent / "plans"
NAMES = sorted(path.stem for path in PLANS.glob("*.txt"))

# Three ranks of eight tokens, one causal document. Rank 0 computes all that its keys are in, rank 1 gets the keys of
# rank 0, rank 2 sends its queries to rank 1 and gets a partial back; two head sets, the first of them moved apart.
GOOD = """
apportion.plan 2.0
request {
  "batch": {"lengths": [24], "mask": {"causal": {}}},
  "cluster": {"nodes": 1, "ranks_per_node": 3},
  "model": {"q_heads": 4, "kv_heads": 2, "head_dim": 4, "dtype": "fp64"},
  "policy": {"recipe": {"name": "by_hand", "steps": {}}}
}
header {"head_sets": [[0, 1], [0]]}

rank 0
layout attention: row=0 token=0 length=8 sequence=0 position=0
program default forward
  launch 0: send KV.home[0:8) to 1, send KV.home[0:8) to 2
  attend Q.home[0:8) KV.home[0:8) -> O.home[0:8) causal first
  wait 0
  finish O.home[0:8)
program default backward
  delta dO.home[0:8) O.home[0:8) -> delta.home[0:8)
  launch 0: send KV.home[0:8) to 1, send KV.home[0:8) to 2
  attend_grad Q.home[0:8) KV.home[0:8) dO.home[0:8) delta.home[0:8) -> dQ.home[0:8) dKV.home[0:8) causal first_dq first_dkv
  wait 0
  launch 1: receive dKV.work[0:8) from 1, receive dKV.work[8:16) from 2
  wait 1
  add dKV.work[0:8) -> dKV.home[0:8), dKV.work[8:16) -> dKV.home[0:8)

rank 1
layout attention: row=0 token=8 length=8 sequence=0 position=8
program default forward
  launch 0: receive KV.work[0:8) from 0, receive Q.work[0:8) from 2
  attend Q.home[0:8) KV.home[0:8) -> O.home[0:8) causal first
  wait 0
  attend Q.home[0:8) KV.work[0:8) -> O.home[0:8) full
  attend Q.work[0:8).h1 KV.home[0:8).h2 -> O.work[0:8).h1 full first
  launch 1: send O.work[0:8).h1 to 2
  wait 1
  finish O.home[0:8)
program default backward
  delta dO.home[0:8) O.home[0:8) -> delta.home[0:8)
  launch 0: receive KV.work[0:8) from 0, send KV.home[0:8) to 2
  attend_grad Q.home[0:8) KV.home[0:8) dO.home[0:8) delta.home[0:8) -> dQ.home[0:8) dKV.home[0:8) causal first_dq first_dkv
  wait 0
  attend_grad Q.home[0:8) KV.work[0:8) dO.home[0:8) delta.home[0:8) -> dQ.home[0:8) dKV.work[0:8) full first_dkv
  launch 1: send dKV.work[0:8) to 0, receive dKV.work[8:16) from 2
  wait 1
  add dKV.work[8:16) -> dKV.home[0:8)

rank 2
layout attention: row=0 token=16 length=8 sequence=0 position=16
program default forward
  launch 0: receive KV.work[0:8) from 0, send Q.home[0:8) to 1
  attend Q.home[0:8) KV.home[0:8) -> O.home[0:8) causal first
  wait 0
  attend Q.home[0:8) KV.work[0:8) -> O.home[0:8) full
  launch 1: receive O.work[0:8).h1 from 1
  wait 1
  merge O.work[0:8).h1 -> O.home[0:8).h1
  finish O.home[0:8)
program default backward
  delta dO.home[0:8) O.home[0:8) -> delta.home[0:8)
  launch 0: receive KV.work[0:8) from 0, receive KV.work[8:16) from 1
  attend_grad Q.home[0:8) KV.home[0:8) dO.home[0:8) delta.home[0:8) -> dQ.home[0:8) dKV.home[0:8) causal first_dq first_dkv
  wait 0
  attend_grad Q.home[0:8) KV.work[0:16) dO.home[0:8) delta.home[0:8) -> dQ.home[0:8) dKV.work[0:16) full first_dkv
  launch 1: send dKV.work[0:8) to 0, send dKV.work[8:16) to 1
  wait 1
"""
# the other two heads of rank 2's queries on rank 1's keys: they go the way of the first two
GOOD = GOOD.replace(
    "  attend Q.work[0:8).h1 KV.home[0:8).h2 -> O.work[0:8).h1 full first\n  launch 1: send O.work[0:8).h1 to 2\n",
    "  attend Q.work[0:8).h1 KV.home[0:8).h2 -> O.work[0:8).h1 full first\n"
    "  attend Q.work[0:8).h3.c2 KV.home[0:8).h4 -> O.work[0:8).h3.c2 full first\n"
    "  launch 1: send O.work[0:8).h1 to 2, send O.work[0:8).h3.c2 to 2\n",
)
GOOD = GOOD.replace(
    "  launch 1: receive O.work[0:8).h1 from 1\n  wait 1\n  merge O.work[0:8).h1 -> O.home[0:8).h1\n",
    "  launch 1: receive O.work[0:8).h1 from 1, receive O.work[8:16).h3 from 1\n  wait 1\n"
    "  merge O.work[0:8).h1 -> O.home[0:8).h1, O.work[8:16).h3 -> O.home[0:8).h3\n",
).replace("[[0, 1], [0]]", "[[0, 1], [0], [2, 3], [1]]")


def broken(*edits: tuple[str, str], rank: int, phase: str = "forward") -> Plan:
    """The good plan with texts of one rank's program replaced, sealed again."""
    before, section = GOOD.split(f"\nrank {rank}\n")
    section, *after = section.split(f"\nrank {rank + 1}\n")
    forward, backward = section.split("program default backward")
    part = forward if phase == "forward" else backward
    for old, new in edits:
        assert part.count(old) == 1, old
        part = part.replace(old, new)
    section = "program default backward".join((part, backward) if phase == "forward" else (forward, part))
    return text.parse(f"\nrank {rank + 1}\n".join([f"{before}\nrank {rank}\n{section}", *after]))


def first(plan: Plan) -> Violation:
    violations = check(plan)
    assert violations
    return violations[0]


def test_the_good_plan_verifies() -> None:
    verify(text.parse(GOOD))


@pytest.mark.parametrize("name", NAMES)
def test_hand_written_plans_of_all_ops_verify(name: str) -> None:
    plan = text.parse((PLANS / f"{name}.txt").read_text())
    assert check(plan) == ()
    assert check(codec.decode(plan.encode())) == ()


def test_rules_are_a_table_of_the_eight() -> None:
    assert {rule.number for rule in RULES} == {None, *range(1, 10)}


# rule, rank, phase, instruction at which it is found, the edit, words of the message
CASES = {
    # 4: transfers
    "receive another number of rows": (
        "transfers", 2, "forward", 0, ("receive KV.work[0:8) from 0", "receive KV.work[0:7) from 0"),
        "receives KV rows [0, 7) in round 0, but rank 0 sends KV rows [0, 8)",
    ),
    "receive another tensor": (
        "transfers", 1, "forward", 0, ("receive KV.work[0:8) from 0, receive Q.work[0:8) from 2",
                                       "receive KV.work[0:8) from 0, receive KV.work[0:8) from 2"),
        "receives KV rows [0, 8) in round 0, but rank 2 sends Q rows [0, 8)",
    ),
    "receive other heads": (
        "transfers", 2, "forward", 4, ("receive O.work[0:8).h1 from", "receive O.work[0:8).h3 from"),
        "of head set 3 in round 1, but rank 1 sends O rows [0, 8) of head set 1",
    ),
    "send to itself": (
        "transfers", 2, "forward", 0, ("send Q.home[0:8) to 1", "send Q.home[0:8) to 2"), "itself",
    ),
    "swap the transfers of a pair": (
        "transfers", 2, "forward", 4,
        ("receive O.work[0:8).h1 from 1, receive O.work[8:16).h3 from 1",
         "receive O.work[8:16).h3 from 1, receive O.work[0:8).h1 from 1"),
        "head set",
    ),
    "launch in falling order": (
        "transfers", 0, "backward", 4, ("launch 1:", "launch 0:"), "rounds must rise",
    ),
    "forget a wait": ("transfers", 1, "forward", 6, ("  wait 1\n", ""), "never waits"),
    "wait twice": ("transfers", 1, "forward", 8, ("  wait 1\n", "  wait 1\n  wait 1\n"), "a second time"),
    "wait before the launch": (
        "transfers", 2, "forward", 4, ("  launch 1:", "  wait 1\n  launch 1:"), "not launched before",
    ),
    "another channel": ("transfers", 2, "forward", 0, ("launch 0:", "launch 0 channel 3:"), "channel 3, but rank 0"),
    "another mode": ("transfers", 2, "forward", 4, ("launch 1:", "launch 1 all_to_all:"), "mode"),
    # 7: heads
    "another KV head": ("heads", 1, "forward", 4, (".h1 KV.home[0:8).h2", ".h1 KV.home[0:8).h4"), "needs KV head 0"),
    # 3: dataflow
    "read before the wait": (
        "dataflow", 2, "forward", 2,
        ("  wait 0\n  attend Q.home[0:8) KV.work[0:8) -> O.home[0:8) full\n",
         "  attend Q.home[0:8) KV.work[0:8) -> O.home[0:8) full\n  wait 0\n"),
        "reads KV work rows [0, 8), which a receive not yet waited for is filling",
    ),
    "read what nobody wrote": (
        "dataflow", 2, "forward", 3, ("attend Q.home[0:8) KV.work[0:8)", "attend Q.home[0:8) KV.work[1:9)"),
        "KV work rows [8, 9), which nothing has written",
    ),
    "accumulate onto nothing": (
        "dataflow", 1, "forward", 1, ("causal first", "causal"), "adds to O home rows [0, 8), which nothing has written",
    ),
    "overwrite what is being sent": (
        "dataflow", 1, "forward", 7,
        ("  wait 1\n", "  attend Q.home[0:8) KV.home[0:8) -> O.work[0:8) causal first\n  wait 1\n"),
        "overwrites O work rows [0, 8), which a send not yet waited for is reading",
    ),
    "write what is being received": (
        "dataflow", 2, "forward", 1, ("  attend Q.home[0:8) KV.home[0:8)",
                                      "  copy KV.home[0:8) -> KV.work[0:8)\n  attend Q.home[0:8) KV.home[0:8)"),
        "writes KV work rows [0, 8), which a receive not yet waited for is filling",
    ),
    "pair queries with other gradients": (
        "dataflow", 2, "backward", 2,
        ("Q.home[0:8) KV.home[0:8) dO.home[0:8) delta.home[0:8) -> dQ.home[0:8) dKV.home[0:8) causal",
         "Q.home[0:4) KV.home[0:8) dO.home[4:8) delta.home[0:4) -> dQ.home[0:4) dKV.home[0:8) causal"),
        "pairs dO home rows [4, 8) of tokens [20, 24) with tokens [16, 20)",
    ),
    "read other heads than were written": (
        "dataflow", 1, "forward", 6, ("send O.work[0:8).h1 to 2", "send O.work[0:8).h1.c2 to 2"), "heads",
    ),
    # 5: delivery
    "merge twice": (
        "delivery", 2, "forward", 6,
        ("O.work[0:8).h1 -> O.home[0:8).h1,", "O.work[0:8).h1 -> O.home[0:8).h1, O.work[0:8).h1 -> O.home[0:8).h1,"),
        "whose partial was merged, added or sent before",
    ),
    "forget to merge": (
        "delivery", 2, "forward", None, ("O.work[0:8).h1 -> O.home[0:8).h1, ", ""),
        "ends with a partial of tokens [16, 24) in O work rows [0, 8)",
    ),
    "overwrite a partial": (
        "delivery", 2, "forward", 3, ("O.home[0:8) full\n", "O.home[0:8) full first\n"),
        "overwrites O home rows [0, 8), which hold a partial of tokens [16, 24)",
    ),
    "finish twice": ("delivery", 0, "forward", 4, ("  finish O.home[0:8)\n", "  finish O.home[0:8)\n" * 2), "finished"),
    "forget to finish": ("delivery", 0, "forward", None, ("  finish O.home[0:8)\n", ""), "not finished"),
    "compute delta twice": (
        "delivery", 2, "backward", 1, ("  delta dO.home[0:8) O.home[0:8) -> delta.home[0:8)\n",
                                       "  delta dO.home[0:8) O.home[0:8) -> delta.home[0:8)\n" * 2), "second time",
    ),
    # 2: coverage
    "attend to later keys": (
        "coverage", 0, "forward", 1, ("KV.home[0:8) -> O.home[0:8) causal", "KV.home[0:8) -> O.home[0:8) full"),
        "computes 28 forbidden pairs",
    ),
    "attend twice": (
        "coverage", 2, "forward", 4,
        ("KV.work[0:8) -> O.home[0:8) full\n", "KV.work[0:8) -> O.home[0:8) full\n  attend Q.home[0:8) KV.work[0:8) -> O.home[0:8) full\n"),
        "again that rank 2, instruction 3 computes",
    ),
    "leave a task out": (
        "coverage", 2, "forward", None, ("  attend Q.home[0:8) KV.work[0:8) -> O.home[0:8) full\n", ""),
        "leave out 64 of 300 allowed pairs, in 1 bands of the mask; the first is query 16 (home row 0 of rank 2), key 0",
    ),
    "leave the first task out": (
        "coverage", 0, "forward", None, ("  attend Q.home[0:8) KV.home[0:8) -> O.home[0:8) causal first\n", ""),
        "leave out 36 of 300",
    ),
    "leave a diagonal out": (
        "coverage", 1, "backward", None, ("dKV.home[0:8) causal", "dKV.home[0:8) [1,7]"), "query 8 (home row 0 of rank 1), key 8",
    ),
    # structure
    "an accumulator as keys": (
        "operands", 0, "forward", 1, ("attend Q.home[0:8) KV.home[0:8)", "attend Q.home[0:8) Q.home[0:8)"), "must be KV",
    ),
    "rows that differ": (
        "operands", 0, "forward", 1, ("-> O.home[0:8) causal", "-> O.home[0:7) causal"), "another number of rows",
    ),
    "heads that differ": (
        "operands", 1, "forward", 4, ("-> O.work[0:8).h1 full", "-> O.work[0:8).h3 full"), "other heads",
    ),
    "a band beyond the rows": ("operands", 0, "forward", 1, ("causal", "[0,8]"), "goes beyond the rows"),
    "home rows that are not there": (
        "operands", 0, "forward", None, ("finish O.home[0:8)", "finish O.home[0:9)"), "ends after the last of 8 rows",
    ),
    "finish in work rows": ("operands", 0, "forward", 3, ("finish O.home", "finish O.work"), "must be at home"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_plan_broken_in_one_place_is_refused_there(case: str) -> None:
    rule, rank, phase, instruction, edit, words = CASES[case]
    found = first(broken(edit, rank=rank, phase=phase))
    assert (found.rule, found.rank, found.phase, found.instruction) == (rule, rank, phase, instruction), str(
        found
    )
    assert words in found.message
    assert (found.excerpt == "") == (instruction is None)


def test_a_send_to_another_rank_is_shown_at_both_ends() -> None:
    found = check(broken(("send Q.home[0:8) to 1", "send Q.home[0:8) to 0"), rank=2))
    assert {(v.rule, v.rank, v.instruction) for v in found[:2]} == {("transfers", 1, 0), ("transfers", 2, 0)}
    assert all("nothing to meet it" in violation.message for violation in found[:2])


def test_the_error_shows_rank_instruction_numbers_and_lines() -> None:
    edit = ("receive KV.work[0:8) from 0", "receive KV.work[0:7) from 0")
    with pytest.raises(VerifyError) as error:
        verify(broken(edit, rank=2))
    message = str(error.value)
    assert "rank 2, default forward, instruction 0: receives KV rows [0, 7) in round 0" in message
    assert ">    0  launch 0: receive KV.work[0:7) from 0, send Q.home[0:8) to 1" in message
    assert error.value.violations[0].rule == "transfers"


# ---- what is not in programs


def with_spans(plan: Plan, column: str, span: int, value: int) -> Plan:
    spans = plan.layouts["attention"].spans
    columns = {name: np.array(values, np.int64) for name, values in spans.columns.items()}
    columns[column][span] = value
    return codec.seal(replace(plan, layouts={"attention": Layout("attention", Table(spans.ptr, columns))}))


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("token", 9, "no span holds tokens [8, 9)"),
        ("token", 7, "tokens [7, 8) are on another row too"),
        ("row", 1, "begins at row 1, but the rows before it end at 0"),
        ("position", 3, "says position 3, but its first token has 8"),
        ("sequence", 1, "says sequence 1, but its tokens are of sequence 0"),
        ("length", 7, "no span holds tokens [15, 16)"),
    ],
)
def test_layouts(column: str, value: int, words: str) -> None:
    found = check(with_spans(text.parse(GOOD), column, 1, value))
    assert found[0].rule == "layouts"
    assert any(words in violation.message for violation in found)


def test_a_span_across_a_restart_of_positions() -> None:
    plan = text.parse((PLANS / "heads.txt").read_text())
    spans = plan.layouts["attention"].spans
    rows = {"row": [0, 0], "token": [0, 8], "length": [8, 8], "sequence": [0, 0], "position": [0, 8]}
    columns = {name: np.array(values) for name, values in rows.items()}
    assert set(columns) == set(spans.columns)
    table = Table(np.array([0, 1, 2]), columns)
    found = first(codec.seal(replace(plan, layouts={"attention": Layout("attention", table)})))
    assert (found.rule, found.rank) == ("layouts", 1)
    assert "goes on from token 11, where the position does not count on" in found.message


def test_moves_make_the_target_layout() -> None:
    plan = text.parse((PLANS / "reshuffle.txt").read_text())
    (move,) = plan.moves
    columns = {name: np.array(values) for name, values in move.table.columns.items()}
    receives = np.flatnonzero(columns["send"] == 0)[:2]
    columns["row"][receives] = columns["row"][receives[::-1]]
    swapped = Move(move.source, move.target, Table(move.table.ptr, columns))
    found = first(codec.seal(replace(plan, moves=(swapped,))))
    assert found.rule == "layouts"
    assert "move attention -> linear: makes rows" in found.message


def with_policy(plan: Plan, **fields: object) -> Plan:
    policy = replace(plan.request.policy, **fields)
    return codec.seal(replace(plan, request=replace(plan.request, policy=policy)))


@pytest.mark.parametrize(
    ("fields", "rank", "words"),
    [
        ({"token_cap": 7}, 0, "holds 8 tokens in layout attention, the token cap is 7"),
        ({"memory_cap_gib": 1e-7}, 0, "GiB of work rows, the memory cap is 1e-07 GiB"),
        ({"tolerance": 0.2}, 1, "more than the mean rank, the tolerance is 0.2"),
    ],
)
def test_limits(fields: dict[str, object], rank: int, words: str) -> None:
    found = first(with_policy(text.parse(GOOD), **fields))
    assert found.rule == "limits"
    assert words in found.message
    assert found.rank is not None


def test_limits_that_hold() -> None:
    assert check(with_policy(text.parse(GOOD), token_cap=8, memory_cap_gib=1.0, tolerance=1.0)) == ()


def test_digests() -> None:
    plan = text.parse(GOOD)
    forged = replace(plan, sections=replace(plan.sections, id=bytes(32)))
    assert first(forged).rule == "digests"
    parts = [plan.sections.parts[0], plan.sections.parts[1], plan.sections.parts[1]]
    assert first(replace(plan, sections=replace(plan.sections, parts=parts))).rule == "digests"
    edited = replace(broken(("causal", "full"), rank=0), sections=plan.sections)
    assert (first(edited).rule, first(edited).rank) == ("digests", 0)
    assert "seal the plan after a change" in first(edited).message


def test_a_head_that_nobody_computes() -> None:
    lines = [line for line in GOOD.splitlines() if ".h3" not in line or "launch" in line or "merge" in line]
    whole = (
        "\n".join(lines)
        .replace(", send O.work[0:8).h3.c2 to 2", "")
        .replace(", receive O.work[8:16).h3 from 1", "")
    )
    found = first(text.parse(whole.replace(", O.work[8:16).h3 -> O.home[0:8).h3", "") + "\n"))
    assert found.rule == "coverage"
    assert "of query heads 2, 3 leave out 64 of 300" in found.message
    plan = text.parse(GOOD)
    operands = plan.programs["default", "forward"]["operands"]
    narrow = {Tensor.Q: 1, Tensor.KV: 2, Tensor.O: 1}
    heads = np.array([narrow.get(Tensor(int(tensor)), 0) for tensor in operands["tensor"]])
    narrowed = {**operands.columns, "heads": heads}
    found = first(with_table(plan, "operands", Table(operands.ptr, narrowed)))
    assert (found.rule, found.message) == ("heads", "no task computes query heads 2, 3 (2 of 4 heads)")


def with_table(plan: Plan, name: str, table: Table) -> Plan:
    key = ("default", "forward")
    programs = {**plan.programs, key: ProgramSet({**plan.programs[key].tables, name: table})}
    return codec.seal(replace(plan, programs=programs))


def test_an_overwritten_tile_is_named_where_a_task_then_reads_something_else() -> None:
    """The keys of rank 1 come too early: they overwrite those of rank 0 before anybody has read them."""
    plan = (PLANS / "reshuffle.txt").read_text()
    assert plan.count("receive KV.work[8:16) from 1\n") >= 1
    late = plan.replace("receive KV.work[8:16) from 1\n", "receive KV.work[4:12) from 1\n", 1)
    found = first(text.parse(late))
    assert found.rule in ("dataflow", "coverage")
    assert found.rank == 0


REPORTED = {
    "bytes.total": "the report says bytes.total = ",
    "bytes.max_rank": "the report says bytes.max_rank = ",
    "bytes.inter_node": "the report says bytes.inter_node = ",
    "plan_bytes.total": "the report says plan_bytes.total = ",
    "plan_bytes.largest_rank": "the report says plan_bytes.largest_rank = ",
    "imbalance.compute": "the report says imbalance.compute = ",
    "imbalance.tokens": "the report says imbalance.tokens = ",
    "area.default": "the report says area.default = ",
    "tokens": "the report says tokens = ",
    "ranks": "the report says ranks = ",
    "recipe": "the report says recipe = ",
    "slots": "the report says slots = ",
    "max_degree": "the report says max_degree = ",
    "rounds": "the report says rounds = ",
    "exchanges.0.bytes": "the report says that its exchanges move ",
    "bounds.makespan.value": "the report says bounds.makespan.value = ",
    "bounds.kv_bytes.value": "the report says bounds.kv_bytes.value = ",
    "bounds.slots.value": "the report says bounds.slots.value = ",
    "bounds.kv_bytes.bound": "the report says that kv_bytes is ",
}


@pytest.fixture(scope="module")
def reported() -> Plan:
    batch = ap.Batch.from_lengths([4096, 1000, 700, 300], mask=ap.masks.causal())
    return ap.plan(batch, ap.Cluster(2, 2), ap.Model(8, 4, 64), recipe="fcp", verify=False)


@pytest.mark.parametrize("place", REPORTED)
def test_a_report_that_the_programs_contradict_is_refused(place: str, reported: Plan) -> None:
    report = copy.deepcopy(dict(reported.report))
    *path, last = place.split(".")
    inner = report
    for name in path:
        inner = inner[int(name)] if name.isdigit() else inner[name]
    inner[last] = inner[last] * 3 + (inner[last] if isinstance(inner[last], str) else 1) if inner[last] else 7
    found = check(codec.seal(replace(reported, report=report)))
    assert {violation.rule for violation in found} == {"report"}
    assert any(violation.message.startswith(REPORTED[place]) for violation in found)


def test_a_report_may_say_less_or_more(reported: Plan) -> None:
    assert check(reported) == ()
    assert check(codec.seal(replace(reported, report={}))) == ()
    assert check(codec.seal(replace(reported, report={**reported.report, "weather": "fine"}))) == ()


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
def test_a_report_that_is_malformed_or_contradicts_itself_is_refused(change: dict, reported: Plan) -> None:
    found = check(codec.seal(replace(reported, report={**reported.report, **change})))
    assert {violation.rule for violation in found} == {"report"}

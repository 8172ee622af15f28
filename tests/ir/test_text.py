"""The text form: it parses back to an equal plan, is readable, and its errors name the place."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from apportion import ConfigError, DecodeError, Plan
from apportion.ir.bytes import codec
from apportion.ir.isa import TABLES, Op
from apportion.ir.text import excerpt, format_instruction
from tests.support.parse import parse
from tests.support.random_plans import random_plan

REQUEST = """request {
  "batch": {"lengths": [8, 3], "mask": {"causal": {}}},  "cluster": {"nodes": 1, "ranks_per_node": 2},
  "model": {"q_heads": 2, "kv_heads": 1, "head_dim": 4, "hidden": 8, "ffn": 8, "layers": 1},
  "policy": {"recipe": {"name": "by-hand", "steps": {}}}
}"""

BY_HAND = f"""# a comment
apportion.plan 3.0
header {{"head_sets": [[0], [1]]}}   # the rest follows
{REQUEST}

rank 0
layout attention: row=0 token=0 length=8 sequence=0 position=0
program default forward
  launch 0 channel 1 all_to_all: send KV.home[0:8) to 1, receive Q.work[0:3).h1.c1 from 1
  wait 0   # now
  attend Q.home[0:8) KV.home[0:8) -> O.home[0:8) causal first, Q.home[2:4) KV.home[2:8) -> O.work[2:4) [-3, 0]
  merge O.work[2:4).h2 -> O.home[2:4).h2 first
  project X.home[0:8) -> none KV.work[0:8)
  finish O.home[0:8)

rank 1
layout attention: row=0 token=8 length=3 sequence=1 position=0
program default forward
  launch 0 channel 1 all_to_all: receive KV.work[0:8) from 0, send Q.home[0:3).h1 to 0
  wait 0
"""


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1))
def test_text_parses_back(seed: int) -> None:
    plan = random_plan(seed)
    again = parse(plan.text())
    assert again == plan
    for key, program in plan.programs.items():
        assert all(program[name].equal(again.programs[key][name]) for name in TABLES)
    assert again.text() == Plan.decode(plan.encode()).text() == plan.text()


def test_instructions_have_readable_lines() -> None:
    plan = parse(BY_HAND)
    with pytest.raises(ConfigError, match="rank = 2"):
        plan.text(2)
    assert plan.text(rank=0).splitlines() == [
        "rank 0",
        "layout attention: row=0 token=0 length=8 sequence=0 position=0",
        "program default forward",
        "  arenas Q 3x2, KV 8x1, O 4x2",
        "  launch 0 channel 1 all_to_all: send KV.home[0:8) to 1, receive Q.work[0:3).h1.c1 from 1",
        "  wait 0",
        "  attend Q.home[0:8) KV.home[0:8) -> O.home[0:8) causal first,"
        " Q.home[2:4) KV.home[2:8) -> O.work[2:4) [-3,0]",
        "  merge O.work[2:4).h2 -> O.home[2:4).h2 first",
        "  project X.home[0:8) -> none KV.work[0:8)",
        "  finish O.home[0:8)",
    ]


def test_causal_and_full_bounds_have_names() -> None:
    plan = parse(BY_HAND.replace("causal first", "[0,7] first").replace("[-3, 0]", "[-5,1]"))
    line = format_instruction(plan.program(0, "default", "forward"), 2)
    assert " causal first, " in line
    assert line.endswith(" full")


def test_excerpts_point_at_the_instruction() -> None:
    program = parse(BY_HAND).program(0, "default", "forward")
    assert excerpt(program, 3, context=1).splitlines() == [
        "     2  " + format_instruction(program, 2),
        ">    3  merge O.work[2:4).h2 -> O.home[2:4).h2 first",
        "     4  project X.home[0:8) -> none KV.work[0:8)",
    ]
    assert excerpt(program, 0, context=0) == ">    0  " + format_instruction(program, 0)
    for index, op in enumerate(program["instructions"]["op"]):
        assert format_instruction(program, index).startswith(Op(op).name.lower())


def test_names_may_contain_any_character() -> None:
    name = 'my: layout -> x; "y" # \n'
    quoted = json.dumps(name).replace("#", "\\u0023")
    text = BY_HAND.replace("layout attention", f"layout {quoted}")
    plan = parse(text.replace('{"head_sets"', f'{{"home_layout": {json.dumps(name)}, "head_sets"'))
    assert plan.header.layouts == (name,)
    assert f"layout {quoted}: row=0" in plan.text()
    assert parse(plan.text()) == plan


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ("apportion.plan 3.0", "apportion.plan 3.7", "line 2: this release reads texts up to version 3.0"),
        ('"head_sets": [[0], [1]]', '"diagonals": {"default": [[0, 5]]}', "the requested masks have"),
        ("wait 0   # now", "wiat 0", "line 14: unknown word 'wiat'"),
        ("merge O.work[2:4).h2", "merge O.work[4:4)", "line 16: operand .* has no rows"),
        (".h2 first", ".h2 second", "line 16: merge: unexpected 'second'"),
        ("[-3, 0]", "diagonal", "line 15: expected 'causal', 'full'"),
        ("send KV.home[0:8) to 1", "send KV.home[0:8) from 1", "line 13: write 'send"),
        ("send KV.home[0:8) to 1", "send KV.home[0:8) to 7", "rank 0, .* transfers row 0: peer"),
        ("program default forward", "program default sideways", "line 12: unknown phase"),
        ("  finish", "program default forward\n  finish", "line 18: a second program"),
        ('"head_sets": [[0], [1]]', '"head_sets": [[0], [7]]', "distinct heads below 2"),
        ('"head_sets": [[0], [1]]', '"seed": 1, "seed": 2', "a key appears twice"),
        ('"head_sets": [[0], [1]]', '"kinds": ["default", "other"]', "kind other has no program"),
        ("rank 0", 'report {"x": 1e999}\nrank 0', "not a finite"),
    ],
)
def test_errors_name_the_line(old: str, new: str, match: str) -> None:
    assert old in BY_HAND
    with pytest.raises(DecodeError, match=match):
        parse(BY_HAND.replace(old, new, 1))


def test_narrow_columns_print_like_wide_ones() -> None:
    plan = parse(BY_HAND)
    program = plan.programs["default", "forward"]
    narrow = {
        name: replace(table, values=table.values.astype(np.int32)) for name, table in program.tables.items()
    }
    programs = {("default", "forward"): replace(program, tables=narrow)}
    assert codec.seal(replace(plan, programs=programs)).text() == plan.text()

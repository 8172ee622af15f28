"""Bytes of plans and slices: what goes in comes out, alike everywhere, and nothing else is let in."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import tracemalloc
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import msgpack
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from apportion.ir import hashing
from apportion.ir.bytes import codec, table_bytes, wire
from apportion.ir.bytes.cells.columns import DENSEST, MAX_ROWS, Cell, Cells
from apportion.ir.bytes.cells.numbers import BITS, EACH, FEW, SAME, read_numbers, write_numbers
from apportion.ir.bytes.cells.predictions import RULES, Named, Rule, rules_of
from apportion.ir.bytes.cells.sources import room_for
from apportion.ir.bytes.codec import Plan
from apportion.ir.bytes.parts import encode_table, encoder
from apportion.ir.bytes.sections import Sections, section_id
from apportion.ir.bytes.slices import Slice
from apportion.ir.errors import (
    ApportionError,
    CapacityError,
    ConfigError,
    DecodeError,
    UnknownNameError,
    VersionError,
)
from apportion.ir.isa import LIMIT, MOVE_COLUMNS, SPAN_COLUMNS, TABLES, VERSION
from apportion.ir.loops.jit import COMPILES
from apportion.ir.plan.tables import Layout, ProgramSet, Table, empty_table
from tests.support.random_plans import random_plan
from tests.support.stand_alone import read_plan

SEEDS = st.integers(0, 2**32 - 1)


def same_tables(a: Plan, b: Plan) -> bool:
    """Equal by value, whatever the dtypes."""
    return (
        a.header == b.header
        and all(a.layouts[name].spans.equal(b.layouts[name].spans) for name in a.header.layouts)
        and a.programs.keys() == b.programs.keys()
        and all(
            a.programs[key][name].equal(b.programs[key][name])
            for key in a.programs
            for name in a.programs[key].tables
        )
        and all(m.table.equal(n.table) for m, n in zip(a.moves, b.moves, strict=True))
        and dict(a.report) == dict(b.report)
    )


@pytest.fixture(scope="module")
def plan() -> Plan:
    """A plan of 5 ranks with two layouts and a move."""
    found = (codec.seal(random_plan(seed, ranks=5)) for seed in range(100))
    return next(
        p for p in found if p.moves and ("default", "backward") in p.programs and p.report and _has_rows(p)
    )


def _has_rows(plan: Plan) -> bool:
    """Of the rank that tests change, in the program that they change."""
    program = plan.programs["default", "forward"].rank(1)
    return len(program["operands"]) > 0 and len(program["instructions"]) > 0


# ---------------------------------------------------------------------------------------------- round trips


@settings(max_examples=60)
@given(SEEDS)
def test_decode_gives_what_was_encoded(seed: int) -> None:
    plan = random_plan(seed)
    data = plan.encode()
    again = Plan.decode(data)
    assert again == plan
    assert same_tables(again, plan)
    assert again.encode() == data
    assert codec.seal(again).encode() == data


@settings(max_examples=40)
@given(SEEDS)
def test_slices_hold_their_rank_and_prove_it(seed: int) -> None:
    plan = codec.seal(random_plan(seed))
    rank = seed % plan.header.ranks
    piece = Slice.decode(plan.for_rank(rank).encode())
    assert (piece.id, piece.rank, piece.ranks, piece.header) == (
        plan.id,
        rank,
        plan.header.ranks,
        plan.header,
    )
    assert piece == plan.for_rank(rank)
    assert piece.wire.part == plan.sections.parts[rank]
    for key, program in piece.programs.items():
        expected = plan.program(rank, *key)
        assert all(program[name].equal(expected[name]) for name in TABLES)
    for name in plan.header.layouts:
        assert piece.layout(name).spans.equal(plan.layouts[name].spans.rank(rank))
    assert [(m.source, m.target) for m in piece.moves] == [(m.source, m.target) for m in plan.moves]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_every_rank_of_every_tree_proves_itself(ranks: int) -> None:
    plan = codec.seal(random_plan(7, ranks))
    for rank in range(ranks):
        assert Slice.decode(plan.for_rank(rank).encode()).id == plan.id


def test_decoded_columns_are_safe_to_add(plan: Plan) -> None:
    again = Plan.decode(plan.encode())
    for program in again.programs.values():
        for table in program.tables.values():
            assert all(column.dtype == np.int64 for column in table.columns.values())


@settings(max_examples=30)
@given(SEEDS)
def test_the_reader_of_the_prose_reads_the_same(seed: int) -> None:
    plan = codec.seal(random_plan(seed))
    for rank, part in enumerate(plan.sections.parts):
        read = read_plan.read_part(part)
        tables = dict(zip(plan.header.layouts, read["layouts"], strict=True))
        assert all(rows_of(plan.layouts[name].spans.rank(rank)) == tables[name] for name in tables)
        moves = zip(plan.moves, read["moves"], strict=True)
        assert all(rows_of(move.table.rank(rank)) == rows for move, rows in moves)
        for (kind, phase), program in plan.programs.items():
            for name, rows in read["programs"][kind][phase].items():
                assert rows_of(program[name].rank(rank)) == [drop_source(row) for row in rows]


def rows_of(table: Table) -> list[dict[str, int]]:
    names = list(table.columns)
    return [dict(zip(names, map(int, row), strict=True)) for row in zip(*table.columns.values(), strict=True)]


def drop_source(row: dict[str, int]) -> dict[str, int]:
    return {name: value for name, value in row.items() if name != "source"}


# ---------------------------------------------------------------------------------------------- numbers and cells


def written(numbers: list[int]) -> bytes:
    out, held = np.empty(9 * len(numbers) + 9, np.uint8), np.array(numbers, np.int64)
    places = np.flatnonzero(held)
    return out[: write_numbers(places, held[places], len(places), len(numbers), out, 0)].tobytes()


def read(data: bytes, rows: int) -> list[int] | None:
    """None where they are not written so."""
    places, numbers = np.full((2, rows + 1), 77)
    end = read_numbers(np.frombuffer(data, np.uint8), 0, len(data), rows, places, numbers)
    assert end in (-1, len(data))
    if end < 0:
        return None
    count, found = places.tolist().index(-1), np.zeros(rows, np.int64)
    found[places[:count]] = numbers[:count]
    return found.tolist()


@pytest.mark.parametrize(
    ("numbers", "data"),
    [
        ([0, 0, 0], [SAME]),
        ([5, *[0] * 99], [FEW, 1, 0, 10]),
        ([5, 0, 0], [BITS, 1, 10]),
        ([0] * 9 + [-1] + [0] * 200 + [64], [FEW, 2, 9, 1, 200 & 127 | 128, 1, 128, 1]),
        ([1, 0, -1, 0, 1, 1, 0, -300], [BITS, 0b10110101, 2, 1, 2, 2, 0xD7, 4]),
        ([1, 2, 3], [EACH, 2, 4, 6]),
    ],
)
def test_the_shortest_form_is_taken(numbers: list[int], data: list[int]) -> None:
    assert written(numbers) == bytes(data)
    assert read(bytes(data), len(numbers)) == numbers


@settings(max_examples=200)
@given(
    st.lists(
        st.sampled_from([0, 0, 0, 0, 1, -1, 63, -64, 64, 2**20, -(2**48), 2**50]), min_size=1, max_size=60
    )
)
def test_numbers_come_back_and_end_where_they_do(numbers: list[int]) -> None:
    data = written(numbers)
    assert read(data, len(numbers)) == numbers
    for end in range(len(data)):
        assert read(data[:end], len(numbers)) is None


@pytest.mark.parametrize(
    "data",
    [
        [4],  # no such form
        [EACH, 1, 1],  # too few
        [EACH, 1, 1, 129],  # without an end
        [EACH, 1, 1, *[255] * 8, 0],  # too long
        [FEW, 4, 0, 1, 0, 1, 0, 1, 0, 1],  # more than rows
        [FEW, 1, 3, 1],  # beyond the last row
        [FEW, 1, *[255] * 7, 1, 1],
        [BITS, 0b1001, 1, 1],  # beyond the last row
    ],
)
def test_malformed_numbers(data: list[int]) -> None:
    assert read(bytes(data), 3) is None


@st.composite
def tables(draw: st.DrawFn) -> tuple[str, Table]:
    """A table of a plan by name, whose numbers are small, alike, or anything."""
    name = draw(st.sampled_from(sorted(RULES.keys() - {"operands"})))
    sizes = draw(st.lists(st.sampled_from([0, 0, 1, 2, 7, 8, 9, 40]), min_size=1, max_size=5))
    number = draw(st.sampled_from([st.integers(-3, 9), st.integers(0, 1), st.integers(-(2**48), 2**48)]))
    total = sum(sizes)
    rows = st.lists(number, min_size=total, max_size=total)
    columns = {rule.column: np.array(draw(rows), np.int64) for rule in RULES[name]}
    if draw(st.booleans()):
        columns = {column: np.sort(values) for column, values in columns.items()}
    return name, Table(np.cumsum([0, *sizes]), columns)


def some_operands(ranks: int) -> Named:
    """Five operands of each rank."""
    held = np.arange(5 * ranks) % 7 + 1
    return Named(held, 5 * np.arange(ranks), np.full(ranks, 5), np.zeros(ranks, np.int64))


def cells_of(table: Table, rules: tuple[Rule, ...]) -> list[Cell]:
    data, stops = encode_table(table, rules)
    assert stops[-1] == len(data)
    return [data[a:b].tobytes() for a, b in pairwise([0, *stops.tolist()])]


def program_of(ranks: int, **tables: Table) -> dict[str, Table]:
    return {name: empty_table(columns, ranks) for name, columns in TABLES.items()} | tables


def cells_among(name: str, table: Table, ranks: int = 9) -> list[Cell]:
    """The cells of a table of a plan that has `some_operands`."""
    held = some_operands(table.ranks).held
    operands = Table(5 * np.arange(table.ranks + 1), dict.fromkeys(TABLES["operands"], held))
    tables = {name: table} if name in TABLES else {}
    programs = {("x", "forward"): program_of(table.ranks, operands=operands, **tables)}
    layouts, moves = ([table] if name == held else [] for held in ("spans", "moves"))
    parts = encoder(layouts, programs, moves, ranks).parts(range(table.ranks))
    read = [wire.read_part(part, rank, VERSION) for rank, part in enumerate(parts)]
    if name in TABLES:
        return [part.programs["x"]["forward"][list(TABLES).index(name)] for part in read]
    return [(part.layouts + part.moves)[0] for part in read]


def opened(cells: list[bytes], rules: tuple[Rule, ...], ranks: int = 9, lenient: bool = False) -> Table:
    return Cells(cells, "here", 3).table(rules, ranks, some_operands(len(cells)), lenient)


@settings(max_examples=300)
@given(tables())
def test_tables_come_back_from_their_cells(given: tuple[str, Table]) -> None:
    name, table = given
    cells = cells_among(name, table)
    again = opened(cells, RULES[name])
    assert again.equal(table)
    assert all(column.dtype == np.int64 for column in again.columns.values())
    for rank, cell in enumerate(cells):
        own = table.rank(rank)
        assert bool(cell) == bool(len(own))
        assert len(own) <= DENSEST * len(cell)
        held = some_operands(rank + 1).held[5 * rank :]
        named = Named(held, np.array([0]), np.array([5]), np.array([0]))
        assert (
            Cells([cell], "here", rank).table(RULES[name], 9, named, False).equal(own)
        )  # and needs no other's


@pytest.mark.parametrize("order", ["<i8", ">i8", "<i4", "u1"])
def test_any_integers_are_written(order: str) -> None:
    table = Table(np.array([0, 2]), {"x": np.array([3, 200], order)})
    assert cells_of(table, rules_of(("x",))) == [bytes([2, EACH, 6, 0x8A, 3])]


def test_regular_tables_are_no_smaller_than_they_may_be() -> None:
    table = Table(np.array([0, 1000, 1000, 1003]), {"x": np.full(1003, 6)})
    cells = cells_of(table, rules_of(("x",)))
    assert [len(cell) for cell in cells] == [500, 0, 4]
    assert cells[0] == bytes([0xE8, 7, FEW, 1, 0, 12]) + bytes(494)
    assert opened(cells, rules_of(("x",))).equal(table)


NAMES = rules_of(("a", "b"))
CELL = bytes([3, EACH, 2, 2, 2, FEW, 1, 1, 1])


def test_a_cell_by_hand() -> None:
    found = opened([CELL, b"", CELL], NAMES)
    assert found.ptr.tolist() == [0, 3, 3, 6]
    assert [found[name][3:].tolist() for name in ("a", "b")] == [[1, 2, 3], [0, -1, -1]]


@pytest.mark.parametrize(
    ("cell", "match"),
    [
        (bytes([128]), "rank 4, here: does not begin with its number of rows"),
        (bytes([0]), "rank 4, here: 0 rows in 1 bytes"),
        (bytes([0, 0, 0]), "0 rows in 3 bytes"),
        (bytes([7, 0, 0]), "7 rows in 3 bytes"),
        (bytes([255] * 7 + [1]), "rows in 8 bytes"),
        (CELL[:-1], "rank 4, here: column 'b' is not written as the format says"),
        (bytes([3, 7, 0]), "column 'a' is not written"),
        (bytes([3, 0]), "column 'b' is not written"),
        (bytes([3, 0, 0, 0]), "1 bytes are left over"),
        (CELL + bytes([1, 1]), "2 bytes are left over"),
        (bytes([6, 0, 0]), None),
        (bytes([9, 0, 0, 0, 0]), None),
        (bytes([9, 0, 0, 0, 1]), "2 bytes are left over"),
        (bytes([9, 0, 0, 0, 0, 0]), "3 bytes are left over"),
        (bytes([1, FEW, 1, 0, *[128] * 7, 2, 0]), "column 'a' has a number outside"),
        (bytes([1, 0, FEW, 1, 0, *[255] * 7, 1]), "column 'b' has a number outside"),
    ],
)
def test_malformed_cells(cell: bytes, match: str | None) -> None:
    if match is None:
        assert len(opened([CELL, cell], NAMES)) == 3 + cell[0]
    else:
        with pytest.raises(DecodeError, match=match):
            opened([CELL, cell], NAMES)


def test_sums_beyond_an_int64_are_refused() -> None:
    """The largest steps that a number can say, one upon another: none is taken for what it wraps around to."""
    step = bytes([*[255] * 7, 127])
    for sign in (0, 1):
        far = bytes([step[0] - 1 + sign, *step[1:]])
        with pytest.raises(DecodeError, match="'a' has a number outside"):
            opened([bytes([200, 1, EACH]) + far * 200 + bytes([SAME])], NAMES)


def test_columns_behind_the_known_ones_are_for_later_versions() -> None:
    longer = CELL + bytes([EACH, 1, 2, 3])
    assert opened([longer, CELL], NAMES, lenient=True).equal(opened([CELL, CELL], NAMES))
    with pytest.raises(DecodeError, match="4 bytes are left over"):
        opened([longer, CELL], NAMES)


@pytest.mark.parametrize("value", [LIMIT + 1, -LIMIT - 1, 2**63 - 1, -(2**63)])
def test_numbers_that_no_plan_can_hold_are_not_written(value: int) -> None:
    table = Table(np.array([0, 1, 2]), {"a": np.array([1, 2]), "b": np.array([1, value])})
    with pytest.raises(ConfigError, match=rf"b = {value}.*in row 1"):
        cells_of(table, NAMES)


def test_rows_beyond_a_cell_are_not_written() -> None:
    table = Table(np.array([0, MAX_ROWS + 1]), {"a": np.zeros(MAX_ROWS + 1, np.int8)})
    with pytest.raises(ConfigError, match=f"rows = {MAX_ROWS + 1}"):
        cells_of(table, rules_of(("a",)))


def operands_of(values: list[tuple[int, ...]]) -> Table:
    columns = np.array(values, np.int64).T
    return Table(np.array([0, len(values)]), dict(zip(TABLES["operands"], columns, strict=True)))


def test_operands_with_the_rows_of_others_take_few_bytes() -> None:
    """dQ has the rows of Q, and backward's operands those of forward."""
    none, rows = (0,) * 6, [(2, 0, 37 * n, 11 + n % 5, 0, 0) for n in range(40)]
    forward = [none, *rows, *((4, *row[1:]) for row in rows)]
    (first,) = operand_cells(operands_of(forward[:41]))
    whole, second = operand_cells(operands_of(forward), operands_of(forward))
    assert len(whole) - len(first) < 20
    assert 2 * len(second) - 1 == len(forward)  # no cell has fewer bytes


def operand_cells(*tables: Table) -> list[Cell]:
    """Those of one rank's programs with these operands."""
    programs = {(str(n), "forward"): program_of(1, operands=table) for n, table in enumerate(tables)}
    (part,) = encoder([], programs, [], 1).parts(range(1))
    at = list(TABLES).index("operands")
    return [of["forward"][at] for of in wire.read_part(part, 0, VERSION).programs.values()]


def test_a_source_before_the_first_operand_is_refused() -> None:
    cell = bytes([2, FEW, 1, 1, 4, 0, 0, 0, 0, 0, 0])
    with pytest.raises(DecodeError, match="'source' has a number outside"):
        room_for([np.array([2])], 1).read(0, Cells([cell], "here", 0), False)
    both = room_for([np.array([2]), np.array([2])], 1)
    both.read(0, Cells([bytes([2, 0, 0, 0, 0, 0, 0, 0])], "here", 0), False)
    both.read(1, Cells([cell], "here", 0), False)


def test_bytes_do_not_depend_on_the_process() -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from random_plans import random_plan\n"
        "print(*[random_plan(seed).id.hex() for seed in range(5)])"
    )
    ids = {
        subprocess.run(
            [sys.executable, "-c", code, str(Path(__file__).parents[1] / "support")],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "4711")
    }
    assert ids == {" ".join(random_plan(seed).id.hex() for seed in range(5)) + "\n"}


def test_order_of_report_and_engines_does_not_matter(plan: Plan) -> None:
    turned = replace(plan, report=dict(reversed(plan.report.items())))
    assert codec.seal(turned) == plan
    assert (
        codec.seal(replace(plan, report={**plan.report, "more": np.int64(3), "half": np.float64(0.5)}))
        != plan
    )


@pytest.mark.parametrize(
    "value",
    [
        float("nan"),
        float("-inf"),
        np.float64("nan"),
        np.float32("inf"),
        [{"deep": float("inf")}],
        b"raw",
        {1: 2},
        {"object": object()},
        2**70,
    ],
)
def test_reports_that_no_plan_can_hold(plan: Plan, value: object) -> None:
    with pytest.raises(ConfigError, match="report"):
        codec.seal(replace(plan, report={"value": value}))
    with pytest.raises(ConfigError, match="report"):
        assert replace(plan, report={"value": value}, sections=None).id


def test_parts_made_before_are_taken_over(plan: Plan) -> None:
    parts = table_bytes.encode_parts(plan.layouts, plan.programs, plan.moves, plan.header.ranks)
    assert codec.seal(plan, parts) == plan


@pytest.mark.parametrize("ranks", [1, 128, 129, 256, 257, 700])
def test_parts_are_what_msgpack_writes(ranks: int) -> None:
    filled = np.arange(ranks) % 3
    ptr = np.concatenate([[0], np.cumsum(filled)])
    rows = np.arange(ptr[-1]) % 7
    tables = {name: Table(ptr, dict.fromkeys(columns, rows)) for name, columns in TABLES.items()}
    spans, move = (Table(ptr, dict.fromkeys(columns, rows)) for columns in (SPAN_COLUMNS, MOVE_COLUMNS))
    kinds = ("x", "y" * 40)
    programs = {(kind, phase): tables for kind in kinds for phase in ("forward", "backward")}
    parts = encoder([spans], programs, [move, move], ranks).parts(range(ranks))
    for rank, part in enumerate(parts):
        read = wire.read_part(part, rank, VERSION)
        assert wire.encode_struct(read) == part
        held = bool(filled[rank])
        assert [list(map(bool, cells)) for cells in (read.layouts, read.moves)] == [[held], [held] * 2]
        assert {kind: list(phases) for kind, phases in read.programs.items()} == {
            kind: ["forward", "backward"] for kind in kinds
        }
        assert all(
            list(map(bool, cells)) == [held] * len(TABLES)
            for phases in read.programs.values()
            for cells in phases.values()
        )


def test_parts_name_neither_layouts_nor_kinds_so_their_order_is_checked(plan: Plan) -> None:
    turned = dict(reversed(plan.layouts.items()))
    with pytest.raises(ConfigError, match=r"layouts = .*in its order: attention, linear -> 2"):
        codec.seal(replace(plan, layouts=turned))
    two = next(p for p in map(random_plan, range(100)) if len(p.header.kinds) == 2)
    with pytest.raises(ConfigError, match=r"kinds = .*those of the header"):
        codec.seal(replace(two, programs=dict(reversed(two.programs.items()))))
    backwards = {key: plan.programs[key] for key in reversed(plan.programs)}
    assert codec.seal(replace(plan, programs=backwards)) == plan  # phases have an order of their own


@pytest.mark.parametrize("rows", [1, 40, 100])
def test_parts_are_the_same_however_many_are_made_at_once(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    plans = [random_plan(seed, ranks=9) for seed in range(5)]
    parts = [codec.encode_sections(plan).parts for plan in plans]
    monkeypatch.setattr(table_bytes, "_ROWS_AT_ONCE", rows)
    assert [codec.encode_sections(plan).parts for plan in plans] == parts


@pytest.mark.parametrize("threads", [2, 3, 20])
def test_parts_are_the_same_on_threads(threads: int) -> None:
    for seed in range(5):
        plan = random_plan(seed, ranks=9)
        given = plan.layouts, plan.programs, plan.moves, 9
        assert table_bytes.encode_parts(*given, threads=threads) == table_bytes.encode_parts(*given)


@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.int32, np.uint64])
def test_parts_are_the_same_for_all_dtypes(dtype: type) -> None:
    def parts(dtype: type) -> list[bytes]:
        columns = {column: np.array([0, 5, 5, 6, 90], dtype) for column in TABLES["transfers"]}
        programs = {("x", "forward"): program_of(2, transfers=Table(np.array([0, 3, 5]), columns))}
        return encoder([], programs, [], 2).parts(range(2))

    assert parts(dtype) == parts(np.int64)


def test_kinds_of_all_ranks_have_a_phase() -> None:
    plans = (random_plan(seed, ranks=1) for seed in range(50))
    one = codec.seal(next(plan for plan in plans if plan.header.kinds == ("default",)))
    data = with_part(one, lambda p: p["programs"].update(default={}), rank=0)
    refused(data, "part of rank 0: its phases of default")


@pytest.mark.parametrize(
    "column", [np.array([1.9, 2.0]), np.array([1, "a"], object), np.array([True, False])]
)
def test_columns_that_are_no_integers_are_refused(column: np.ndarray) -> None:
    with pytest.raises(ConfigError, match=r"x = .* no dtype of integers"):
        cells_of(Table(np.array([0, 2]), {"x": column}), rules_of(("x",)))


def test_every_section_enters_the_id(plan: Plan) -> None:
    changes = [
        replace(plan, header=replace(plan.header, seed=plan.header.seed + 1)),
        replace(plan, report={}),
        replace(plan, moves=()),
        replace(plan, request=replace(plan.request, hardware="00")),
    ]
    assert len({plan.id, *(codec.seal(changed).id for changed in changes)}) == 5


@pytest.mark.parametrize("rank", [-1, 5, "a", True, 1.0, None])
def test_a_rank_that_is_not_there_is_named(plan: Plan, rank: object) -> None:
    layout, (kind, phase) = plan.layout("attention"), next(iter(plan.programs))
    asks = (layout.to_cu_seqlens, layout.tokens, layout.position_ids, plan.for_rank)
    for ask in (*asks, lambda rank: plan.program(rank, kind, phase)):
        with pytest.raises(ConfigError, match=r"rank = .*must be (in \[0, 4\]|an integer)") as caught:
            ask(rank)
        assert caught.value.value is rank


def test_a_program_that_is_not_there_is_named(plan: Plan) -> None:
    kind, phase = next(iter(plan.programs))
    with pytest.raises(UnknownNameError, match="kind = 'nonesuch'"):
        plan.program(0, "nonesuch", phase)
    with pytest.raises(UnknownNameError, match=r"phase = 'sideways'.*forward"):
        plan.program(0, kind, "sideways")
    assert plan.program(np.int64(0), kind, phase).ranks == 1


def test_cu_seqlens_follow_the_rows() -> None:
    columns = {"row": [5, 0], "token": [0, 9], "length": [2, 5], "sequence": [0, 1], "position": [0, 0]}
    spans = Table(np.array([0, 2]), {name: np.array(column) for name, column in columns.items()})
    layout = Layout("attention", spans)
    assert layout.to_cu_seqlens(0).tolist() == [0, 5, 7]
    assert layout.tokens(0).tolist() == [9, 10, 11, 12, 13, 0, 1]


def test_slices_of_no_rank(plan: Plan) -> None:
    with pytest.raises(ConfigError, match="rank = 5"):
        plan.for_rank(5)
    with pytest.raises(UnknownNameError, match="loader"):
        plan.for_rank(0).layout("loader")


# ---------------------------------------------------------------------------------------------- hostile bytes


def rebuilt(plan: Plan, version: tuple[int, int] = VERSION, **sections: object) -> bytes:
    """The plan with other sections and the id of these."""
    changed = replace(plan.sections, id=b"", **sections)
    return codec.encode_wire(replace(changed, id=section_id(changed)), version)


def with_part(plan: Plan, edit: object, rank: int = 1, version: tuple[int, int] = VERSION) -> bytes:
    """The plan with one part changed by `edit`, which gets it as plain data, and the id of that."""
    part = msgpack.unpackb(plan.sections.parts[rank])
    result = edit(part)  # type: ignore[operator]
    parts = list(plan.sections.parts)
    parts[rank] = msgpack.packb(part if result is None else result)
    sections = {"parts": parts}
    if version != VERSION:
        header = msgpack.unpackb(plan.sections.header) | {"version": list(version)}
        sections["header"] = msgspec.msgpack.encode(header, order="deterministic")
    return rebuilt(plan, version, **sections)


def forward(part: dict) -> list[bytes]:
    return part["programs"]["default"]["forward"]


def refused(data: bytes, match: str) -> None:
    with pytest.raises(DecodeError, match=match):
        Plan.decode(data)


def test_a_changed_byte_is_noticed(plan: Plan) -> None:
    data = bytearray(plan.encode())
    data[data.index(plan.sections.parts[2]) + 20] ^= 1
    with pytest.raises(DecodeError, match=f"{plan.id.hex()}.* differs from"):
        Plan.decode(bytes(data))


def test_a_wrong_id_can_be_looked_at(plan: Plan) -> None:
    data = codec.encode_wire(replace(plan.sections, id=bytes(32)))
    refused(data, "stored id 0000")
    opened = codec.decode(data, check_id=False)
    assert opened.id == bytes(32)
    assert section_id(opened.sections) == plan.id


@pytest.mark.parametrize(
    "data", [b"", b"\x00", b"hello", b"\xc1", b"\x80", b"\xdf\xff\xff\xff\xff", b"\x91" * 10**6]
)
def test_what_is_no_plan(data: bytes) -> None:
    refused(data, "not an Apportion plan")
    with pytest.raises(DecodeError):
        Slice.decode(data)


def test_every_truncation(plan: Plan) -> None:
    data = plan.encode()
    for end in range(0, len(data), 7):
        with pytest.raises(DecodeError):
            Plan.decode(data[:end])


def test_other_formats_and_versions(plan: Plan) -> None:
    with pytest.raises(DecodeError, match=r"format is 'apportion\.slice'"):
        Plan.decode(plan.for_rank(0).encode())
    with pytest.raises(DecodeError, match=r"format is 'apportion\.plan'"):
        Slice.decode(plan.encode())
    with pytest.raises(VersionError, match=r"3\.0.*reads 2\.x"):
        Plan.decode(msgpack.packb({"format": "apportion.plan", "version": [3, 0], "body": b""}))
    refused(msgpack.packb({"format": "apportion.plan", "version": [2, -1]}), "version 2.-1")
    refused(rebuilt(plan, (2, 3)), "differs from")


def test_a_newer_minor_version_may_know_more(plan: Plan) -> None:
    def extend(part: dict) -> None:
        part["extra"] = {"more": [1, 2]}
        for cells in part["programs"]["default"].values():
            cells[:] = [cell and cell + b"\0column" for cell in cells] + [b"table"]

    again = Plan.decode(with_part(plan, extend, version=(2, 9)))
    assert again.header.version == (2, 9)
    assert same_tables(replace(again, header=plan.header), plan)
    refused(with_part(plan, extend), "part of rank 1")


def test_a_newer_header_may_know_more(plan: Plan) -> None:
    header = msgpack.unpackb(plan.sections.header) | {"version": [2, 9], "novel": 1}
    data = rebuilt(plan, (2, 9), header=msgspec.msgpack.encode(header, order="deterministic"))
    wider = msgpack.unpackb(data) | {"novel": b"more"}
    assert Plan.decode(msgpack.packb(wider)).header.version == (2, 9)
    again = Slice.decode(Plan.decode(data).for_rank(1).encode())
    assert again.header == replace(plan.header, version=(2, 9))
    header |= {"version": VERSION}
    refused(rebuilt(plan, header=msgspec.msgpack.encode(header, order="deterministic")), "header: unknown")


def cell_edit(edit: object) -> object:
    def change(part: dict) -> None:
        cells, at = forward(part), list(TABLES).index("operands")
        cells[at] = edit(cells[at])  # type: ignore[operator]

    return change


EDITS = {
    "no rows": lambda cell: b"",
    "one byte less": lambda cell: cell[:-1],
    "one byte more": lambda cell: cell + b"\0",
    "more rows": lambda cell: bytes([cell[0] + 1]) + cell[1:],
    "unknown form": lambda cell: cell[:1] + b"\x09" + cell[2:],
    "numbers": list,
    "text": lambda cell: "operands",
    "nil": lambda cell: None,
    "map": lambda cell: {"cell": cell},
}


@pytest.mark.parametrize("name", EDITS)
def test_malformed_tables(plan: Plan, name: str) -> None:
    with pytest.raises(DecodeError):
        Plan.decode(with_part(plan, cell_edit(EDITS[name])))


def test_rows_come_from_bytes_that_are_there(plan: Plan) -> None:
    """Small bytes stay small, whatever they say."""
    huge = bytes([255] * 3 + [7]) + bytes(7)
    refused(with_part(plan, cell_edit(lambda _: huge)), "16777215 rows in 11 bytes")
    data = with_part(
        plan, cell_edit(lambda _: bytes([0x80, 0x80, 4]) + bytes(2**15 - 3))
    )  # as many as may be
    assert peak_of(data) < 240 * len(data)


def test_operands_that_all_want_one_place_take_no_longer() -> None:
    """A search for sources gives up soon: chosen rows would else make it quadratic."""
    count = 30_000
    size, heads = 2 * (count + 1) + 1, 1
    rows = np.arange(1, count + 1)
    columns = {name: np.ones(count + 1, np.int64) for name in TABLES["operands"]}
    for column in columns.values():
        column[0] = 0
    columns["rows"][1:] = rows
    columns["row"][1:] = (-31 * rows - heads - 1) * pow(961, -1, size) % size  # the same slot for all
    table = Table(np.array([0, count + 1]), columns)
    operand_cells(Table(table.ptr[:1].repeat(2), columns))  # compiled
    begin = time.thread_time()
    (cell,) = operand_cells(table)
    assert time.thread_time() - begin < (0.3 if COMPILES else 60)
    assert cell


PART_EDITS = {
    "other rank": (lambda p: p.update(rank=0), "says that it is of rank 0"),
    "rank as float": (lambda p: p.update(rank=1.0), "part of rank 1"),
    "rank as bool": (lambda p: p.update(rank=True), "part of rank 1"),
    "rank too large": (lambda p: p.update(rank=2**64 - 1), "part of rank 1"),
    "nan": (lambda p: p.update(rank=float("nan")), "part of rank 1"),
    "missing key": (lambda p: p.pop("layouts") and None, "layouts"),
    "unknown key": (lambda p: p.update(more=1), "unknown keys"),
    "unknown layout": (lambda p: p["layouts"].append(b""), "3 layouts, the header names 2"),
    "unknown table": (lambda p: forward(p).append(b""), "8 tables of default, expected 7"),
    "missing table": (lambda p: forward(p).pop() and None, "6 tables of default, expected 7"),
    "no phases": (lambda p: p["programs"].update(default={}), "phases of default"),
    "phases in another order": (
        lambda p: p["programs"].update(default=dict(reversed(p["programs"]["default"].items()))),
        "phases of default",
    ),
    "missing kind": (lambda p: p["programs"].clear(), "attention kinds"),
    "missing phase": (lambda p: p["programs"]["default"].pop("forward") and None, "phases"),
    "moves": (lambda p: p["moves"].append(b""), "number of moves"),
    "many names": (lambda p: forward(p).extend([b""] * 300), "length"),
    "a list": (lambda p: [p], "part of rank 1"),
}


@pytest.mark.parametrize("name", PART_EDITS)
def test_malformed_parts(plan: Plan, name: str) -> None:
    edit, match = PART_EDITS[name]
    refused(with_part(plan, edit), match)


def test_repeated_keys_and_long_forms(plan: Plan) -> None:
    part = plan.sections.parts[1]
    twice = b"\x85" + part[1:] + part[1:7]  # "rank" again, after the other keys
    long = part[:1] + part[1:6] + b"\xcc\x01" + part[7:]
    assert msgpack.unpackb(twice) == msgpack.unpackb(part) == msgpack.unpackb(long)
    for changed in (twice, long, part + b"\x00"):
        parts = [*plan.sections.parts]
        parts[1] = changed
        refused(rebuilt(plan, parts=parts), "part of rank 1")
    header = plan.sections.header
    refused(rebuilt(plan, header=b"\xde\x00\x10" + header[1:] + b"\xa5ranks\x05"), "repeated or unsorted")
    data = plan.encode()
    refused(bytes([data[0] + 1]) + data[1:] + b"\xa6report\xc4\x01\x80", "plan: repeated")


@pytest.mark.parametrize(
    ("field", "value", "match"),
    [
        ("ranks", 0, "ranks = 0"),
        ("ranks", 70_000, "ranks = 70000"),
        ("ranks", 4, "4, but the plan has 5 parts"),
        ("ranks", "5", "Expected `int`"),
        ("q_heads", 3, "no multiple"),
        ("q_heads", 2**63, "outside"),
        ("kv_heads", -1, "outside"),
        ("head_dim", 16, "the model asked for"),
        ("head_dim", 8.5, "Expected `int`"),
        ("dtype", "object", "known are bf16"),
        ("kinds", [], "distinct names"),
        ("kinds", ["default", "default"], "distinct names"),
        ("kinds", ["other"], "diagonals must be of each kind"),
        ("layouts", ["attention"], "same layouts"),
        ("home_layout", "loader", "not among"),
        ("head_sets", [[0, 0]], "distinct heads"),
        ("head_sets", [[4]], "below 4"),
        ("head_sets", [[]], "head set 1"),
        ("engines", {"x": 1}, "Expected `str`"),
        ("version", [2, 2], "differs"),
        ("diagonals", {"default": [[-(2**62), 2**62]]}, "the masks asked for have"),
        ("diagonals", {"default": []}, "the masks asked for have"),
        ("diagonals", {}, "diagonals must be of each kind"),
        ("diagonals", {"default": [], "other": []}, "of each kind"),
        ("diagonals", {"default": [[0, 1], [0, 1]]}, "distinct, sorted"),
        ("diagonals", {"default": [[0, 2], [0, 1]]}, "distinct, sorted"),
        ("diagonals", {"default": [[0, n] for n in range(9)]}, "8 at most"),
        ("diagonals", {"default": [[1, 0]]}, r"\[dmin, dmax\]"),
        ("diagonals", {"default": [[0, 2**63]]}, "header"),
        ("diagonals", {"default": [[0, 2**62 + 1]]}, r"\[dmin, dmax\]"),
        ("diagonals", {"default": [[0, 1, 2]]}, "length 2"),
        ("diagonals", {"default": [[0, 0.5]]}, "Expected `int`"),
        ("diagonals", None, "Expected `object`"),
    ],
)
def test_malformed_headers(plan: Plan, field: str, value: object, match: str) -> None:
    header = msgpack.unpackb(plan.sections.header) | {field: value}
    refused(rebuilt(plan, header=msgspec.msgpack.encode(header, order="deterministic")), match)


@pytest.mark.parametrize(
    ("section", "value", "match"),
    [
        ("request", {}, "'batch' is missing"),
        ("request", [1], "request"),
        ("report", {"gap": float("nan")}, "finite"),
        ("report", {"gap": [{"x": float("inf")}]}, "finite"),
        ("report", {"blob": b"x"}, "holds a bytes"),
        ("report", {"a": [b"\x01", {"b": b""}]}, "holds a bytes"),
        ("layouts", {"attention": {"tokens": 1}}, "same layouts"),
        ("layouts", {"attention": {"tokens": -1}, "linear -> 2": {"tokens": 1}}, "tokens"),
        ("moves", [["attention", "nowhere"]], "unknown layout"),
        ("moves", [["attention", "linear -> 2"]] * 2, "two moves"),
        ("moves", [], "number of moves"),
        ("moves", [["attention"]], "moves"),
    ],
)
def test_malformed_sections(plan: Plan, section: str, value: object, match: str) -> None:
    refused(rebuilt(plan, **{section: msgspec.msgpack.encode(value, order="deterministic")}), match)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("batch", "lengths"), [0]),
        (("batch", "lengths"), [2**62] * 8),
        (("batch", "lengths"), [float("nan")]),
        (("batch", "mask"), {"nonsense": {}}),
        (("cluster", "nodes"), -1),
        (("cluster", "memory_gib"), float("nan")),
        (("model", "dtype"), 7),
        (("policy", "seed"), "x"),
        (("policy", "recipe"), None),
        (("hardware",), 3),
        (("more",), 3),
    ],
)
def test_malformed_requests(plan: Plan, path: tuple[str, ...], value: object) -> None:
    request = msgpack.unpackb(plan.sections.request)
    inner = request
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(ApportionError, match="request"):
        Plan.decode(rebuilt(plan, request=msgspec.msgpack.encode(request, order="deterministic")))


def test_keys_that_are_no_texts(plan: Plan) -> None:
    refused(rebuilt(plan, report=msgpack.packb({"a": {1: 2}})), "report")
    refused(rebuilt(plan, report=msgpack.packb({1: 2})), "report")
    request = msgpack.unpackb(plan.sections.request) | {"cluster": {None: 1}}
    refused(rebuilt(plan, request=msgpack.packb(request)), "request")


def test_deep_nesting_and_size_caps(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(rebuilt(plan, report=b"\x81\xa1x" + b"\x91" * 100_000 + b"\xc0"), "recursion")
    monkeypatch.setattr(wire, "MAX_BYTES", dict(wire.MAX_BYTES) | {"part": 40, "report": 1 << 20})
    refused(plan.encode(), "at most 40 are read")
    refused(rebuilt(plan, report=bytes(1 << 21)), "at most 1048576 are read")


@pytest.mark.parametrize("section", sorted({*wire.MAX_BYTES} - {"report"}))
def test_no_plan_is_made_that_readers_refuse(
    plan: Plan, section: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "MAX_BYTES", dict(wire.MAX_BYTES) | {section: 0})
    with pytest.raises(CapacityError, match=rf"bytes of {section}, readers take 0: use more ranks"):
        codec.seal(plan)


def test_too_many_parts(plan: Plan) -> None:
    refused(rebuilt(plan, parts=[b""] * 65_536), "65536 parts")
    refused(codec.encode_wire(replace(plan.sections, parts=[])), "0 parts")


# ---------------------------------------------------------------------------------------------- structure


def edited(plan: Plan, table: str, column: str, rank: int, row: int, value: int) -> bytes:
    """The plan with one number of the forward program changed."""
    program = plan.programs["default", "forward"]
    old = program[table]
    values = old[column].copy()
    values[int(old.ptr[rank]) + row] = value
    changed = ProgramSet({**program.tables, table: Table(old.ptr, {**old.columns, column: values})})
    return codec.seal(replace(plan, programs={**plan.programs, ("default", "forward"): changed})).encode()


@pytest.fixture(scope="module")
def rich() -> Plan:
    """A plan whose rank 0 has rows in every forward table."""
    plans = (random_plan(seed, ranks=2) for seed in range(10_000))
    return next(
        p
        for p in plans
        if p.header.kinds == ("default",)
        and all(t.ptr[1] > 1 for t in p.programs["default", "forward"].tables.values())
    )


@pytest.mark.parametrize(
    ("table", "column", "row", "value", "match"),
    [
        ("instructions", "op", 0, 0, "op is outside"),
        ("instructions", "op", 0, 14, "op is outside"),
        ("instructions", "mode", 0, 4, "mode is outside"),
        ("instructions", "count", 0, 2**40, "count exceeds its list"),
        ("instructions", "count", 0, -1, "count is outside"),
        ("operands", "tensor", 0, 1, "operand 0 must be none"),
        ("operands", "tensor", 1, 10, "tensor is outside"),
        ("operands", "tensor", 1, 0, "only operand 0"),
        ("operands", "space", 1, 2, "space is outside"),
        ("operands", "rows", 1, 0, "only operand 0"),
        ("operands", "rows", 1, -1, "rows is outside"),
        ("operands", "row", 1, -1, "row is outside"),
        ("operands", "col", 1, 2**20, "col is outside"),
        ("operands", "heads", 1, 4, "heads is outside"),
        ("arenas", "tensor", 0, 0, "tensor is outside"),
        ("arenas", "rows", 0, 0, "rows is outside"),
        ("transfers", "send", 0, 2, "send is outside"),
        ("transfers", "peer", 0, 2, r"peer is outside \[0, 1\]"),
        ("transfers", "operand", 0, 99, "operand is not among"),
        ("tasks", "q", 0, 99, "q is not among"),
        ("tasks", "first", 0, 2, "first is outside"),
        ("tasks", "first", 0, -1, "first is outside"),
        ("grads", "dkv", 0, 2**31, "dkv is not among"),
        ("grads", "first", 0, 4, "first is outside"),
        ("rowops", "d", 0, -1, "d is outside"),
    ],
)
def test_numbers_out_of_range(rich: Plan, table: str, column: str, row: int, value: int, match: str) -> None:
    refused(
        edited(rich, table, column, 0, row, value), f"rank 0, default forward, {table} row {row}: .*{match}"
    )


def test_counts_must_add_up(rich: Plan) -> None:
    table = rich.programs["default", "forward"]["instructions"].rank(0)
    row = int(np.flatnonzero(table["count"] > 0)[0])
    refused(
        edited(rich, "instructions", "count", 0, row, 0), "rank 0, default forward: its instructions consume"
    )


def test_waits_take_no_list_and_no_stray_rounds(rich: Plan) -> None:
    table = rich.programs["default", "forward"]["instructions"].rank(0)
    other = int(np.flatnonzero(table["op"] > 2)[0])
    refused(edited(rich, "instructions", "round", 0, other, 1), "round, channel and mode belong")
    refused(edited(rich, "instructions", "channel", 0, other, 1), "round, channel and mode belong")
    refused(
        edited(rich, "instructions", "op", 0, int(np.argmax(table["count"] > 0)), 2),
        "wait takes no list|belong",
    )


def test_one_arena_a_tensor(rich: Plan) -> None:
    first = int(rich.programs["default", "forward"]["arenas"]["tensor"][0])
    refused(edited(rich, "arenas", "tensor", 0, 1, first), "a second arena")


def test_head_sets_of_keys_hold_key_heads(rich: Plan) -> None:
    plan = codec.decode(edited(rich, "operands", "heads", 0, 1, 2))
    plan = codec.decode(edited(plan, "operands", "tensor", 0, 1, 3))
    refused(edited(plan, "operands", "heads", 0, 1, 3), "beyond 2 KV heads")


def peak_of(data: bytes) -> int:
    """Bytes that decoding takes at most, whether it succeeds or not."""
    tracemalloc.start()
    try:
        codec.decode(data)
    except DecodeError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak


def test_spans_of_many_tokens_cost_nothing() -> None:
    plan = next(p for p in map(random_plan, range(100)) if p.request.batch.tokens > 2**27)
    data = plan.encode()
    codec.decode(data)
    assert peak_of(data) < 64 * len(data) + 200_000


def test_small_bytes_do_not_become_large_in_memory(plan: Plan) -> None:
    blank = msgpack.packb([{}] * 100_000)
    for data in (
        rebuilt(plan, request=b"\x81\xa5batch" + blank),
        rebuilt(plan, report=b"\x81\xa1x" + blank),
        rebuilt(plan, header=blank),
        rebuilt(plan, moves=blank),
        rebuilt(plan, parts=[b""] * 50_000),
        with_part(plan, lambda part: part | {"moves": [b""] * 100_000}),
        with_part(plan, lambda part: part | {"layouts": [b"ab"] * 50_000}),
    ):
        assert peak_of(data) < 100 * len(data)


# ---------------------------------------------------------------------------------------------- hostile slices


def test_slices_are_proven(plan: Plan) -> None:
    def changed(**fields: object) -> bytes:
        return msgpack.packb(msgpack.unpackb(plan.for_rank(1).encode()) | fields)

    other = codec.seal(random_plan(99, ranks=5))
    wires = msgpack.unpackb(plan.for_rank(1).encode())
    for fields in (
        {"part": plan.sections.parts[2]},
        {"part": other.sections.parts[1]},
        {"rank": 0},
        {"rank": 5},
        {"rank": -1},
        {"ranks": 6},
        {"ranks": 1},
        {"ranks": 2**40},
        {"id": bytes(32)},
        {"id": b""},
        {"path": wires["path"][:-1]},
        {"path": [*wires["path"], bytes(32)]},
        {"path": [wires["path"][0][:31], *wires["path"][1:]]},
        {"path": [bytes(32)] * 300},
        {"path": [bytes(32), *wires["path"][1:]]},
        {"digests": []},
        {"digests": wires["digests"][::-1]},
        {"header": other.sections.header},
        {"version": [1, 0]},
        {"version": [1, 2]},
        {"more": 1},
        {"moves": b"\x90"},
    ):
        with pytest.raises(DecodeError):
            Slice.decode(changed(**fields))
    assert Slice.decode(changed()) == plan.for_rank(1)


def test_section_id_needs_no_cache(plan: Plan) -> None:
    sections = Sections(*(getattr(plan.sections, name) for name in Sections.__dataclass_fields__))
    assert section_id(sections) == plan.id
    assert hashing.tree([b"a"]) == [[b"a"]]

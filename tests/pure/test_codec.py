"""Bytes of plans and slices: what goes in comes out, alike everywhere, and nothing else is let in."""

from __future__ import annotations

import os
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from itertools import chain
from pathlib import Path

import msgpack
import msgspec
import numpy as np
import pytest
from cells import BITS, CONSTANT, OFFSET, columns_of, rows_of
from hypothesis import given, settings
from hypothesis import strategies as st
from random_plans import random_plan

from apportion.ir import codec, hashing, wire
from apportion.ir.codec import Plan, Sections, Slice
from apportion.ir.columns import DTYPES, Cell, Gather, encode_table
from apportion.ir.errors import ApportionError, ConfigError, DecodeError, UnknownNameError, VersionError
from apportion.ir.isa import TABLES, VERSION
from apportion.ir.parts import join_parts
from apportion.ir.plan import Layout, ProgramSet, Table

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
    assert piece.part_bytes == len(plan.sections.parts[rank])
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


def test_columns_take_the_narrowest_type_of_the_whole_plan(plan: Plan) -> None:
    for part in map(msgpack.unpackb, plan.sections.parts):
        tables = part["programs"]["default"]["forward"]
        if "operands" in tables:
            codes, tensor, *_ = tables["operands"]
            assert codes[0] == 1
            rows = plan.programs["default", "forward"]["operands"].rank(part["rank"])
            assert list(tensor) == rows["tensor"].tolist()


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ([0, 255], 1),
        ([0, 256], 2),
        ([65536], 3),
        ([2**32], 4),
        ([-1, 127], 5),
        ([-1, 128], 6),
        ([-(2**15) - 1], 7),
        ([-1, 2**31], 8),
    ],
)
@pytest.mark.parametrize("order", ["<i8", ">i8"])
def test_dtype_codes_and_byte_order(values: list[int], code: int, order: str) -> None:
    spans = Table(np.array([0, len(values)]), {"x": np.array(values, order)})
    (cell,) = cells_of(spans, ("x",))
    width = {1: 1, 5: 1, 2: 2, 6: 2, 3: 4, 7: 4, 4: 8, 8: 8}[code]
    blob = b"".join(v.to_bytes(width, "little", signed=min(values) < 0) for v in values)
    assert cell == [bytes([code]), blob]


def table(columns: dict[str, list[list[int]]]) -> Table:
    """A table from values per column and rank."""
    ptr = np.cumsum([0, *map(len, next(iter(columns.values())))])
    return Table(ptr, {name: np.array(list(chain(*ranks)), np.int64) for name, ranks in columns.items()})


def gathered(found: list[object], names: tuple[str, ...], chunk: int = 3) -> Table:
    gather = Gather(names, "here")
    for begin in range(0, len(found), chunk):
        gather.add(found[begin : begin + chunk])  # type: ignore[arg-type]
    return gather.table()


def cells_of(given: Table, names: tuple[str, ...]) -> list[Cell]:
    """The table's cell in each rank's part, which msgpack writes as we do."""
    ranks = given.ranks
    parts = join_parts({"here": encode_table(given, names)}, {}, [], ranks)
    read = [wire.read_part(part, rank, VERSION) for rank, part in enumerate(parts)]
    assert [wire.encode_struct(part) for part in read] == parts
    return [part.layouts.get("here", ()) for part in read]


def check_cells(given: Table) -> bytes:
    """The codes that the table was written with, once it came back the same from both readers."""
    names = tuple(given.columns)
    found = cells_of(given, names)
    assert gathered(found, names).equal(given)
    assert all(column.dtype == np.int64 for column in gathered(found, names).columns.values())
    for rank, cell in enumerate(found):
        rows = given.rank(rank)
        assert bool(cell) == bool(len(rows))
        assert not cell or columns_of(cell) == [rows[name].tolist() for name in names]
    (codes,) = {cell[0] for cell in found if cell}
    return codes


RAMP = [[3, 5, 900, 4], [], [7] * 2, [1, 2, 1, 2, 1, 2, 1, 2, 1], [6]]


@pytest.mark.parametrize(
    ("values", "code"),
    [
        (lambda rank, row, first: 4, CONSTANT),
        (lambda rank, row, first: -rank, CONSTANT),
        (lambda rank, row, first: rank * 2**40, 4),  # 8 bytes for a number of a rank are too many here
        (lambda rank, row, first: row % 2, BITS),
        (lambda rank, row, first: int(row == 8), BITS),
        (lambda rank, row, first: first + 3 * rank, OFFSET),
        (lambda rank, row, first: first - 128, OFFSET),
        (lambda rank, row, first: first - 2**31, 7),  # and so are 4
        (lambda rank, row, first: first + int(row == 8), 2),
        (lambda rank, row, first: 2 * (row % 2), 1),
        (lambda rank, row, first: row % 2 - 1, 5),
    ],
)
def test_columns_that_need_not_be_written_out(values: object, code: int) -> None:
    others = [[values(r, i, v) for i, v in enumerate(rows)] for r, rows in enumerate(RAMP)]  # type: ignore[operator]
    assert check_cells(table({"first": RAMP, "other": others})) == bytes([2, code])


def test_one_column_is_always_written_out() -> None:
    bits, same = [[0, 1, 1, 0]] * 3, [[7, 7, 7, 7], [8] * 4, [9] * 4]
    assert check_cells(table({"a": bits, "b": same})) == bytes([1, CONSTANT])
    assert check_cells(table({"a": same, "b": bits})) == bytes([1, BITS])
    ramp = [[300, 1, 2, 5]] * 3
    assert check_cells(table({"a": bits, "b": ramp, "c": bits})) == bytes([BITS, 2, BITS])


def test_what_is_not_smaller_is_written_out() -> None:
    assert check_cells(table({"a": [[1], [2]], "b": [[0], [0]]})) == bytes([1, 1])
    assert check_cells(table({"a": [[1], [2, 3]], "b": [[0], [0, 0]]})) == bytes([1, CONSTANT])
    assert check_cells(table({"a": [[1], [2, 3]], "b": [[500], [500, 500]]})) == bytes([1, 2])


def rows_like(kind: int, first: list[list[int]], draw: st.DrawFn) -> list[list[int]]:
    number = st.integers(-(2**47), 2**47) if draw(st.booleans()) else st.integers(-3, 300)
    if kind == CONSTANT:
        return [[draw(number)] * len(rows) for rows in first]
    if kind == BITS:
        return [draw(st.lists(st.integers(0, 1), min_size=len(r), max_size=len(r))) for r in first]
    if kind == OFFSET:
        return [[value + shift for value in rows] for rows in first for shift in [draw(number)]]
    return [draw(st.lists(number, min_size=len(r), max_size=len(r))) for r in first]


@st.composite
def tables(draw: st.DrawFn) -> Table:
    """Tables of few ranks whose columns are of each kind, or almost."""
    sizes = draw(st.lists(st.sampled_from([0, 0, 1, 2, 7, 8, 9, 17, 40]), min_size=1, max_size=7))
    sizes[draw(st.integers(0, len(sizes) - 1))] += 1
    kinds = draw(st.lists(st.sampled_from([0, CONSTANT, BITS, OFFSET]), min_size=1, max_size=4))
    first: list[list[int]] = [[0] * size for size in sizes]
    columns: dict[str, list[list[int]]] = {}
    for number, kind in enumerate(kinds):
        columns[str(number)] = rows_like(kind, first, draw)
        first = columns["0"]
    made = table(columns)
    if draw(st.booleans()):  # one number that spoils the pattern
        column = made[str(draw(st.integers(0, len(kinds) - 1)))]
        column[draw(st.integers(0, len(column) - 1))] += 1
    return made


@settings(max_examples=300)
@given(tables())
def test_tables_come_back_from_their_cells(given: Table) -> None:
    codes = check_cells(given)
    assert set(codes) & DTYPES.keys()
    assert OFFSET not in codes or codes[0] in DTYPES


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 5000, 100_000])
def test_long_columns(rows: int) -> None:
    """Patterns are looked for piece by piece: a change in any of them counts."""
    ptr = np.array([0, rows, rows, 2 * rows, 3 * rows])
    ramp = np.arange(3 * rows) % 251
    rank = np.repeat([0, 2, 3], rows)
    columns = {"a": ramp, "b": ramp + 1000 * rank, "c": 70 * rank, "d": ramp % 2}
    codes = bytes([1, OFFSET, CONSTANT, BITS]) if rows > 2 else bytes([1, 2, 1, 1])
    for spoiled in (None, 0, rows // 2, rows - 1, 3 * rows - 1) if rows > 2 else (None,):
        changed = {name: column.copy() for name, column in columns.items()}
        if spoiled is not None:
            for name in "bcd":
                changed[name][spoiled] = 5001
        found = cells_of(Table(ptr, changed), tuple(changed))
        assert found[0][0] == (codes if spoiled is None else bytes([1, 2, 2, 2]))
        assert gathered(found, tuple(changed)).equal(Table(ptr, changed))


def test_bytes_do_not_depend_on_the_process() -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from random_plans import random_plan\n"
        "print(*[random_plan(seed).id.hex() for seed in range(5)])"
    )
    ids = {
        subprocess.run(
            [sys.executable, "-c", code, str(Path(__file__).parent)],
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
    parts = codec.encode_parts(plan.layouts, plan.programs, plan.moves, plan.header.ranks)
    assert codec.seal(plan, parts) == plan


@pytest.mark.parametrize("ranks", [1, 128, 129, 256, 257, 700])
def test_parts_are_what_msgpack_writes(ranks: int) -> None:
    filled = np.arange(ranks) % 3
    ptr = np.concatenate([[0], np.cumsum(filled)])
    rows = encode_table(Table(ptr, {"a": np.arange(ptr[-1]) % 7, "b": np.repeat(filled, filled)}), ("a", "b"))
    programs = {
        (kind, phase): {"t": rows, "u": rows} for phase in ("forward", "backward") for kind in ("x", "y" * 40)
    }
    parts = join_parts({"first": rows}, programs, [rows, rows], ranks)
    for rank, part in enumerate(parts):
        read = wire.read_part(part, rank, VERSION)
        assert wire.encode_struct(read) == part
        held = {"t", "u"} if filled[rank] else set()
        assert {
            kind: {phase: set(of) for phase, of in phases.items()} for kind, phases in read.programs.items()
        } == {kind: dict.fromkeys(("forward", "backward"), held) for kind in ("x", "y" * 40)}
        assert [bool(cell) for cell in read.moves] == [bool(filled[rank])] * 2


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
        with pytest.raises(ConfigError, match=r"rank = .*must be in \[0, 5\)") as caught:
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
    return codec.encode_wire(replace(changed, id=codec.section_id(changed)), version)


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


def forward(part: dict) -> dict:  # type: ignore[type-arg]
    return part["programs"]["default"]["forward"]  # type: ignore[no-any-return]


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
    assert codec.section_id(opened.sections) == plan.id


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
    with pytest.raises(VersionError, match=r"2\.0.*reads 1\.x"):
        Plan.decode(msgpack.packb({"format": "apportion.plan", "version": [2, 0], "body": b""}))
    refused(msgpack.packb({"format": "apportion.plan", "version": [1, -1]}), "version 1.-1")
    refused(rebuilt(plan, (1, 3)), "differs from")


def test_a_newer_minor_version_may_know_more(plan: Plan) -> None:
    def extend(part: dict) -> None:  # type: ignore[type-arg]
        part["extra"] = {"more": [1, 2]}
        part["programs"]["default"]["sideways"] = {}
        forward(part)["novel"] = [b"\x01", b"\x00"]

    again = Plan.decode(with_part(plan, extend, version=(1, 9)))
    assert again.header.version == (1, 9)
    assert same_tables(replace(again, header=plan.header), plan)
    refused(with_part(plan, extend), "part of rank 1")


def test_a_newer_header_may_know_more(plan: Plan) -> None:
    header = msgpack.unpackb(plan.sections.header) | {"version": [1, 9], "novel": 1}
    data = rebuilt(plan, (1, 9), header=msgspec.msgpack.encode(header, order="deterministic"))
    wider = msgpack.unpackb(data) | {"novel": b"more"}
    assert Plan.decode(msgpack.packb(wider)).header.version == (1, 9)
    again = Slice.decode(Plan.decode(data).for_rank(1).encode())
    assert again.header == replace(plan.header, version=(1, 9))
    header |= {"version": VERSION}
    refused(rebuilt(plan, header=msgspec.msgpack.encode(header, order="deterministic")), "header: unknown")


def test_a_plan_of_version_1_0_says_nothing_of_diagonals(plan: Plan) -> None:
    held = msgpack.unpackb(plan.sections.header) | {"version": [1, 0]}
    refused(rebuilt(plan, (1, 0), header=msgspec.msgpack.encode(held, order="deterministic")), "unknown")
    del held["diagonals"]
    old = Plan.decode(rebuilt(plan, (1, 0), header=msgspec.msgpack.encode(held, order="deterministic")))
    assert old.header == replace(plan.header, version=(1, 0), diagonals=None)
    assert old.encode() == codec.seal(replace(old, sections=None)).encode()
    assert Slice.decode(old.for_rank(1).encode()).header.diagonals is None
    held["version"] = VERSION
    refused(rebuilt(plan, header=msgspec.msgpack.encode(held, order="deterministic")), "from version 1.1 on")


def test_columns_after_the_known_ones_are_passed_over(plan: Plan) -> None:
    parts = [msgpack.unpackb(part) for part in plan.sections.parts]
    for part in parts:
        for tables in part["programs"]["default"].values():
            for cell in tables.values():
                rows = rows_of(cell)
                cell[0] += b"\x02\x09\x0a"
                cell += [b"\x00\x01" * rows, b"\x05", bytes((rows + 7) // 8)]
    again = Plan.decode(rebuilt(plan, parts=[msgpack.packb(part) for part in parts]))
    assert same_tables(again, plan)


def test_a_missing_column_is_named(plan: Plan) -> None:
    parts = [msgpack.unpackb(part) for part in plan.sections.parts]
    for part in parts:
        if "operands" in forward(part):
            codes, *columns = forward(part)["operands"]
            forward(part)["operands"] = [codes[:-1], *columns[:-1]]
    refused(
        rebuilt(plan, parts=[msgpack.packb(part) for part in parts]), "operands: column 'heads' is missing"
    )


def cell_edit(edit: object) -> object:
    def change(part: dict) -> None:  # type: ignore[type-arg]
        tables = forward(part)
        tables["operands"] = edit(tables["operands"])  # type: ignore[operator]

    return change


EDITS = {
    "unknown code": lambda cell: [b"\x0c" + cell[0][1:], *cell[1:]],
    "code 0": lambda cell: [b"\0" + cell[0][1:], *cell[1:]],
    "object dtype": lambda cell: [b"O" + cell[0][1:], *cell[1:]],
    "other dtype than other ranks": lambda cell: [b"\x05" + cell[0][1:], *cell[1:]],
    "short column": lambda cell: [*cell[:-1], cell[-1][:-1]],
    "long column": lambda cell: [*cell[:-1], cell[-1] + b"\0"],
    "half an element": lambda cell: [*cell[:3], cell[3] + b"\0", *cell[4:]],
    "too few columns": lambda cell: cell[:-1],
    "too many columns": lambda cell: [*cell, cell[-1]],
    "empty array": lambda cell: [],
    "no columns": lambda cell: [b""],
    "no rows": lambda cell: [cell[0], *[b""] * (len(cell) - 1)],
    "numbers": lambda cell: [list(column) for column in cell],
    "text": lambda cell: ["codes", *cell[1:]],
    "nil": lambda cell: None,
    "map": lambda cell: {"codes": cell[0]},
}


@pytest.mark.parametrize("name", EDITS)
def test_malformed_tables(plan: Plan, name: str) -> None:
    with pytest.raises(DecodeError):
        Plan.decode(with_part(plan, cell_edit(EDITS[name])))


CELL = [bytes([1, CONSTANT, BITS, OFFSET]), b"\x01\x02\x03", b"\x05", b"\x06", b"\xff"]
NAMES = ("a", "b", "c", "d")


def test_a_cell_by_hand() -> None:
    found = gathered([CELL, (), CELL], NAMES)
    assert found.ptr.tolist() == [0, 3, 3, 6]
    assert [found[name][:3].tolist() for name in NAMES] == [[1, 2, 3], [5, 5, 5], [0, 1, 1], [0, 1, 2]]


@pytest.mark.parametrize(
    ("number", "blob", "match"),
    [
        (1, b"\x01\x02", None),  # two rows need one byte of bits, and the third of these is set
        (1, b"\x01" * 9, "differ in length"),
        (1, b"", "hold no rows"),
        (2, b"", "0 bytes, not 1, 2, 4 or 8"),
        (2, b"\x05" * 3, "3 bytes, not 1, 2, 4 or 8"),
        (2, b"\x05" * 16, "16 bytes, not 1, 2, 4 or 8"),
        (3, b"", "differ in length"),
        (3, b"\x06\x00", "differ in length"),
        (3, b"\x0e", "bits after"),
        (3, b"\x86", "bits after"),
        (4, b"", "0 bytes"),
        (4, (2**49 + 1).to_bytes(8, "little"), r"offset is beyond 2\*\*49"),
        (4, (-(2**63)).to_bytes(8, "little", signed=True), r"offset is beyond 2\*\*49"),
        (0, bytes([CONSTANT, CONSTANT, BITS, CONSTANT]), "no column is written out"),
        (0, bytes([BITS, 1, BITS, OFFSET]), "first column that is not written out"),
        (0, bytes([CONSTANT, 1, BITS, OFFSET]), "first column that is not written out"),
        (0, bytes([1, CONSTANT, BITS, 12]), "code 12"),
        (0, bytes([1, CONSTANT, BITS]), "'d' is missing"),
    ],
)
def test_malformed_cells(number: int, blob: bytes, match: str | None) -> None:
    changed = [*CELL]
    changed[number] = blob
    with pytest.raises(DecodeError, match=match):
        gathered([changed], NAMES)
    with pytest.raises(DecodeError):
        gathered([CELL, changed], NAMES)


def test_ranks_share_codes_and_widths() -> None:
    for number, blob in ((2, b"\x05\0"), (4, b"\xff\xff"), (0, bytes([1, CONSTANT, BITS, CONSTANT]))):
        changed = [*CELL]
        changed[number] = blob
        for chunk in (1, 2):
            gathered([changed, changed], NAMES, chunk)
            with pytest.raises(DecodeError, match="differ"):
                gathered([CELL, changed], NAMES, chunk)


def test_rows_come_from_bytes_that_are_there(plan: Plan) -> None:
    """No constant says how many rows there are, so small bytes stay small."""
    cell = [bytes([CONSTANT] * 6), *[b"\x7f" * 8] * 6]
    refused(with_part(plan, cell_edit(lambda _: cell)), "ranks differ|no column is written out")
    parts = [msgpack.unpackb(part) for part in plan.sections.parts]
    for part in parts:
        if "operands" in forward(part):
            forward(part)["operands"] = cell
    data = rebuilt(plan, parts=[msgpack.packb(part) for part in parts])
    refused(data, "no column is written out")
    assert peak_of(data) < 100 * len(data)


PART_EDITS = {
    "other rank": (lambda p: p.update(rank=0), "says that it is of rank 0"),
    "rank as float": (lambda p: p.update(rank=1.0), "part of rank 1"),
    "rank as bool": (lambda p: p.update(rank=True), "part of rank 1"),
    "rank too large": (lambda p: p.update(rank=2**64 - 1), "part of rank 1"),
    "nan": (lambda p: p.update(rank=float("nan")), "part of rank 1"),
    "missing key": (lambda p: p.pop("layouts") and None, "layouts"),
    "unknown key": (lambda p: p.update(more=1), "unknown keys"),
    "unknown layout": (
        lambda p: p["layouts"].update(other=p["layouts"].popitem()[1]),
        "header does not name",
    ),
    "unknown table": (lambda p: forward(p).update(novel=forward(p)["operands"]), "table beyond"),
    "missing kind": (lambda p: p["programs"].clear(), "attention kinds"),
    "missing phase": (lambda p: p["programs"]["default"].pop("forward") and None, "phases"),
    "moves": (lambda p: p["moves"].append([]), "number of moves"),
    "many names": (lambda p: forward(p).update({str(i): [] for i in range(300)}), "length"),
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
        ("version", [1, 2], "differs"),
        ("version", [1, 0], "unknown, missing"),
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
        ("diagonals", None, "unknown, missing"),
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
        ("instructions", "count", 0, 2**62, "count is outside"),
        ("operands", "tensor", 0, 1, "operand 0 must be none"),
        ("operands", "tensor", 1, 10, "tensor is outside"),
        ("operands", "tensor", 1, 0, "only operand 0"),
        ("operands", "space", 1, 2, "space is outside"),
        ("operands", "rows", 1, 0, "only operand 0"),
        ("operands", "rows", 1, 2**60, "rows is outside"),
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
        ("tasks", "dmin", 0, -(2**50), "dmin is outside"),
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


def test_unsigned_values_beyond_int64(rich: Plan) -> None:
    table = rich.programs["default", "forward"]["operands"]
    parts = [msgpack.unpackb(part) for part in codec.encode_sections(rich).parts]
    for rank, part in enumerate(parts):
        if "operands" in forward(part):
            cell = forward(part)["operands"]
            rows = table.rank(rank)["row"].astype("<u8")
            rows[1:] |= np.uint64(2**63)
            cell[0] = cell[0][:2] + b"\x04" + cell[0][3:]
            cell[3] = rows.tobytes()
    refused(rebuilt(codec.seal(rich), parts=[msgpack.packb(part) for part in parts]), "row is outside")


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
        with_part(plan, lambda part: part | {"moves": [[]] * 100_000}),
        with_part(plan, lambda part: part | {"layouts": {str(i): [] for i in range(50_000)}}),
        with_part(plan, lambda part: part | {"layouts": {"attention": [b"ab"] * 50_000}}),
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
    assert codec.section_id(sections) == plan.id
    assert hashing.tree([b"a"]) == [[b"a"]]

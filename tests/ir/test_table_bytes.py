"""Tables as bytes: round trips in the narrowest width, and refusal of all other bytes."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from apportion._core.tables import MAX_ROWS
from apportion.ir.bytes.table_bytes import encode_tables, read_parts
from apportion.ir.errors import ConfigError, DecodeError
from apportion.ir.isa import LIMIT, SPAN_COLUMNS, TABLES
from apportion.ir.plan.tables import Layout, ProgramSet, Table
from tests.support.random_plans import random_plan

NAMES = ("a", "b")


def parts_of(*tables: Table) -> list[bytes]:
    return list(encode_tables(tables, tables[0].ranks))


def decode_parts(parts: list[bytes], *names: tuple[str, ...]) -> list[Table]:
    return list(read_parts([(f"table {n}", one) for n, one in enumerate(names or (NAMES,))], parts, 3))


@st.composite
def tables(draw: st.DrawFn) -> Table:
    """A table of small, equal or arbitrary numbers; the first column is positive, since rows must take bytes."""
    names = draw(st.sampled_from([NAMES, SPAN_COLUMNS, TABLES["transfers"]]))
    sizes = draw(st.lists(st.sampled_from([0, 0, 1, 2, 7, 40]), min_size=1, max_size=5))
    number = draw(st.sampled_from([st.integers(-3, 9), st.integers(0, 1), st.integers(-LIMIT, LIMIT)]))
    total = sum(sizes)
    rows = st.lists(number, min_size=total, max_size=total)
    values = np.array([draw(rows) for _ in names], np.int64).reshape(len(names), total)
    values[0] = np.maximum(values[0], 1)
    kind = draw(st.sampled_from([np.int64, np.int32])) if np.abs(values).max(initial=0) < 2**31 else np.int64
    return Table(np.cumsum([0, *sizes]), names, values.astype(kind))


@settings(max_examples=300)
@given(st.lists(tables(), min_size=1, max_size=3))
def test_tables_round_trip_through_bytes(originals: list[Table]) -> None:
    ranks = min(table.ranks for table in originals)
    cut_tables = [table.ranks_between(0, ranks) for table in originals]
    parts = parts_of(*cut_tables)
    names = [table.names for table in cut_tables]
    for table, again in zip(cut_tables, decode_parts(parts, *names), strict=True):
        assert again.equal(table)
    for rank, part in enumerate(parts):
        own = decode_parts([part], *names)  # this rank's part only
        assert all(one.equal(table.rank(rank)) for one, table in zip(own, cut_tables, strict=True))


def test_the_bytes_of_a_handmade_table() -> None:
    table = Table.of(np.array([0, 3, 3]), {"a": np.array([1, 300, 2]), "b": np.array([0, 0, 0])})
    assert parts_of(table) == [struct.pack("<IBhhhB", 3, 2, 1, 299, -298, 0), bytes(4)]


STEPS = [(0, 0), (1, 1), (127, 1), (-128, 1), (128, 2), (-129, 2), (2**15 - 1, 2), (2**15, 4)]
STEPS += [(-(2**31), 4), (2**31, 8), (-LIMIT, 8)]


@pytest.mark.parametrize(("step", "width"), STEPS)
def test_the_narrowest_width_is_used(step: int, width: int) -> None:
    (part,) = parts_of(Table(np.array([0, 1]), ("a",), np.array([[step]])))
    assert part == struct.pack("<IB", 1, width) + step.to_bytes(width, "little", signed=True)


@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.int32, np.uint64])
def test_parts_are_the_same_for_all_dtypes(dtype: type) -> None:
    table = Table.of(np.array([0, 3, 5]), {"a": np.array([0, 5, 5, 6, 90], dtype), "b": np.ones(5, np.int64)})
    narrow = Table(table.ptr, table.names, table.values.astype(np.int32))
    assert parts_of(table) == parts_of(narrow)
    assert decode_parts(parts_of(table))[0]["a"].tolist() == [0, 5, 5, 6, 90]


@pytest.mark.parametrize(
    "column", [np.array([1.9, 2.0]), np.array([1, "a"], object), np.array([True, False])]
)
def test_columns_that_are_not_integers_are_refused(column: np.ndarray) -> None:
    with pytest.raises(ConfigError, match=r"x = .* is not an integer dtype"):
        Table.of(np.array([0, 2]), {"x": column})


@pytest.mark.parametrize("value", [LIMIT + 1, -LIMIT - 1, 2**63 - 1, -(2**63)])
def test_numbers_beyond_the_format_are_not_encoded(value: int) -> None:
    table = Table.of(np.array([0, 1, 2]), {"a": np.array([1, 2]), "b": np.array([1, value])})
    with pytest.raises(ConfigError, match=rf"b = {value}.*in row 1"):
        parts_of(table)


def test_too_many_rows_are_not_encoded() -> None:
    table = Table(np.array([0, MAX_ROWS + 1]), ("a",), np.ones((1, MAX_ROWS + 1), np.int32))
    with pytest.raises(ConfigError, match=f"rows = {MAX_ROWS + 1}"):
        parts_of(table)


def table_of(*columns: bytes, rows: int = 3) -> bytes:
    return rows.to_bytes(4, "little") + b"".join(columns)


GOOD = table_of(b"\1\1\1\1", b"\1\0\xff\0")


@pytest.mark.parametrize(
    ("part", "match"),
    [
        (GOOD[:3], "rank 4, table 0: ends before its last row"),
        (GOOD[:5], "ends before"),
        (GOOD[:-1], "rank 4, table 0: ends before"),
        (GOOD + b"\0", "rank 4, table 0: is followed by further bytes"),
        (table_of(b"\3" + bytes(9), b"\0"), "has a width that is none of"),
        (table_of(b"\xff", b"\0"), "ends before|has a width"),
        (table_of(b"\1\1\1\1", b"\1\0\0\0"), "column 'b' is wider than its differences"),
        (table_of(b"\2\1\0\1\0\1\0", b"\0"), "column 'a' is wider"),
        (table_of(b"\4\1\0\0\0", b"\0", rows=1), "column 'a' is wider"),
        (table_of(b"\x08" + bytes([255] * 3 + [0] * 5), b"\0", rows=1), "column 'a' is wider"),
        (table_of(b"\0", b"\0"), "rows that take no byte"),
        (table_of(b"\0", b"\0", rows=2**32 - 1), "more than"),
        (table_of(b"\1", b"\1", rows=2**32 - 1), "ends before"),
    ],
)
def test_malformed_tables_are_refused(part: bytes, match: str) -> None:
    with pytest.raises(DecodeError, match=match):
        decode_parts([GOOD, part])


def test_one_row_of_zeros_takes_no_byte() -> None:
    assert decode_parts([table_of(b"\0", b"\0", rows=1)])[0].values.tolist() == [[0], [0]]
    assert len(decode_parts([bytes(4)])[0]) == 0


def test_columns_in_another_order_are_refused() -> None:
    """Columns are encoded and verified by position, so another order would change the numbers."""
    plan = random_plan(0)
    spans = plan.layouts["attention"].spans
    reordered = Table.of(spans.ptr, dict(reversed(spans.columns.items())))
    with pytest.raises(ConfigError, match=r"layout attention = .position, .*in this order"):
        Layout("attention", reordered)
    table = plan.programs[plan.header.kinds[0], "forward"]["tasks"]
    with pytest.raises(ConfigError, match=r"tasks = .first, .*must have the columns q, kv, o"):
        ProgramSet({"tasks": Table.of(table.ptr, dict(reversed(table.columns.items())))})

"""The parts of all ranks as bytes: what msgpack makes of `wire.Part`, laid down by one loop over the ranks.

Parts differ in numbers, not in form. Their form is a row of *tokens*, made once; the loop goes through it for each
rank:

    TEXT   bytes that all ranks have: keys, and the heads of maps that have no tables
    RANK   the rank's number
    MAP    the head of a map of tables, which counts those in which the rank has rows
    TABLE  a key and a cell, where the rank has rows in that table
    MOVE   a cell; empty where the rank has no rows
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from apportion.ir.columns import CONSTANT, OFFSET, Encoded
from apportion.ir.jit import jit
from apportion.ir.plan import Ints

Bytes = NDArray[np.uint8]
Program = Mapping[str, Encoded]  # table -> its columns

TEXT, RANK, MAP, TABLE, MOVE = range(5)
#: bytes that the head of a blob, a map or a number takes at most
_HEAD = 5
_text = msgspec.msgpack.Encoder().encode


class _Tables(NamedTuple):
    """All tables of the form, as the loop reads them.

    rows: int64 [tables, ranks]. texts: int64 [tables, 3], where in the form's texts the key begins, the cell's codes
    begin, and these end. first: int64 [tables + 1], the first column of each. widths: int64 [columns], as in
    `Encoded`, -w where a rank has but one number of w bytes. blobs: uint8, all columns; at: int64 [columns], where
    the next rank's blob begins.
    """

    rows: Ints
    texts: Ints
    first: Ints
    widths: Ints
    blobs: Bytes
    at: Ints


class _Form:
    """Collects tokens, texts and tables."""

    def __init__(self) -> None:
        self.tokens: list[tuple[int, int, int]] = []
        self.texts = bytearray()
        self.tables: list[Encoded] = []
        self.places: list[tuple[int, int, int]] = []

    def text(self, *texts: bytes) -> None:
        begin = len(self.texts)
        self.texts += b"".join(texts)
        self.tokens.append((TEXT, begin, len(self.texts)))

    def table(self, kind: int, key: bytes, table: Encoded) -> None:
        self.tokens.append((kind, len(self.tables), 0))
        begin = len(self.texts)
        self.texts += key
        codes = len(self.texts)
        self.texts += _head(_ARRAY, 1 + len(table.codes)) + _text(table.codes)
        self.places.append((begin, codes, len(self.texts)))
        self.tables.append(table)

    def map(self, tables: Mapping[str, Encoded]) -> None:
        """A map of the tables in which a rank has rows."""
        self.tokens.append((MAP, len(self.tables), len(self.tables) + len(tables)))
        for name, table in tables.items():
            self.table(TABLE, _text(name), table)

    def columns(self) -> _Tables:
        widths = [
            -width if code in (CONSTANT, OFFSET) else width
            for table in self.tables
            for code, width in zip(table.codes, table.widths, strict=True)
        ]
        blobs = [blob for table in self.tables for blob in table.blobs]
        counts = [len(table.blobs) for table in self.tables]
        return _Tables(
            np.array([table.rows for table in self.tables], np.int64).reshape(len(self.tables), -1),
            np.array(self.places, np.int64).reshape(-1, 3),
            np.cumsum([0, *counts]),
            np.array(widths, np.int64),
            np.concatenate([*blobs, np.zeros(0, np.uint8)]),
            np.cumsum([0, *map(len, blobs)])[:-1],
        )


_MAP, _ARRAY = (0x80, 0xDE), (0x90, 0xDC)


def _head(kind: tuple[int, int], count: int) -> bytes:
    """The head of a map or an array."""
    short, long = kind
    return bytes([short | count]) if count < 16 else bytes([long]) + count.to_bytes(2, "big")


def join_parts(
    layouts: Mapping[str, Encoded],
    programs: Mapping[tuple[str, str], Program],
    moves: Sequence[Encoded],
    ranks: int,
) -> list[bytes]:
    """The part of every rank; tables in which it has no rows are left out of the maps."""
    form = _Form()
    form.text(_head(_MAP, 4), _text("rank"))
    form.tokens.append((RANK, 0, 0))
    form.text(_text("layouts"))
    form.map(layouts)
    _add_programs(form, programs)
    form.text(_text("moves"), _head(_ARRAY, len(moves)))
    for table in moves:
        form.table(MOVE, b"", table)
    tables = form.columns()
    room = len(tables.blobs) + ranks * (len(form.texts) + _HEAD * (1 + len(form.tokens) + len(tables.widths)))
    out, ends = np.empty(room, np.uint8), np.empty(ranks, np.int64)
    _join(np.array(form.tokens, np.int64), np.frombuffer(form.texts, np.uint8), tables, out, ends)
    return [out[begin:end].tobytes() for begin, end in pairwise([0, *ends.tolist()])]


def _add_programs(form: _Form, programs: Mapping[tuple[str, str], Program]) -> None:
    by_kind: dict[str, dict[str, Any]] = {}
    for (kind, phase), tables in programs.items():
        by_kind.setdefault(kind, {})[phase] = tables
    form.text(_text("programs"), _head(_MAP, len(by_kind)))
    for kind, phases in by_kind.items():
        form.text(_text(kind), _head(_MAP, len(phases)))
        for phase, tables in phases.items():
            form.text(_text(phase))
            form.map(tables)


@jit
def _join(tokens: Ints, texts: Bytes, tables: _Tables, out: Bytes, ends: Ints) -> None:
    """Writes the parts into `out`, one after another, and where each ends."""
    at = 0
    for rank in range(len(ends)):
        for token in range(len(tokens)):
            kind, a, b = tokens[token]
            if kind == TEXT:
                at = _copy(out, at, texts, a, b)
            elif kind == RANK:
                at = _write_count(out, at, rank)
            elif kind == MAP:
                at = _write_map(out, at, tables.rows, a, b, rank)
            elif tables.rows[a, rank] > 0:
                at = _write_cell(out, at, texts, tables, a, rank)
            elif kind == MOVE:
                out[at] = 0x90
                at += 1
        ends[rank] = at


@jit
def _copy(out: Bytes, at: int, source: Bytes, begin: int, end: int) -> int:
    out[at : at + end - begin] = source[begin:end]
    return at + end - begin


@jit
def _write_count(out: Bytes, at: int, count: int) -> int:
    """A number up to 65,535 in its shortest form."""
    if count < 128:
        out[at] = count
        return at + 1
    if count < 256:
        out[at], out[at + 1] = 0xCC, count
        return at + 2
    out[at], out[at + 1], out[at + 2] = 0xCD, count >> 8, count & 255
    return at + 3


@jit
def _write_map(out: Bytes, at: int, rows: Ints, first: int, end: int, rank: int) -> int:
    count = 0
    for table in range(first, end):
        count += rows[table, rank] > 0
    if count < 16:
        out[at] = 0x80 | count
        return at + 1
    out[at], out[at + 1], out[at + 2] = 0xDE, count >> 8, count & 255
    return at + 3


@jit
def _write_cell(out: Bytes, at: int, texts: Bytes, tables: _Tables, table: int, rank: int) -> int:
    """The key and the cell of a table in which the rank has rows."""
    rows = tables.rows[table, rank]
    at = _copy(out, at, texts, tables.texts[table, 0], tables.texts[table, 2])
    for column in range(tables.first[table], tables.first[table + 1]):
        width = tables.widths[column]
        size = -width if width < 0 else rows * width if width > 0 else (rows + 7) >> 3
        at = _write_blob_head(out, at, size)
        at = _copy(out, at, tables.blobs, tables.at[column], tables.at[column] + size)
        tables.at[column] += size
    return at


@jit
def _write_blob_head(out: Bytes, at: int, size: int) -> int:
    length = 1 if size < 1 << 8 else 2 if size < 1 << 16 else 4
    out[at] = 0xC4 if length == 1 else 0xC5 if length == 2 else 0xC6
    for place in range(length):
        out[at + 1 + place] = (size >> (8 * (length - 1 - place))) & 255
    return at + 1 + length

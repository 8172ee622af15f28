"""The parts of all ranks as bytes: what msgpack makes of `wire.Part`, laid down by one loop over the ranks.

Parts differ in numbers, not in form. Their form is a row of *tokens*, made once; the loop goes through it for each
rank:

    TEXT   bytes that all ranks have: keys, and the heads of maps and arrays
    RANK   the rank's number
    CELL   the rank's rows of a table, perhaps none
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np

from apportion.ir.columns import Encoded
from apportion.ir.jit import jit
from apportion.ir.numbers import Bytes
from apportion.ir.plan import Ints

TEXT, RANK, CELL = range(3)
#: bytes that the head of a cell or a number takes at most
_HEAD = 5
_text = msgspec.msgpack.Encoder().encode
_MAP, _ARRAY = (0x80, 0xDE), (0x90, 0xDC)


class _Form:
    """Collects tokens, texts and cells."""

    def __init__(self) -> None:
        self.tokens: list[tuple[int, int, int]] = []
        self.texts = bytearray()
        self.cells: list[Encoded] = []

    def text(self, *texts: bytes) -> None:
        begin = len(self.texts)
        self.texts += b"".join(texts)
        self.tokens.append((TEXT, begin, len(self.texts)))

    def tables(self, tables: Sequence[Encoded]) -> None:
        """An array of a cell for each table."""
        self.text(_head(_ARRAY, len(tables)))
        for table in tables:
            self.tokens.append((CELL, len(self.cells), 0))
            self.cells.append(table)


def _head(kind: tuple[int, int], count: int) -> bytes:
    """The head of a map or an array."""
    short, long = kind
    return bytes([short | count]) if count < 16 else bytes([long]) + count.to_bytes(2, "big")


def join_parts(
    layouts: Sequence[Encoded],
    programs: Mapping[tuple[str, str], Sequence[Encoded]],
    moves: Sequence[Encoded],
    ranks: range,
) -> list[bytes]:
    """The part of each of these ranks; the phases of a kind stand side by side among the programs."""
    form = _Form()
    form.text(_head(_MAP, 4), _text("rank"))
    form.tokens.append((RANK, 0, 0))
    form.text(_text("layouts"))
    form.tables(layouts)
    _add_programs(form, programs)
    form.text(_text("moves"))
    form.tables(moves)
    cells = np.concatenate([*(table.data for table in form.cells), np.zeros(0, np.uint8)])
    stops = np.array([table.stops for table in form.cells], np.int64).reshape(len(form.cells), len(ranks))
    first = np.cumsum([0, *(len(table.data) for table in form.cells)])
    room = len(cells) + len(ranks) * (len(form.texts) + _HEAD * (1 + len(form.tokens)))
    out, ends = np.empty(room, np.uint8), np.empty(len(ranks), np.int64)
    tokens, texts = np.array(form.tokens, np.int64), np.frombuffer(form.texts, np.uint8)
    _join(ranks.start, tokens, texts, cells, first, stops, out, ends)
    return [out[begin:end].tobytes() for begin, end in pairwise([0, *ends.tolist()])]


def _add_programs(form: _Form, programs: Mapping[tuple[str, str], Sequence[Encoded]]) -> None:
    by_kind: dict[str, dict[str, Any]] = {}
    for (kind, phase), tables in programs.items():
        by_kind.setdefault(kind, {})[phase] = tables
    form.text(_text("programs"), _head(_MAP, len(by_kind)))
    for kind, phases in by_kind.items():
        form.text(_text(kind), _head(_MAP, len(phases)))
        for phase, tables in phases.items():
            form.text(_text(phase))
            form.tables(tables)


@jit
def _join(
    first_rank: int,
    tokens: Ints,
    texts: Bytes,
    cells: Bytes,
    first: Ints,
    stops: Ints,
    out: Bytes,
    ends: Ints,
) -> None:
    """Writes the parts of the ranks from `first_rank` on into `out`, one after another, and where each ends. cells:
    those of table after table; first: int64 [tables + 1], where those of each begin; stops: int64 [tables, ranks],
    where each ends, counted from there."""
    at = 0
    for rank in range(len(ends)):
        for token in range(len(tokens)):
            kind, a, b = tokens[token]
            if kind == TEXT:
                at = _copy(out, at, texts, a, b)
            elif kind == RANK:
                at = _write_count(out, at, first_rank + rank)
            else:
                begin = first[a] + (stops[a, rank - 1] if rank > 0 else 0)
                end = first[a] + stops[a, rank]
                at = _write_head(out, at, end - begin)
                at = _copy(out, at, cells, begin, end)
        ends[rank] = at


@jit
def _copy(out: Bytes, at: int, source: Bytes, begin: int, end: int) -> int:
    here, there = out[at : at + end - begin], source[begin:end]
    for byte in range(len(there)):  # assigning the slice takes seconds to compile
        here[byte] = there[byte]
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
def _write_head(out: Bytes, at: int, size: int) -> int:
    """The head of a cell."""
    length = 1 if size < 1 << 8 else 2 if size < 1 << 16 else 4
    out[at] = 0xC4 if length == 1 else 0xC5 if length == 2 else 0xC6
    for place in range(length):
        out[at + 1 + place] = (size >> (8 * (length - 1 - place))) & 255
    return at + 1 + length

"""Rule 1: in each layout every token is on exactly one row; positions and sequence ids match the batch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from apportion.ir.arrays import Ints, group_of, index_in_group
from apportion.ir.orders import stable_order
from apportion.ir.plan.tables import Layout, Move, Table
from apportion.ir.request.batch import Batch
from apportion.ir.verify.report import Violation, span
from apportion.ir.verify.subject import Subject

RULE = "layouts"


def check(subject: Subject) -> Iterator[Violation]:
    """Violations of the rule `layouts`."""
    plan = subject.plan
    for layout in plan.layouts.values():
        yield from _check_rows(layout)
        yield from _check_tokens(layout, plan.request.batch.tokens)
        yield from _check_identity(layout, plan.request.batch)
    for move in plan.moves:
        yield from _check_move(move, plan.layouts[move.source], plan.layouts[move.target])


def check_move(move: Move, source: Layout, target: Layout, tokens: int) -> Iterator[Violation]:
    """Violations in two layouts of `tokens` tokens, possibly of different plans, and in the move between them."""
    for layout in (source, target):
        yield from _check_rows(layout)
        yield from _check_tokens(layout, tokens)
    yield from _check_move(move, source, target)


def violation(layout: Layout, row: int, message: str) -> Violation:
    """A violation at a span, by its number over all ranks."""
    spans = layout.spans
    rank = int(np.searchsorted(spans.ptr, row, side="right")) - 1
    text = f"layout {layout.name}, span {row - int(spans.ptr[rank])} {message}"
    return Violation(RULE, rank, None, None, None, text)


def _column(spans: Table, name: str) -> Ints:
    return np.asarray(spans[name], np.int64)


def _check_rows(layout: Layout) -> Iterator[Violation]:
    """Checks that the rows of each rank are 0, 1, … without gaps."""
    spans = layout.spans
    row, length, rank = _column(spans, "row"), _column(spans, "length"), spans.rank_of_row()
    order = np.lexsort((row, rank)) if _is_unsorted(rank, row) else np.arange(len(row))
    ends = np.cumsum(length[order])
    rank_offset = np.append(0, ends)[spans.ptr[:-1]]
    expected = ends - length[order] - rank_offset[rank[order]]
    for i in np.flatnonzero(row[order] != expected).tolist():
        message = f"begins at row {row[order[i]]}, but the rows before it end at {expected[i]}"
        yield violation(layout, int(order[i]), message)


def _is_unsorted(rank: Ints, row: Ints) -> bool:
    return bool(((rank[1:] == rank[:-1]) & (row[1:] < row[:-1])).any())


def _check_tokens(layout: Layout, tokens: int) -> Iterator[Violation]:
    """Checks that each global token occurs once."""
    token, length = _column(layout.spans, "token"), _column(layout.spans, "length")
    order = stable_order(token)
    ends = (token + length)[order]
    expected = np.append(0, ends)[:-1]
    for i in np.flatnonzero(token[order] != expected).tolist():
        message = _gap_or_overlap(int(expected[i]), int(token[order[i]]), int(length[order[i]]))
        yield violation(layout, int(order[i]), message)
    last = int(ends[-1]) if len(ends) else 0
    if last != tokens:
        message = f"layout {layout.name} holds tokens up to {last}, but the batch has {tokens}"
        yield Violation(RULE, None, None, None, None, message)


def _gap_or_overlap(expected: int, token: int, length: int) -> str:
    if token > expected:
        return f"holds tokens {span(token, length)}, but tokens [{expected}, {token}) are in no span"
    shared = min(expected, token + length)
    return f"holds tokens {span(token, length)}, but tokens [{token}, {shared}) are also on another row"


def _check_identity(layout: Layout, batch: Batch) -> Iterator[Violation]:
    """Checks sequence and position of each span against the batch."""
    spans = layout.spans
    token, length = _column(spans, "token"), _column(spans, "length")
    clipped = np.minimum(token, batch.tokens - 1)
    last = np.minimum(token + length, batch.tokens) - 1
    sequence = np.searchsorted(batch.starts, clipped, side="right") - 1
    breaks = batch.position_breaks()
    is_cut = np.searchsorted(breaks, clipped, side="right") != np.searchsorted(breaks, last, side="right")
    position = batch.position_at(clipped)
    checks = [
        (
            spans["sequence"] != sequence,
            "has sequence {0}, but its tokens belong to sequence {1}",
            "sequence",
            sequence,
        ),
        (
            spans["position"] != position,
            "has position {0}, but its first token has position {1}",
            "position",
            position,
        ),
        (is_cut, "continues past token {1}, at which the position jumps", "token", _next(breaks, clipped)),
    ]
    for is_wrong, message, name, value in checks:
        for row in np.flatnonzero(is_wrong).tolist():
            yield violation(layout, row, message.format(spans[name][row], value[row]))


def _next(breaks: Ints, token: Ints) -> Ints:
    return np.append(breaks, -1)[np.searchsorted(breaks, token, side="right")]


# ---- moves


def _check_move(move: Move, source: Layout, target: Layout) -> Iterator[Violation]:
    """Checks that the moves turn the source layout into the target layout."""
    prefix, pieces = f"move {move.source} -> {move.target}: ", apply_moves(move.table, source)
    if isinstance(pieces, str):
        yield Violation(RULE, None, None, None, None, prefix + pieces)
        return
    expected = merged_pieces(
        target.spans.rank_of_row(), *(_column(target.spans, n) for n in ("row", "token", "length"))
    )
    if not np.array_equal(pieces, expected):
        yield _first_difference(pieces, expected, prefix)


def apply_moves(table: Table, source: Layout) -> Ints | str:
    """[pieces, 4]: (rank, row, token, rows) after the moves of a layout's rows, sorted by rank and row; or an error
    message. The k-th send i -> j goes to the rows of the k-th receive of j from i."""
    rank, peer = table.rank_of_row(), _column(table, "peer")
    send = np.flatnonzero(_column(table, "send") == 1)
    receive = np.flatnonzero(_column(table, "send") == 0)
    send = send[np.lexsort((send, peer[send], rank[send]))]
    receive = receive[np.lexsort((receive, rank[receive], peer[receive]))]
    row, rows = _column(table, "row"), _column(table, "rows")
    paired = len(send) == len(receive) and all(
        np.array_equal(a[send], b[receive]) for a, b in ((rank, peer), (peer, rank), (rows, rows))
    )
    if not paired:
        return "sends and receives do not match one by one"
    for message in _check_sent_rows(source, rank[send], row[send], rows[send], "sends"):
        return message
    return _moved_layout(source, rank[send], row[send], rows[send], rank[receive], row[receive])


def _check_sent_rows(layout: Layout, rank: Ints, row: Ints, rows: Ints, verb: str) -> Iterator[str]:
    limit = layout.rows_per_rank[rank]
    for i in np.flatnonzero(row + rows > limit)[:1].tolist():
        yield f"rank {rank[i]} {verb} rows {span(int(row[i]), int(rows[i]))}, but has {limit[i]} rows"


def _moved_layout(source: Layout, rank: Ints, row: Ints, rows: Ints, to_rank: Ints, to_row: Ints) -> Ints:
    """[pieces, 4]: (rank, row, token, rows) of the layout after the moves."""
    spans = source.spans
    order = np.lexsort((_column(spans, "row"), spans.rank_of_row()))
    token, length = _column(spans, "token")[order], _column(spans, "length")[order]
    start = np.cumsum(length) - length  # rows of all ranks on one axis
    base = np.append(start, start[-1:] + length[-1:])[spans.ptr[:-1]] if len(start) else spans.ptr[:-1]
    source_row = base[rank] + row
    first_span = np.searchsorted(start, source_row, side="right") - 1
    count = np.searchsorted(start, source_row + rows, side="left") - first_span
    piece = group_of(count)
    at = np.repeat(first_span, count) + index_in_group(count)
    first = np.maximum(start[at], source_row[piece])
    last = np.minimum(start[at] + length[at], (source_row + rows)[piece])
    return merged_pieces(
        to_rank[piece], to_row[piece] + first - source_row[piece], token[at] + first - start[at], last - first
    )


def merged_pieces(rank: Ints, row: Ints, token: Ints, rows: Ints) -> Ints:
    """[pieces, 4]: sorted by (rank, row), contiguous neighbours merged."""
    order = np.lexsort((row, rank))
    rank, row, token, rows = (np.asarray(x, np.int64)[order] for x in (rank, row, token, rows))
    continues = (rank[1:] == rank[:-1]) & (row[1:] == (row + rows)[:-1]) & (token[1:] == (token + rows)[:-1])
    starts = np.flatnonzero(np.append(True, ~continues)[: len(rank)])
    total = np.add.reduceat(rows, starts) if len(starts) else rows
    return np.column_stack([rank[starts], row[starts], token[starts], total])


def _first_difference(pieces: Ints, expected: Ints, prefix: str) -> Violation:
    shared = min(len(pieces), len(expected))
    mismatches = np.flatnonzero((pieces[:shared] != expected[:shared]).any(axis=1))
    index = int(mismatches[0]) if len(mismatches) else shared
    texts = [
        "nothing more"
        if index >= len(runs)
        else f"rows {span(int(runs[index, 1]), int(runs[index, 3]))} of rank "
        f"{runs[index, 0]} with tokens from {runs[index, 2]}"
        for runs in (pieces, expected)
    ]
    rank = int((expected if index < len(expected) else pieces)[index, 0])
    return Violation(
        RULE, rank, None, None, None, f"{prefix}makes {texts[0]}, but the target layout has {texts[1]}"
    )

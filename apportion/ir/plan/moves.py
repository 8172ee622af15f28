"""Moves of rows between layouts: of one plan, or from an encoder's plan to a decoder's.

encoder     rank 0 |aaaaaaaa|bbbb|     rank 1 |bbbb|cccc|      rows of images a, b, c
decoder     rank 0 |..aa..b|           rank 1 |b..c...|        tokens; a letter stands for `merge` = 4 rows
fed rows    rank 0 |aaaaaaaabbbb|      rank 1 |bbbbcccc|       the encoder's rows, in the layout of the feed
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from apportion.ir.arrays import Ints, group_of, index_in_group, offsets
from apportion.ir.errors import ConfigError
from apportion.ir.isa import MOVE_COLUMNS, SPAN_COLUMNS
from apportion.ir.plan.tables import Layout, Move, Table

TARGET_COLUMNS = ("row", "rows")


def move_table(pieces: Ints, ranks: int) -> Table:
    """The sends, then the receives of every rank, each sorted by peer. pieces: int64 [5, pieces]: source rank and row,
    target rank and row, number of rows."""
    src, src_row, dst, dst_row, rows = pieces
    rank, peer, row = (np.concatenate(pair) for pair in ((src, dst), (dst, src), (src_row, dst_row)))
    send, rows = np.repeat([1, 0], len(src)), np.concatenate([rows, rows])
    order = np.lexsort((peer, -send, rank))
    ptr = np.searchsorted(rank[order], np.arange(ranks + 1))
    columns = (send, peer, row, rows)
    return Table(ptr, MOVE_COLUMNS, np.stack(columns).take(order, 1))


def move_between(source: Layout, target: Layout) -> Move:
    """The move between two layouts of the same tokens, in each of which every token occurs once."""
    cuts = np.union1d(source.spans["token"], target.spans["token"])
    sides, rows = [], np.diff(np.append(cuts, source.rows_per_rank.sum()))
    for token, rank, row in map(_sorted_spans, (source, target)):
        index = np.searchsorted(token, cuts, "right") - 1
        sides += [rank[index], row[index] + cuts - token[index]]
    return Move(source.name, target.name, move_table(np.stack([*sides, rows]), source.spans.ranks))


@dataclass(frozen=True, eq=False)
class Feed:
    """An encoder's rows, in a layout from which a decoder reads them.

    places: int64 [n, 3], sorted by token: first token of the decoder, first row of the encoder, number of tokens, each
    of which stands for `merge` rows. layout: the encoder's rows on the ranks of these tokens, in the order of the
    decoder's rows; targets: the decoder's rows that each span of `layout` fills; move: from the encoder's own layout to
    `layout`."""

    places: Ints
    merge: int
    layout: Layout
    targets: Table
    move: Move

    @staticmethod
    def of(encoder: Layout, decoder: Layout, places: Ints, merge: int) -> Feed:
        """The feed between two home layouts. Raises ConfigError if places overlap, are not runs of the decoder's tokens
        or do not name each of the encoder's rows exactly once."""
        token, first, count = places.T
        ends, tokens = token + count, int(decoder.rows_per_rank.sum())
        is_valid = (count >= 1) & (token >= 0) & (ends <= np.append(token, tokens)[1:])
        if not is_valid.all():
            rule = f"must be runs of the decoder's {tokens} tokens, without overlap"
            raise ConfigError(
                "places", places[~is_valid][0].tolist(), rule, "give each token to at most one image"
            )
        order, rows = np.argsort(first), int(encoder.rows_per_rank.sum())
        if not np.array_equal(np.append(first[order], rows), offsets(count[order] * merge)):
            rule = f"must name each of the encoder's {rows} rows once, {merge} per token"
            raise ConfigError("places", f"{int(count.sum())} tokens", rule, "give each image as many tokens")
        layout, targets = _feed_layout(decoder, places, merge)
        return Feed(places, merge, layout, targets, move_between(encoder, layout))


def _feed_layout(decoder: Layout, places: Ints, merge: int) -> tuple[Layout, Table]:
    (token, first, count), (start, rank, row) = places.T, _sorted_spans(decoder)
    first_span = np.searchsorted(start, token, "right") - 1
    parts = np.searchsorted(start, token + count) - first_span
    image, index = group_of(parts), np.repeat(first_span, parts) + index_in_group(parts)
    begin = np.maximum(start[index], token[image])
    rows = np.minimum(np.append(start, token[-1:] + count[-1:])[index + 1], (token + count)[image]) - begin
    order = np.lexsort((row[index], rank[index]))
    begin, rows, image, index = begin[order], rows[order], image[order], index[order]
    ptr = np.searchsorted(rank[index], np.arange(decoder.spans.ranks + 1))
    row_offsets, position = offsets(rows), (begin - token[image]) * merge
    own_row = (row_offsets[:-1] - row_offsets[ptr[:-1]][rank[index]]) * merge
    spans = np.stack([own_row, first[image] + position, rows * merge, image, position])
    targets = np.stack([row[index] + begin - start[index], rows])
    return Layout("fed", Table(ptr, SPAN_COLUMNS, spans)), Table(ptr, TARGET_COLUMNS, targets)


def _sorted_spans(layout: Layout) -> tuple[Ints, Ints, Ints]:
    """(token, rank, row) of the spans, sorted by token."""
    order = np.argsort(layout.spans["token"], kind="stable")
    token, row = (layout.spans.wide(name)[order] for name in ("token", "row"))
    return token, layout.spans.rank_of_row()[order], row

"""Proves that a feed delivers each row of an encoder once, from its owner, to where the decoder's rows need it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from apportion.ir.arrays import offsets
from apportion.ir.errors import VerifyError
from apportion.ir.plan.moves import Feed
from apportion.ir.plan.tables import Layout
from apportion.ir.verify.report import Violation, first_few
from apportion.ir.verify.rules.layouts import RULE, check_move, violation


def verify_feed(feed: Feed, encoder: Layout, decoder: Layout) -> None:
    """Raises VerifyError. encoder, decoder: home layouts of their plans."""
    if faults := first_few(_violations(feed, encoder, decoder)):
        raise VerifyError("\n  ".join(["the feed breaks the rule layouts", *map(str, faults)]), faults)


def _violations(feed: Feed, encoder: Layout, decoder: Layout) -> Iterator[Violation]:
    """Violations of the rule `layouts` by the move, then spans at the wrong tokens of the decoder."""
    yield from check_move(feed.move, encoder, feed.layout, int(encoder.rows_per_rank.sum()))
    spans, rank = feed.layout.spans, feed.layout.spans.rank_of_row()
    if not np.array_equal(feed.targets.ptr, spans.ptr):
        yield Violation(RULE, None, None, None, None, "targets and spans of the fed rows differ in number")
        return
    row, rows = (feed.targets.wide(name) for name in feed.targets.names)
    home = decoder.spans
    base = offsets(decoder.rows_per_rank)  # rows of all ranks on one axis
    starts = base[home.rank_of_row()] + home.wide("row")
    order = np.argsort(starts, kind="stable")
    index = order[np.searchsorted(starts[order], base[rank] + row, "right") - 1]
    offset = base[rank] + row - starts[index]
    token = home.wide("token")[index] + offset
    image = np.searchsorted(feed.places[:, 0], token, "right") - 1
    first, source, count = feed.places[image].T
    expected = source + (token - first) * feed.merge
    is_inside = (image >= 0) & (offset + rows <= home.wide("length")[index]) & (token + rows <= first + count)
    is_right = is_inside & (spans["token"] == expected) & (spans["length"] == rows * feed.merge)
    # the decoder's rows must ascend on each rank, so that fed rows lie in the same order
    is_right[1:] &= (rank[1:] != rank[:-1]) | (row[1:] >= (row + rows)[:-1])
    for i in np.flatnonzero(~is_right).tolist():
        yield violation(feed.layout, i, f"is at row {row[i]} of the decoder, which does not expect it there")

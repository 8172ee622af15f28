"""Feeds of an encoder's rows to a decoder: each row once, from its owner, where the decoder's rows need it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from numpy.random import Generator
from numpy.typing import NDArray

from apportion.ir.errors import VerifyError
from apportion.ir.isa import SPAN_COLUMNS
from apportion.ir.plan.moves import Feed
from apportion.ir.plan.tables import Layout, Table
from apportion.ir.verify.feeds import verify_feed


def layout(name: str, tokens: int, ranks: int, draw: Generator) -> Layout:
    """A layout of tokens cut at random, with the runs in any order on any rank."""
    cuts = np.unique(np.append(0, draw.integers(0, max(tokens, 1), 9))) if tokens else np.zeros(0, int)
    rank = np.sort(draw.integers(0, ranks, len(cuts)))
    order, length = draw.permutation(len(cuts)), np.diff(np.append(cuts, tokens))
    token, length = cuts[order], length[order]
    row = np.cumsum(length) - length
    ptr = np.searchsorted(rank, np.arange(ranks + 1))
    row = row - np.append(row, 0)[ptr[:-1]][rank]
    zero = np.zeros_like(row)
    return Layout(name, Table(ptr, SPAN_COLUMNS, np.stack([row, token, length, zero, zero])))


def places(tokens: int, images: int, merge: int, draw: Generator) -> NDArray[np.int64]:
    """Places of images, adjacent or not, with rows in a different order from the tokens."""
    edges = np.sort(draw.choice(tokens + 1, 2 * images, replace=False)).reshape(-1, 2)
    count = np.diff(edges, axis=1)[:, 0]
    order = draw.permutation(images)
    first = np.empty_like(count)
    first[order] = (np.cumsum(count[order]) - count[order]) * merge
    return np.column_stack([edges[:, 0], first, count])


def random_feed(seed: int) -> tuple[Feed, Layout, Layout]:
    draw = np.random.default_rng(seed)
    ranks, merge, images = (int(draw.integers(1, most)) for most in (5, 5, 5))
    image_places = places(40, images, merge, draw)
    encoder = layout("encoder", merge * int(image_places[:, 2].sum()), ranks, draw)
    decoder = layout("decoder", 40, ranks, draw)
    return Feed.of(encoder, decoder, image_places, merge), encoder, decoder


@pytest.mark.parametrize("seed", range(40))
def test_each_row_is_fed_to_the_rank_of_its_token(seed: int) -> None:
    feed, encoder, decoder = random_feed(seed)
    verify_feed(feed, encoder, decoder)
    source = {  # token -> its rows
        first + i: [row + i * feed.merge + j for j in range(feed.merge)]
        for first, row, count in feed.places.tolist()
        for i in range(count)
    }
    for rank in range(decoder.spans.ranks):
        tokens = [token for token in decoder.tokens(rank).tolist() if token in source]
        assert feed.layout.tokens(rank).tolist() == [row for token in tokens for row in source[token]]
        runs = feed.targets.rank(rank).values.T.tolist()
        fed = [i for row, rows in runs for i in range(row, row + rows)]
        assert decoder.tokens(rank)[fed].tolist() == tokens


def shifted(table: Table, column: str, by: int = 1) -> Table:
    values = table.values.copy()
    values[table.names.index(column), 0] += by
    return replace(table, values=values)


FAULTS: dict[str, tuple[Callable[[Feed], Feed], str]] = {
    "another row of the decoder": (
        lambda feed: replace(feed, targets=shifted(feed.targets, "row")),
        "is at row .* of the decoder, which does not expect it there",
    ),
    "fewer rows of the decoder": (
        lambda feed: replace(feed, targets=shifted(feed.targets, "rows", -1)),
        "which does not expect it there",
    ),
    "another row sent": (
        lambda feed: replace(feed, move=replace(feed.move, table=shifted(feed.move.table, "row"))),
        "move encoder -> fed",
    ),
    "another row of the encoder": (
        lambda feed: replace(feed, layout=replace(feed.layout, spans=shifted(feed.layout.spans, "token"))),
        "layout fed",
    ),
    "no targets": (
        lambda feed: replace(feed, targets=feed.targets.take(np.zeros(0, int), feed.targets.ptr * 0)),
        "targets and spans of the fed rows differ",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_invalid_feed_is_refused(fault: str) -> None:
    change, message = FAULTS[fault]
    feed, encoder, decoder = random_feed(2)
    with pytest.raises(VerifyError, match=message):
        verify_feed(change(feed), encoder, decoder)

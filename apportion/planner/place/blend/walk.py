"""The walk of `blend`: rank after rank takes the densest and the sparsest rows that are left.

Narrow documents (one rank can compute them) stand by density; wide ones, which it cannot, after them. A rank fills its
tokens with x tokens of what is dense and the rest of what is sparse; x is where it has the pairs wanted of it.

    narrow  │ sparse ──►  · · · · ·  ◄── dense │   wide  │ ──► heads · · · tails ◄── │

    dense   the rest of a document that was begun (the stack); else the ends of the last wide document, until its rest
            is no longer dense; else narrow documents from the end, the last one's tail
    sparse  rests that are no longer dense (the queue), narrow documents from the front, the last one's head; when there
            are none, heads of wide documents

A rank leaves at most three documents begun, so there are O(documents + ranks) pieces; each x is found by bisection.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from apportion.ir.arrays import Floats, Ints, offsets
from apportion.ir.loops.jit import jit, lean
from apportion.planner.place.blend.profile import Profile, pairs_between

#: a document whose halves differ by at most this share of its pairs is cut into consecutive shares
FLAT = 0.25
#: pieces that later exchanges may add, for each rank
SPARE = 16


class Left(NamedTuple):
    """What is left of the documents, narrow ones first, by density.

    table: int64 [4, segments], the columns of a profile; low, high: int64 [documents], the rows left of each; head:
    float64 [documents], which part of a wide one's shares comes from its head; ends, work: int64 [documents + 1],
    tokens and pairs of the whole documents before each; queue, stack: int64, rests that go before all else that is
    sparse, or dense; at: int64 [8], the cursors; pieces: int64 [room, 3], first row, end and rank of what was taken.
    """

    table: Ints
    low: Ints
    high: Ints
    head: Floats
    ends: Ints
    work: Ints
    queue: Ints
    stack: Ints
    at: Ints
    pieces: Ints


# Cursors: the first and the last narrow document left; the first and the last wide one; the first in the queue and its
# end; the end of the stack; the end of the pieces.
SPARSE, DENSE, HEADS, TAILS, QUEUE, QUEUED, STACK, PIECES = range(8)


def walk(documents: Ints, rows: Profile, tokens: Ints, speeds: Floats, head: float) -> tuple[Ints, int]:
    """Pieces, int64 [room, 3]: first row, end and rank of what each rank takes, rank after rank; and how many they are.

    documents: int64 [documents + 1], first rows; tokens: int64 [ranks], how many each rank takes, all in all; speeds:
    float64 [ranks]; head: which part of a share of a wide document comes from its head.
    """
    left = _begin(documents, rows, len(tokens), float(rows.below[-1] * speeds.max() / speeds.sum()), head)
    _walk(left, tokens, speeds)
    return left.pieces, int(left.at[PIECES])


def _begin(documents: Ints, rows: Profile, ranks: int, widest: float, head: float) -> Left:
    lengths, pairs = np.diff(documents), np.diff(rows.upto(documents))
    first = rows.upto(documents[:-1] + lengths // 2) - rows.upto(documents[:-1])
    wide, rising = pairs > widest, pairs - 2 * first > FLAT * pairs
    order = np.lexsort((np.arange(len(lengths)), pairs / lengths, wide))
    low, high = documents[:-1][order], documents[1:][order]
    ends, work = (offsets(column[order]) for column in (lengths, pairs))
    narrow, room = len(wide) - int(wide.sum()), len(lengths) + SPARE * ranks
    rests = np.empty((2, room), np.int64)
    at = np.array([0, narrow - 1, narrow, len(wide) - 1, 0, 0, 0, 0])
    part = np.where(rising, head, 0.0)[order]
    pieces = np.empty((room, 3), np.int64)
    return Left(rows.table, low, high, part, ends, work, rests[0], rests[1], at, pieces)


@jit
def _walk(left: Left, tokens: Ints, speeds: Floats) -> None:
    """What a rank has too much or too little of is made up for by those after it."""
    work, speed = left.work[-1], speeds.sum()
    for rank in range(len(tokens)):
        begun = left.at[PIECES]
        _fill(left, rank, tokens[rank], work * (speeds[rank] / speed))
        for piece in range(begun, left.at[PIECES]):
            work -= pairs_between(left.table, left.pieces[piece, 0], left.pieces[piece, 1])
        speed -= speeds[rank]


@lean
def _fill(left: Left, rank: int, tokens: int, target: float) -> None:
    """One rank's pieces: so many tokens, of `target` pairs."""
    at = left.at
    _unburden(left, tokens, target)
    while tokens > 0 and (at[STACK] > 0 or at[HEADS] <= at[TAILS]):
        begun = at[STACK] > 0
        doc = left.stack[at[STACK] - 1] if begun else at[TAILS]
        size = left.high[doc] - left.low[doc]
        if _mixed(left, doc, tokens, min(tokens, size)) > target:
            x = _share(left, doc, tokens, target, min(tokens, size))
            _take_ends(left, doc, x, rank)
            _take_sparse(left, tokens - x, rank)
            return
        at[STACK if begun else TAILS] -= 1
        less = target - pairs_between(left.table, left.low[doc], left.high[doc])
        if size > tokens or _most(left, tokens - size) < less:
            _enqueue(left, doc)
            continue
        _take_ends(left, doc, size, rank)
        tokens, target = tokens - size, less
        if not begun and _mixed(left, -1, tokens, _narrow(left, tokens)) >= target:
            break
    x = _share(left, -1, tokens, target, _narrow(left, tokens))
    _take_dense(left, x, rank)
    _take_sparse(left, tokens - x, rank)


@lean
def _unburden(left: Left, tokens: int, target: float) -> None:
    """What was begun and is too dense to go with the sparsest counts as dense from now on."""
    at = left.at
    while _sparse(left, tokens) >= target + 1:
        first = at[SPARSE]
        if at[QUEUE] < at[QUEUED]:
            _push(left, left.queue[at[QUEUE]])
            at[QUEUE] += 1
        elif (
            first <= at[DENSE]
            and left.high[first] - left.low[first] < left.ends[first + 1] - left.ends[first]
        ):
            _push(left, first)
            at[SPARSE] += 1
        else:
            return


@lean
def _push(left: Left, doc: int) -> None:
    left.stack[left.at[STACK]] = doc
    left.at[STACK] += 1


@lean
def _enqueue(left: Left, doc: int) -> None:
    at = left.at
    if at[QUEUED] == len(left.queue):  # what waits is far less than the room: begin anew
        at[QUEUED] -= at[QUEUE]
        for place in range(at[QUEUED]):
            left.queue[place] = left.queue[at[QUEUE] + place]
        at[QUEUE] = 0
    left.queue[at[QUEUED]] = doc
    at[QUEUED] += 1


# ---------------------------------------------------------------------------------------------- what would be taken


@lean
def _most(left: Left, tokens: int) -> int:
    """The most pairs that so many tokens can have."""
    at, most = left.at, _mixed(left, -1, tokens, _narrow(left, tokens))
    if at[STACK] == 0 and at[HEADS] > at[TAILS]:
        return most
    doc = left.stack[at[STACK] - 1] if at[STACK] > 0 else at[TAILS]
    return max(most, _mixed(left, doc, tokens, min(tokens, left.high[doc] - left.low[doc])))


@lean
def _share(left: Left, doc: int, tokens: int, target: float, most: int) -> int:
    """How many of `tokens` tokens, at most `most`, should be dense for `target` pairs: bisection, as pairs rise with
    them, in the end at least."""
    if _mixed(left, doc, tokens, most) <= target:
        return most
    least = 0
    while most - least > 1:
        x = (least + most) // 2
        if _mixed(left, doc, tokens, x) <= target:
            least = x
        else:
            most = x
    return least


@lean
def _mixed(left: Left, doc: int, tokens: int, x: int) -> int:
    """Pairs of `tokens` tokens, x of them dense: the ends of `doc`, or narrow documents where it is -1."""
    return _sparse(left, tokens - x) + (_ends(left, doc, x) if doc >= 0 else _dense(left, x))


@lean
def _ends(left: Left, doc: int, tokens: int) -> int:
    """Pairs of so many tokens of a document's head and tail."""
    head, low, high = int(tokens * left.head[doc]), left.low[doc], left.high[doc]
    return pairs_between(left.table, low, low + head) + pairs_between(left.table, high - tokens + head, high)


@lean
def _dense(left: Left, tokens: int) -> int:
    """Pairs of so many tokens of narrow documents: the last ones, and the tail of the one before."""
    first, last = left.at[SPARSE], left.at[DENSE]
    if tokens <= 0 or last < first:
        return 0
    down = left.ends[last + 1] - tokens
    start = _first_from(left.ends, first + 1, last + 1, down)
    rest = left.ends[start] - down
    high = left.high[start - 1]
    pairs: int = left.work[last + 1] - left.work[start] + pairs_between(left.table, high - rest, high)
    return pairs


@lean
def _sparse(left: Left, tokens: int) -> int:
    """Pairs of the sparsest so many tokens."""
    at, pairs = left.at, 0
    for place in range(at[QUEUE], at[QUEUED]):
        if tokens <= 0:
            break
        pairs, tokens = _add_head(left, left.queue[place], pairs, tokens)
    first, last = at[SPARSE], at[DENSE]
    if tokens > 0 and first <= last:
        pairs, tokens = _add_head(left, first, pairs, tokens)
        upto = left.ends[first + 1] + tokens
        stop = _first_from(left.ends, first + 1, last + 2, upto + 1) - 1  # documents before it are whole
        pairs += left.work[stop] - left.work[first + 1]
        tokens = upto - left.ends[stop]
        if stop <= last:
            pairs, tokens = _add_head(left, stop, pairs, tokens)
    for doc in range(at[HEADS], at[TAILS] + 1):
        if tokens <= 0:
            break
        pairs, tokens = _add_head(left, doc, pairs, tokens)
    for place in range(at[STACK] - 1, -1, -1):
        if tokens <= 0:
            break
        pairs, tokens = _add_head(left, left.stack[place], pairs, tokens)
    return pairs


@lean
def _add_head(left: Left, doc: int, pairs: int, tokens: int) -> tuple[int, int]:
    """`pairs` and those of the first `tokens` rows left of a document, and how many more tokens are wanted."""
    some = max(0, min(tokens, left.high[doc] - left.low[doc]))
    return pairs + pairs_between(left.table, left.low[doc], left.low[doc] + some), tokens - some


@lean
def _first_from(rising: Ints, low: int, high: int, value: int) -> int:
    """The first index in [low, high) whose element is at least `value`, else high."""
    while low < high:
        middle = (low + high) // 2
        if rising[middle] >= value:
            high = middle
        else:
            low = middle + 1
    return low


@lean
def _narrow(left: Left, most: int) -> int:
    """Tokens left of narrow documents, or `most` if they are more."""
    first, last = left.at[SPARSE], left.at[DENSE]
    if first > last:
        return 0
    tokens: int = left.high[first] - left.low[first] + left.ends[last + 1] - left.ends[first + 1]
    return min(tokens, most)


# ---------------------------------------------------------------------------------------------- taking it


@lean
def _take_ends(left: Left, doc: int, tokens: int, rank: int) -> None:
    head, low, high = int(tokens * left.head[doc]), left.low[doc], left.high[doc]
    left.low[doc], left.high[doc] = low + head, high - tokens + head
    _take(left, low, low + head, rank)
    _take(left, left.high[doc], high, rank)


@lean
def _take_dense(left: Left, tokens: int, rank: int) -> None:
    """As `_dense` counts them."""
    while tokens > 0:
        doc = left.at[DENSE]
        high = left.high[doc]
        some = min(tokens, high - left.low[doc])
        left.high[doc] = high - some
        _take(left, high - some, high, rank)
        tokens -= some
        left.at[DENSE] -= 1
        if left.low[doc] < left.high[doc]:
            _push(left, doc)


@lean
def _take_sparse(left: Left, tokens: int, rank: int) -> None:
    """As `_sparse` counts them."""
    at = left.at
    while tokens > 0:
        cursor = _sparsest(at)
        doc = at[cursor]
        if cursor == QUEUE:
            doc = left.queue[doc]
        elif cursor == STACK:
            doc = left.stack[doc - 1]
        low = left.low[doc]
        some = min(tokens, left.high[doc] - low)
        left.low[doc] = low + some
        _take(left, low, low + some, rank)
        tokens -= some
        if left.low[doc] == left.high[doc]:
            at[cursor] += -1 if cursor == STACK else 1


@lean
def _sparsest(at: Ints) -> int:
    """The cursor at the sparsest document left."""
    if at[QUEUE] < at[QUEUED]:
        return QUEUE
    if at[SPARSE] <= at[DENSE]:
        return SPARSE
    return HEADS if at[HEADS] <= at[TAILS] else STACK


@lean
def _take(left: Left, low: int, high: int, rank: int) -> None:
    if low < high:
        piece = left.at[PIECES]
        left.pieces[piece, 0], left.pieces[piece, 1], left.pieces[piece, 2] = low, high, rank
        left.at[PIECES] = piece + 1

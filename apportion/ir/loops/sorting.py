"""Orders of integer keys in linear time, over a known range or over any; distinct keys, of all or of each lane."""

from __future__ import annotations

import numpy as np

from apportion.ir.arrays import Ints, changes, offsets
from apportion.ir.loops.jit import HAS_NUMBA, jit, lean

_DIGIT = 12  # bits a pass: 4,096 counters stay in the first-level cache
_WORTH = 4096  # keys from which counting beats comparing


def stable_order(keys: Ints) -> Ints:
    """int64 [n]: the stable order of `keys`, int64 [n], all >= 0."""
    if not HAS_NUMBA or len(keys) < _WORTH:
        return np.argsort(keys, kind="stable")
    low = int(keys.min())
    return radix_order(keys - low, int(keys.max()) - low)


def ranked(*columns: Ints) -> tuple[Ints, ...]:
    """int64 [distinct], the numbers in int64 columns, all >= 0, ascending; and of each column, where its numbers are
    among these."""
    keys = np.concatenate(columns)
    order = stable_order(keys)
    ordered = keys[order]
    fresh = changes(ordered)
    number = np.empty(len(keys), np.int64)
    number[order] = np.cumsum(fresh) - 1
    return ordered[fresh], *np.split(number, np.cumsum([len(column) for column in columns[:-1]]))


@jit
def radix_order(keys: Ints, most: int) -> Ints:
    """int64 [n]: the stable order of `keys`, int64 [n] in [0, most]: least significant digit first (Knuth, volume 3,
    section 5.2.5)."""
    count = len(keys)
    order, other = np.arange(count), np.empty(count, np.int64)
    mask = (1 << _DIGIT) - 1
    starts = np.empty(mask + 2, np.int64)
    for shift in range(0, 63, _DIGIT):
        if most >> shift == 0:
            break
        starts[:] = 0
        for i in range(count):
            starts[((keys[i] >> shift) & mask) + 1] += 1
        for digit in range(mask + 1):
            starts[digit + 1] += starts[digit]
        for i in range(count):
            at = order[i]
            digit = (keys[at] >> shift) & mask
            other[starts[digit]] = at
            starts[digit] += 1
        order, other = other, order
    return order


@jit
def counting_order(key: Ints, size: int) -> Ints:
    """int32 [n]: the stable order that sorts `key`, integers in [0, size)."""
    place = np.zeros(size + 1, np.int64)
    for index in range(len(key)):
        place[key[index] + 1] += 1
    for value in range(size):
        place[value + 1] += place[value]
    order = np.empty(len(key), np.int32)
    for index in range(len(key)):
        order[place[key[index]]] = index
        place[key[index]] += 1
    return order


def distinct_in_lanes(lane: Ints, key: Ints, lanes: int) -> tuple[Ints, Ints, Ints]:
    """int64 [distinct], the distinct keys of lane 0, 1, .., ascending in each; int64 [lanes + 1], where they begin;
    int32 [n], where each given key is among all. lane: integers [n] in [0, lanes); key: int64 [n], >= 0."""
    if HAS_NUMBA:
        return _distinct_in_lanes(lane, key, lanes)
    order = np.lexsort((key, lane))
    by_lane, ordered = lane[order], key[order]
    fresh = changes(ordered, by_lane)
    number = np.empty(len(key), np.int32)
    number[order] = np.cumsum(fresh) - 1
    ptr = offsets(np.bincount(by_lane[fresh], minlength=lanes))
    return ordered[fresh], ptr, number


@jit
def _distinct_in_lanes(lane: Ints, key: Ints, lanes: int) -> tuple[Ints, Ints, Ints]:
    """Hashed lane by lane, in a table that stays in the cache: few of many are distinct, and only these are sorted."""
    first = np.zeros(lanes + 1, np.int64)
    for index in range(len(lane)):
        first[lane[index] + 1] += 1
    size = 2
    while size < 2 * first.max():
        size *= 2
    for one in range(lanes):
        first[one + 1] += first[one]
    order, at = np.empty(len(lane), np.int32), first[:-1].copy()
    for index in range(len(lane)):
        order[at[lane[index]]] = index
        at[lane[index]] += 1
    held, owner, place = np.empty(size, np.int64), np.full(size, -1, np.int32), np.empty(size, np.int32)
    slot, number = np.empty(size, np.int32), np.empty(len(lane), np.int32)
    found, ptr = np.empty(len(lane), np.int64), np.zeros(lanes + 1, np.int64)
    count = 0
    for one in range(lanes):
        begin, end = first[one], first[one + 1]
        if end - begin <= _FEW:
            count = _insert(key, order, begin, end, found, count)
            for index in range(begin, end):
                at_key = ptr[one]
                while found[at_key] != key[order[index]]:
                    at_key += 1
                number[order[index]] = at_key
            ptr[one + 1] = count
            continue
        for index in range(begin, end):
            wanted = key[order[index]]
            probe = _home(wanted, size)
            while owner[probe] == one and held[probe] != wanted:
                probe = (probe + 1) & (size - 1)
            if owner[probe] != one:
                owner[probe], held[probe], found[count] = one, wanted, wanted
                count += 1
            slot[index - begin] = probe
        found[ptr[one] : count].sort()
        for index in range(ptr[one], count):
            probe = _home(found[index], size)
            while held[probe] != found[index] or owner[probe] != one:
                probe = (probe + 1) & (size - 1)
            place[probe] = index
        for index in range(begin, end):
            number[order[index]] = place[slot[index - begin]]
        ptr[one + 1] = count
    return found[:count].copy(), ptr, number


_FEW = 12  # keys of a lane up to which looking at all costs less than hashing


@lean
def _insert(key: Ints, order: Ints, begin: int, end: int, found: Ints, count: int) -> int:
    """Puts the distinct ones of some keys behind the first `count` of `found`, ascending; how many it then holds."""
    first = count
    for index in range(begin, end):
        wanted, at = key[order[index]], count
        while at > first and found[at - 1] > wanted:
            at -= 1
        if at > first and found[at - 1] == wanted:
            continue
        for behind in range(count, at, -1):
            found[behind] = found[behind - 1]
        found[at] = wanted
        count += 1
    return count


@lean
def _home(key: int, size: int) -> int:
    """The first place of a key in a hash table: the middle of a product, as keys are multiples of many things (Knuth,
    volume 3, section 6.4). No step leaves 63 bits."""
    folded = ((key & 0x7FFFFFFF) ^ (40503 * (key >> 31))) & 0x3FFFFFFF
    return ((folded * 0x9E3779B1) >> 20) & (size - 1)


def sort_order(key: Ints, size: int) -> Ints:
    """int32 [n]: the stable order that sorts `key`, integers in [0, size)."""
    if HAS_NUMBA:
        return counting_order(key, size)
    return np.argsort(key, kind="stable").astype(np.int32)

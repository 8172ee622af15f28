"""Row operations of one instruction in Triton, one launch each, over tables that are built once per plan (`rowlists`).

move      panels of bytes: copy, clear, packing and unpacking of messages
add       partial gradients into their accumulators, in program order
merge     partial (O, LSE) into their accumulators
delta     rowsum(dO * O) next to the LSE, and each tile's share of the sinks' gradients
finish    the output in the model's dtype, with the learned sinks; also for output that arrived in that dtype
"""

import triton
import triton.language as tl

from apportion.backends.torch.stage.attention import (
    ENTRY,
    LANE,
    NEG_INF,
    SIZES,
    _load,
    _merge,
    _operand_rows,
    _statistics,
    merge_weights,
    tile_rows,
)

PANEL = tl.constexpr(9)
# as in `rowlists`
COPY, CLEAR, MINUS_INF, NARROW, WIDEN, ROUND, EXTEND = (tl.constexpr(code) for code in range(7))
#: the layer's own arrays: they may have any alignment, since they are read element by element
OF_LAYER = ("sinks", "dlse")
NEG_INF_HIGH = tl.constexpr(-1048576)  # the upper half of the float64 -inf, as int32


@triton.jit
def _base(slot, bases):
    """The base address of a slot."""
    base = bases[0]
    for number in tl.static_range(1, len(bases)):
        base = tl.where(slot == number, bases[number], base)
    return base


@triton.jit
def _convert_rows(
    source, target, valid, width, FROM: tl.constexpr, TO: tl.constexpr, GRAIN: tl.constexpr, C: tl.constexpr
):
    """Converts rows of numbers from one dtype to another, `width` bytes per row."""
    source_at = tl.multiple_of(source.to(tl.pointer_type(FROM)), (GRAIN, GRAIN))
    target_at = tl.multiple_of(target.to(tl.pointer_type(TO)), (GRAIN, GRAIN))
    step, count = tl.arange(0, C)[None, :], width // (TO.primitive_bitwidth // 8)
    for j in range(0, count, C):
        mask = valid & (j + step < count)
        number = tl.load(source_at + j + step, mask=mask)
        tl.store(target_at + j + step, number.to(TO), mask=mask)


@triton.jit
def move(
    panels, chunks,
    b0: tl.int64, b1: tl.int64, b2: tl.int64, b3: tl.int64, b4: tl.int64, b5: tl.int64,
    b6: tl.int64, b7: tl.int64, b8: tl.int64, b9: tl.int64, b10: tl.int64, b11: tl.int64,
    GRAIN: tl.constexpr, BF16: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Moves R rows of a panel. Offsets, strides and widths count grains of GRAIN bytes: 2, 4, 8 or 16."""
    chunk = chunks + tl.program_id(0) * 2
    panel = panels + tl.load(chunk) * PANEL
    action, count, width = tl.load(panel + 8), tl.load(panel + 6), tl.load(panel + 7) * GRAIN
    row = tl.load(chunk + 1) + tl.arange(0, R)
    valid = (row < count)[:, None]
    bases = b0, b1, b2, b3, b4, b5, b6, b7, b8, b9, b10, b11
    source = _base(tl.load(panel), bases)
    source = (source + tl.load(panel + 1) * GRAIN) + row[:, None] * (tl.load(panel + 2) * GRAIN)
    target = _base(tl.load(panel + 3), bases)
    target = (target + tl.load(panel + 4) * GRAIN) + row[:, None] * (tl.load(panel + 5) * GRAIN)
    HALF: tl.constexpr = tl.bfloat16 if BF16 else tl.float16
    if action == NARROW:
        _convert_rows(source, target, valid, width, tl.float64, tl.float32, GRAIN, C)
    elif action == WIDEN:
        _convert_rows(source, target, valid, width, tl.float32, tl.float64, GRAIN, C)
    elif action == ROUND:
        _convert_rows(source, target, valid, width, tl.float32, HALF, GRAIN, C)
    elif action == EXTEND:
        _convert_rows(source, target, valid, width, HALF, tl.float32, GRAIN, C)
    else:
        UNIT: tl.constexpr = tl.int16 if GRAIN == 2 else tl.int32
        BYTES: tl.constexpr = 2 if GRAIN == 2 else 4
        # pointers made from integers lose their alignment hints
        source_at = tl.multiple_of(source.to(tl.pointer_type(UNIT)), (GRAIN, GRAIN))
        target_at = tl.multiple_of(target.to(tl.pointer_type(UNIT)), (GRAIN, GRAIN))
        step = tl.arange(0, C)[None, :]
        for j in range(0, width // BYTES, C):
            mask = valid & (j + step < width // BYTES)
            unit = tl.load(source_at + j + step, mask=mask & (action == COPY), other=0)
            if BYTES == 4:
                unit = tl.where((action == MINUS_INF) & ((step & 1) == 1), NEG_INF_HIGH, unit)
            tl.store(target_at + j + step, unit, mask=mask)


@triton.jit(do_not_specialize=SIZES)
def add(
    tiles, entries, heads, arrays,
    b0: tl.int64, b1: tl.int64, b2: tl.int64, b3: tl.int64, b4: tl.int64, b5: tl.int64,
    b6: tl.int64, b7: tl.int64, b8: tl.int64, b9: tl.int64, b10: tl.int64, b11: tl.int64,
    lanes: tl.int32,
    R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Adds a tile's entries, in order, to its rows of a head; overwrites fresh rows."""
    tile, lane, row, valid = tile_rows(tiles, 0, lanes, R)
    if lane >= tl.load(tile + 5):
        return
    slot = tl.load(tile + 7)
    n_heads, width = tl.load(arrays + 2 * slot), tl.load(arrays + 2 * slot + 1)
    bases = b0, b1, b2, b3, b4, b5, b6, b7, b8, b9, b10, b11
    base = _base(slot, bases).to(tl.pointer_type(tl.float32))
    valid, fresh = valid[:, None], tl.load(tile + 4) & 1
    ptr = base + ((row.to(tl.int64) * n_heads + tl.load(heads + tl.load(tile + 6) + lane)) * width)[:, None]
    for j in range(0, width, C):
        column = j + tl.arange(0, C)[None, :]
        mask = valid & (column < width)
        total = tl.load(ptr + column, mask=mask & (fresh == 0), other=0.0)
        for x in range(tl.load(tile + 2), tl.load(tile + 3)):
            entry = entries + x * ENTRY
            array = tl.load(entry + 3)
            pitch = tl.load(arrays + 2 * array)
            part = _base(array, bases).to(tl.pointer_type(tl.float32))
            index = (row + tl.load(entry + 2)).to(tl.int64) * pitch + tl.load(
                heads + tl.load(entry + 4) + lane
            )
            in_entry = ((row >= tl.load(entry)) & (row < tl.load(entry + 1)))[:, None]
            total += tl.load(part + (index * width)[:, None] + column, mask=mask & in_entry, other=0.0)
        tl.debug_barrier()
        tl.store(ptr + column, total, mask=mask)


@triton.jit(do_not_specialize=SIZES)
def merge(
    tiles, entries, heads, o_home, o_work, lse_home, lse_work,
    lanes: tl.int32, q_heads: tl.int32, o_columns: tl.int32,
    R: tl.constexpr, E: tl.constexpr, EA: tl.constexpr, EB: tl.constexpr,
):  # fmt: skip
    """Merges the partial results of a tile's entries, in order, into its O rows of a head."""
    tile, lane, row, valid = tile_rows(tiles, 0, lanes, R)
    if lane >= tl.load(tile + 5):
        return
    work = tl.load(tile + 7) != 0
    index = row.to(tl.int64) * tl.where(work, o_columns, q_heads) + tl.load(heads + tl.load(tile + 6) + lane)
    o_at = tl.where(work, o_work, o_home) + (index * E)[:, None]
    lse_at = tl.where(work, lse_work, lse_home) + index
    has_old = valid & (row * 0 + tl.load(tile + 4) & 1 == 0)
    lse = tl.load(lse_at, mask=has_old, other=NEG_INF)
    total = _load(o_at, has_old[:, None], E, EA, EB, True)
    for x in range(tl.load(tile + 2), tl.load(tile + 3)):
        entry = entries + x * ENTRY
        in_entry = valid & (row >= tl.load(entry)) & (row < tl.load(entry + 1))
        is_work = tl.load(entry + 3) != 0
        part = (row + tl.load(entry + 2)).to(tl.int64) * tl.where(is_work, o_columns, q_heads)
        part += tl.load(heads + tl.load(entry + 4) + lane)
        part_lse = tl.load(tl.where(is_work, lse_work, lse_home) + part, mask=in_entry, other=NEG_INF)
        lse, keep, take = merge_weights(lse, part_lse)
        rows = _load(
            tl.where(is_work, o_work, o_home) + (part * E)[:, None], in_entry[:, None], E, EA, EB, True
        )
        total = _mix(total, keep[:, None], rows, take[:, None], EB)
    tl.debug_barrier()  # every thread has read before one overwrites
    tl.store(lse_at, lse, mask=valid)
    _merge(o_at, o_at, valid[:, None], 0.0, 1.0, 1, total, E, EA, EB)


@triton.jit
def _mix(a, wa, b, wb, B: tl.constexpr):
    """The weighted sum of a and b, part by part."""
    return (a[0] * wa + b[0] * wb, a[1] * wa + b[1] * wb) if B else (a[0] * wa + b[0] * wb,)


@triton.jit(do_not_specialize=(*SIZES, "first_share", *OF_LAYER))
def delta(
    tiles, heads, do_home, do_work, out, lse, delta_home, delta_work, sinks, shares, dlse,
    first_share: tl.int32, lanes: tl.int32, q_heads: tl.int32, do_columns: tl.int32, delta_columns: tl.int32,
    SINKS: tl.constexpr, DLSE: tl.constexpr,
    R: tl.constexpr, E: tl.constexpr, EA: tl.constexpr, EB: tl.constexpr,
):  # fmt: skip
    """Computes row statistics of a tile and head. out, lse: home rows. shares: float64 [all delta tiles, q_heads]."""
    tile, lane, row, valid = tile_rows(tiles, 0, lanes, R)
    if lane >= tl.load(tile + 5):
        return
    columns = heads + tl.load(tile + 6) + lane * LANE
    flags = tl.load(tile + 4)
    do_at = _operand_rows(tile, columns, 1, do_home, do_work, q_heads, do_columns, R, E)
    do = _load(do_at[:, None], valid[:, None], E, EA, EB, True)
    head = tl.load(columns + 2)
    home = (row + tl.load(tile + 8)).to(tl.int64) * q_heads + head
    row_lse, total = _statistics(do, out + (home * E)[:, None], lse + home, valid, E, EA, EB)
    if DLSE:
        total -= tl.load(dlse + home, mask=valid, other=0.0)
    work = (flags & 2) != 0
    ptr = row.to(tl.int64) * tl.where(work, delta_columns, q_heads) + tl.load(columns)
    ptr = tl.where(work, delta_work, delta_home) + ptr * 2
    tl.store(ptr, row_lse.to(tl.float32), mask=valid)
    tl.store(ptr + 1, total, mask=valid)
    if SINKS:
        is_empty = row_lse == NEG_INF
        p = tl.where(
            is_empty, 0.0, tl.exp(tl.load(sinks + head).to(tl.float32) - tl.where(is_empty, 0.0, row_lse))
        )
        share = shares + (first_share + tl.program_id(0) // lanes) * q_heads + head
        tl.store(share, -tl.sum(tl.where(valid & (row_lse != NEG_INF), p * total, 0.0), 0))


@triton.jit(do_not_specialize=(*SIZES, *OF_LAYER))
def finish(
    tiles, heads, o, lse, out, sinks, lanes: tl.int32, q_heads: tl.int32,
    SINKS: tl.constexpr, R: tl.constexpr, E: tl.constexpr, EA: tl.constexpr, EB: tl.constexpr,
):  # fmt: skip
    """Writes the output rows of a tile and head from the sums `o`, or in place if `o` is `out`; applies any sinks."""
    tile, lane, row, valid = tile_rows(tiles, 0, lanes, R)
    if lane >= tl.load(tile + 5):
        return
    head = tl.load(heads + tl.load(tile + 6) + lane * LANE)
    index = row.to(tl.int64) * q_heads + head
    rows = _load(o + (index * E)[:, None], valid[:, None], E, EA, EB, True)
    keep = tl.full([R], 1.0, tl.float32)
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float64) + row * 0
        row_lse, keep, _ = merge_weights(tl.load(lse + index, mask=valid, other=NEG_INF), sink)
        tl.debug_barrier()  # every thread has read before one overwrites
        tl.store(lse + index, row_lse, mask=valid)
    target = out + (index * E)[:, None]
    _merge(target, target, valid[:, None], 0.0, keep[:, None], 1, rows, E, EA, EB)

"""Attention of one instruction in Triton: `attend` is one launch, `attend_grad` is two (`dq`, `dkdv`).

Work lists define the work of each kernel program (see `worklists`). A program owns the accumulator rows of one tile and
head: it walks over the tile's entries with running sums in registers, then merges them once into the rows. There is
one writer for each row and no atomics, so the same plan gives the same bits.

Shape suffixes: M owner rows, N walked rows, D width of Q and K, E width of V. A width is one or two powers of two
side by side (96 = 64 + 32), so a tile of rows is a tuple of one or two parts. Home rows and work rows have
separate base pointers.
"""

# Triton compiles the source of these functions; only the arguments carry type annotations.

import triton
import triton.language as tl

TILE = tl.constexpr(16)  # as in `worklists`
ENTRY = tl.constexpr(12)
LANE = tl.constexpr(4)
COMPLETE, STAGED, STATISTICS = tl.constexpr(32), tl.constexpr(64), tl.constexpr(128)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
NEG_INF = tl.constexpr(float("-inf"))

#: integer arguments that are never specialised, not even for 1 and multiples of 16: a new plan needs no recompilation
SIZES = (
    "first_tile",
    "lanes",
    "q_heads",
    "kv_heads",
    "has_sinks",
    "may_use_statistics",
    *(f"{name}_columns" for name in ("q", "kv", "o", "do", "delta", "dq", "dkv")),
)


# --- rows in one or two parts


@triton.jit
def _part(ptr, rows, width, FIRST: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, MASK: tl.constexpr):
    """[rows, SIZE] of columns FIRST + [0, SIZE); zero beyond WIDTH, and for masked `rows`."""
    columns = FIRST + tl.arange(0, SIZE)[None, :]
    if FIRST + SIZE > WIDTH:
        part = tl.load(ptr + columns, mask=rows & (columns < WIDTH), other=0.0)
    elif MASK:
        part = tl.load(ptr + columns, mask=rows, other=0.0)
    else:
        part = tl.load(ptr + columns)
    return part


@triton.jit
def _load(ptr, rows, WIDTH: tl.constexpr, A: tl.constexpr, B: tl.constexpr, MASK: tl.constexpr):
    """The parts of rows at the addresses `ptr` [n, 1]."""
    first = _part(ptr, rows, WIDTH, 0, A, WIDTH, MASK)
    return (first, _part(ptr, rows, WIDTH, A, B, WIDTH, MASK)) if B else (first,)


@triton.jit
def _zeros(N: tl.constexpr, A: tl.constexpr, B: tl.constexpr):
    first = tl.zeros([N, A], tl.float32)
    return (first, tl.zeros([N, B], tl.float32)) if B else (first,)


@triton.jit
def _dot_t(a, b, B: tl.constexpr, PRECISION: tl.constexpr):
    """a b^T, [M, N], summed over the parts."""
    product = tl.dot(a[0], tl.trans(b[0]), input_precision=PRECISION)
    if B:
        product = tl.dot(a[1], tl.trans(b[1]), product, input_precision=PRECISION)
    return product


@triton.jit
def _add_dot(sums, p, rows, B: tl.constexpr, PRECISION: tl.constexpr):
    """sums + p rows, part by part."""
    first = tl.dot(p, rows[0], sums[0], input_precision=PRECISION)
    return (first, tl.dot(p, rows[1], sums[1], input_precision=PRECISION)) if B else (first,)


@triton.jit
def _scale_sums(sums, factor, B: tl.constexpr):
    """Multiplies each row by its factor [n]."""
    return (sums[0] * factor[:, None], sums[1] * factor[:, None]) if B else (sums[0] * factor[:, None],)


@triton.jit
def _merge_part(
    source, target, valid, old, new, fresh, part, FIRST: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr
):
    columns = FIRST + tl.arange(0, SIZE)[None, :]
    mask = valid & (columns < WIDTH)
    rows = tl.load(source + columns, mask=mask & (fresh == 0), other=0.0)
    tl.debug_barrier()  # all threads have read before any overwrites
    tl.store(target + columns, (rows * old + part * new).to(target.dtype.element_ty), mask=mask)


@triton.jit
def _merge(
    source, target, valid, old, new, fresh, sums, WIDTH: tl.constexpr, A: tl.constexpr, B: tl.constexpr
):
    """Stores rows * old + sums * new at `target` in its dtype; rows: float32 at `source` [n, 1], 0 if fresh."""
    _merge_part(source, target, valid, old, new, fresh, sums[0], 0, A, WIDTH)
    if B:
        _merge_part(source, target, valid, old, new, fresh, sums[1], A, B, WIDTH)


@triton.jit
def tile_rows(tiles, first_tile, lanes, M: tl.constexpr):
    """A program's tile and lane, the numbers [M] of the tile's rows, and whether these rows exist."""
    tile = tiles + (first_tile + tl.program_id(0) // lanes) * TILE
    rows = tl.load(tile) + tl.arange(0, M)
    return tile, tl.program_id(0) % lanes, rows, rows < tl.load(tile + 1)


@triton.jit
def _operand_rows(
    tile, columns, NUMBER: tl.constexpr, home, work, home_columns, work_columns, M: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """[M]: addresses of the rows of operand NUMBER that accompany a tile's rows, for a head."""
    is_work = (tl.load(tile + 4) & (2 << NUMBER)) != 0
    row = tl.where(is_work, work_columns, home_columns) * WIDTH
    ptr = tl.where(is_work, work, home) + tl.load(columns + NUMBER) * WIDTH
    return ptr + (tl.load(tile) + tl.load(tile + 6 + NUMBER)).to(tl.int64) * row + tl.arange(0, M) * row


@triton.jit
def _keys(column, work, k_home, v_home, kv_work, kv_heads, kv_columns, D: tl.constexpr, E: tl.constexpr):
    """Addresses of k and v of a head column, and the row strides; selected without a branch, after which
    older compilers would lose the alignment."""
    k_row = tl.where(work, kv_columns * (D + E), kv_heads * D)
    v_row = tl.where(work, kv_columns * (D + E), kv_heads * E)
    k_at = tl.where(work, kv_work + column * (D + E), k_home + column * D)
    v_at = tl.where(work, kv_work + column * (D + E) + D, v_home + column * E)
    return k_at, v_at, k_row, v_row


@triton.jit
def _entry(ptr):
    """The ends of an entry's three ranges of walked rows, the middle one without masked pairs, and the band
    (dmin, dmax, from, to) of its pairs."""
    ends = tl.load(ptr), tl.load(ptr + 2), tl.load(ptr + 3), tl.load(ptr + 1)
    return ends, (tl.load(ptr + 4), tl.load(ptr + 5), tl.load(ptr + 6), tl.load(ptr + 7))


@triton.jit
def _target(tile, heads, lane, M: tl.constexpr):
    """(whether a tile's complete rows go into a message; their offsets [M] there or in the results, in columns)."""
    row = (tl.load(tile + 11) + tl.arange(0, M)).to(tl.int64)
    column = tl.load(heads + tl.load(tile + 13) + lane)
    return (tl.load(tile + 4) & STAGED) != 0, row * tl.load(tile + 12) + column


@triton.jit
def _advance(ptr, units):
    """Advances `ptr` by the number of 16-byte units that `units` points to."""
    return ptr + tl.load(units).to(tl.int64) * (128 // ptr.dtype.element_ty.primitive_bitwidth)


@triton.jit
def _tanh(x):
    """tanh, by a series near 0, where the formula with exp would cancel."""
    e = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    square = x * x
    series = 62.0 / 2835
    series = series * square - 17.0 / 315
    series = series * square + 2.0 / 15
    series = series * square - 1.0 / 3
    near = x * (series * square + 1.0)
    return tl.where(tl.abs(x) < 0.25, near, tl.where(x < 0, -far, far))


@triton.jit
def _logits(products, scale, cap, CAP: tl.constexpr, UNIT: tl.constexpr):
    """(scores times UNIT, tanh) of raw products."""
    if CAP:
        tanh = _tanh(products * (scale / cap))
        logits = tanh * (cap * UNIT)
    else:
        tanh = products
        logits = products * (scale * UNIT)
    return logits, tanh


@triton.jit
def _is_visible(owner, walked, band, stop):
    """[M, N]: the entry's pairs, of owner rows [M, 1] and walked rows [1, N]."""
    dmin, dmax, from_, to = band
    offset = owner - walked
    return (offset >= dmin) & (offset <= dmax) & (walked < stop) & (owner >= from_) & (owner < to)


# --- forward


@triton.jit
def _attend_rows(
    sums, top, total, q, keys, start, stop, rows, band, scale, cap,
    MASK: tl.constexpr, CAP: tl.constexpr, N: tl.constexpr, D: tl.constexpr, DA: tl.constexpr, DB: tl.constexpr,
    E: tl.constexpr, EA: tl.constexpr, EB: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Online softmax over keys [start, stop); top and total: each row's largest logit and sum of exponentials."""
    k_at, v_at, k_row, v_row = keys
    step = tl.arange(0, N)
    k_at += start.to(tl.int64) * k_row
    v_at += start.to(tl.int64) * v_row
    for j in tl.range(start, stop, N):
        walked = j + step
        key_mask = (walked < stop)[:, None]
        k = _load(k_at + (step * k_row)[:, None], key_mask, D, DA, DB, MASK)
        logits, _ = _logits(_dot_t(q, k, DB, PRECISION), scale, cap, CAP, LOG2E)
        if MASK:
            logits = tl.where(_is_visible(rows[:, None], walked[None, :], band, stop), logits, NEG_INF)
        higher = tl.maximum(top, tl.max(logits, 1))
        base = tl.where(higher == NEG_INF, 0.0, higher) if MASK else higher
        p = tl.exp2(logits - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(p, 1)
        v = _load(v_at + (step * v_row)[:, None], key_mask, E, EA, EB, MASK)
        sums = _add_dot(_scale_sums(sums, shrink, EB), p.to(v[0].dtype), v, EB, PRECISION)
        top = higher
        k_at += N * k_row
        v_at += N * v_row
    return sums, top, total


@triton.jit(do_not_specialize=SIZES)
def attend(
    tiles, entries, heads, q_home, q_work, k_home, v_home, kv_work, o_home, o_work, lse_home, lse_work,
    out, wire, lse_wire, sinks,
    first_tile: tl.int32, lanes: tl.int32, q_heads: tl.int32, kv_heads: tl.int32,
    q_columns: tl.int32, kv_columns: tl.int32, o_columns: tl.int32, has_sinks: tl.int32,
    scale: tl.float32, cap: tl.float32,
    CAP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, DA: tl.constexpr, DB: tl.constexpr,
    E: tl.constexpr, EA: tl.constexpr, EB: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Merges the attention of a tile's entries into its O rows of a head. Complete rows go to `out` (home rows with the
    learned sinks) or to the messages in `wire`.

    q [rows, q_heads, D], k, v [rows, kv_heads, D or E] at home; work rows of KV interleave k and v. o is float32; lse
    is float64, but float32 in messages.
    """
    tile, lane, rows, valid = tile_rows(tiles, first_tile, lanes, M)
    if lane >= tl.load(tile + 5):
        return
    flags, columns = tl.load(tile + 4), heads + tl.load(tile + 6) + lane * LANE
    fresh = flags & 1
    q_at = _operand_rows(tile, columns, 1, q_home, q_work, q_heads, q_columns, M, D)
    q = _load(q_at[:, None], valid[:, None], D, DA, DB, True)
    sums = _zeros(M, EA, EB)
    top, total = tl.full([M], NEG_INF, tl.float32), tl.zeros([M], tl.float32)
    for x in tl.range(tl.load(tile + 2), tl.load(tile + 3), num_stages=1):
        entry = entries + x * ENTRY
        ends, band = _entry(entry)
        column, work = tl.load(heads + tl.load(entry + 9) + lane), (tl.load(entry + 8) & 1) != 0
        keys = _keys(column, work, k_home, v_home, kv_work, kv_heads, kv_columns, D, E)
        for part in tl.static_range(3):
            sums, top, total = _attend_rows(
                sums, top, total, q, keys, ends[part], ends[part + 1], rows, band, scale, cap,
                part != 1, CAP, N, D, DA, DB, E, EA, EB, PRECISION,
            )  # fmt: skip
    work = (flags & 2) != 0
    offset = rows.to(tl.int64) * tl.where(work, o_columns, q_heads) + tl.load(columns)
    lse_at = tl.where(work, lse_work, lse_home) + offset
    old = tl.load(lse_at, mask=valid & (rows * 0 + fresh == 0), other=NEG_INF)
    is_empty = total == 0.0
    part = tl.where(
        is_empty, NEG_INF, top.to(tl.float64) * LN2 + tl.log(tl.where(is_empty, 1.0, total).to(tl.float64))
    )
    new, old_weight, new_weight = merge_weights(old, part)
    new_weight = new_weight / tl.where(is_empty, 1.0, total)
    o_at = tl.where(work, o_work, o_home) + (offset * E)[:, None]
    if flags & COMPLETE:
        joins = (has_sinks != 0) & (flags & 2 == 0)  # sinks are added to home rows only
        sink = tl.load(sinks + tl.load(columns), mask=joins, other=0).to(tl.float64)
        sink = tl.where(joins, sink, NEG_INF) + tl.zeros([M], tl.float64)
        new, share, _ = merge_weights(new, sink)
        old_share, new_share = (old_weight * share)[:, None], (new_weight * share)[:, None]
        staged, position = _target(tile, heads, lane, M)
        target = tl.where(staged, _advance(wire, tile + 10), out) + (position * E)[:, None]
        _merge(o_at, target, valid[:, None], old_share, new_share, fresh, sums, E, EA, EB)
        tl.store(_advance(lse_wire, tile + 14) + position, new.to(tl.float32), mask=valid & staged)
        tl.store(lse_home + position, new, mask=valid & (staged == 0))
    else:
        _merge(o_at, o_at, valid[:, None], old_weight[:, None], new_weight[:, None], fresh, sums, E, EA, EB)
        tl.store(lse_at, new, mask=valid)


@triton.jit
def merge_weights(old, part):
    """Merges two LSEs, float64; -inf: no keys. Returns (LSE float64, weights of old and of new rows, float32)."""
    top = tl.maximum(old, part)
    base = tl.where(top == NEG_INF, 0.0, top)
    old_weight, new_weight = tl.exp(old - base), tl.exp(part - base)
    total = old_weight + new_weight
    is_empty = total == 0.0
    safe = tl.where(is_empty, 1.0, total)
    lse = tl.where(is_empty, NEG_INF, base + tl.log(safe))
    return lse, (old_weight / safe).to(tl.float32), (new_weight / safe).to(tl.float32)


# --- backward


@triton.jit
def _statistics(do, out, lse, valid, E: tl.constexpr, EA: tl.constexpr, EB: tl.constexpr):
    """(LSE, rowsum(dO * O)) of rows, float64 and float32 [n]. do: parts of dO; out, lse: addresses of each row's output
    and LSE."""
    o = _load(out, valid[:, None], E, EA, EB, True)
    total = tl.sum(do[0].to(tl.float32) * o[0].to(tl.float32), 1)
    if EB:
        total += tl.sum(do[1].to(tl.float32) * o[1].to(tl.float32), 1)
    return tl.load(lse, mask=valid, other=NEG_INF), total


@triton.jit
def _p_ds(
    products, dp, lse, delta, visible, scale, cap, MASK: tl.constexpr, CAP: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Probabilities and gradients of the products; lse and delta broadcast along keys.

    In float32 the difference of logits and LSE is taken before the conversion to powers of 2, which avoids a rounding
    of each; in half dtypes that would not be visible.
    """
    UNIT: tl.constexpr = 1.0 if PRECISION == "ieee" else LOG2E
    logits, tanh = _logits(products, scale, cap, CAP, UNIT)
    if MASK:
        logits = tl.where(visible, logits, NEG_INF)
    p = tl.exp2((logits - lse) * LOG2E) if PRECISION == "ieee" else tl.exp2(logits - lse * LOG2E)
    ds = p * (dp - delta) * scale
    if CAP:
        ds = ds * (1.0 - tanh * tanh)
    return p, ds


@triton.jit
def _dq_rows(
    dq, q, do, lse, delta, keys, start, stop, rows, band, scale, cap,
    MASK: tl.constexpr, CAP: tl.constexpr, N: tl.constexpr, D: tl.constexpr, DA: tl.constexpr, DB: tl.constexpr,
    E: tl.constexpr, EA: tl.constexpr, EB: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    k_at, v_at, k_row, v_row = keys
    step = tl.arange(0, N)
    k_at += start.to(tl.int64) * k_row
    v_at += start.to(tl.int64) * v_row
    for j in tl.range(start, stop, N):
        walked = j + step
        key_mask = (walked < stop)[:, None]
        k = _load(k_at + (step * k_row)[:, None], key_mask, D, DA, DB, MASK)
        v = _load(v_at + (step * v_row)[:, None], key_mask, E, EA, EB, MASK)
        visible = _is_visible(rows[:, None], walked[None, :], band, stop)
        products, dp = _dot_t(q, k, DB, PRECISION), _dot_t(do, v, EB, PRECISION)
        _, ds = _p_ds(products, dp, lse[:, None], delta[:, None], visible, scale, cap, MASK, CAP, PRECISION)
        dq = _add_dot(dq, ds.to(k[0].dtype), k, DB, PRECISION)
        k_at += N * k_row
        v_at += N * v_row
    return dq


@triton.jit(do_not_specialize=SIZES)
def dq(
    tiles, entries, heads, q_home, q_work, k_home, v_home, kv_work, do_home, do_work, delta_home, delta_work,
    dq_home, dq_work, dq_out, wire, out, lse,
    first_tile: tl.int32, lanes: tl.int32, q_heads: tl.int32, kv_heads: tl.int32, q_columns: tl.int32,
    kv_columns: tl.int32, do_columns: tl.int32, delta_columns: tl.int32, dq_columns: tl.int32,
    may_use_statistics: tl.int32, scale: tl.float32, cap: tl.float32,
    CAP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, DA: tl.constexpr, DB: tl.constexpr,
    E: tl.constexpr, EA: tl.constexpr, EB: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Accumulates dQ rows of a tile and head; complete rows go to dq_out (home rows, in the model's dtype) or to
    messages. delta [rows, heads, 2]: lse and delta, float32, which tiles with statistics compute from the home rows of
    out and lse if the layer allows it (`may_use_statistics`); dq float32."""
    tile, lane, rows, valid = tile_rows(tiles, first_tile, lanes, M)
    if lane >= tl.load(tile + 5):
        return
    flags, columns = tl.load(tile + 4), heads + tl.load(tile + 6) + lane * LANE
    q_at = _operand_rows(tile, columns, 1, q_home, q_work, q_heads, q_columns, M, D)
    q = _load(q_at[:, None], valid[:, None], D, DA, DB, True)
    do_at = _operand_rows(tile, columns, 2, do_home, do_work, q_heads, do_columns, M, E)
    do = _load(do_at[:, None], valid[:, None], E, EA, EB, True)
    delta_at = _operand_rows(tile, columns, 3, delta_home, delta_work, q_heads, delta_columns, M, 2)
    if (flags & STATISTICS != 0) & (may_use_statistics != 0):
        home = rows.to(tl.int64) * q_heads + tl.load(columns)
        row_lse, delta = _statistics(do, out + (home * E)[:, None], lse + home, valid, E, EA, EB)
        row_lse = row_lse.to(tl.float32)
        tl.store(delta_at, row_lse, mask=valid)
        tl.store(delta_at + 1, delta, mask=valid)
    else:
        row_lse = tl.load(delta_at, mask=valid, other=0.0)
        delta = tl.load(delta_at + 1, mask=valid, other=0.0)
    base = tl.where(row_lse == NEG_INF, 0.0, row_lse)
    sums = _zeros(M, DA, DB)
    for x in tl.range(tl.load(tile + 2), tl.load(tile + 3), num_stages=1):
        entry = entries + x * ENTRY
        ends, band = _entry(entry)
        column, work = tl.load(heads + tl.load(entry + 9) + lane), (tl.load(entry + 8) & 1) != 0
        keys = _keys(column, work, k_home, v_home, kv_work, kv_heads, kv_columns, D, E)
        for part in tl.static_range(3):
            sums = _dq_rows(
                sums, q, do, base, delta, keys, ends[part], ends[part + 1], rows, band, scale, cap,
                part != 1, CAP, N, D, DA, DB, E, EA, EB, PRECISION,
            )  # fmt: skip
    work = (flags & 2) != 0
    offset = (rows.to(tl.int64) * tl.where(work, dq_columns, q_heads) + tl.load(columns))[:, None] * D
    dq_at = tl.where(work, dq_work, dq_home) + offset
    if flags & COMPLETE:
        staged, position = _target(tile, heads, lane, M)
        target = tl.where(staged, _advance(wire, tile + 10), dq_out) + (position * D)[:, None]
        _merge(dq_at, target, valid[:, None], 1.0, 1.0, flags & 1, sums, D, DA, DB)
    else:
        _merge(dq_at, dq_at, valid[:, None], 1.0, 1.0, flags & 1, sums, D, DA, DB)


@triton.jit
def _dkdv_rows(
    dk, dv, k, v, ptrs, row, start, stop, rows, band, scale, cap,
    MASK: tl.constexpr, CAP: tl.constexpr, N: tl.constexpr, D: tl.constexpr, DA: tl.constexpr, DB: tl.constexpr,
    E: tl.constexpr, EA: tl.constexpr, EB: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Accumulates over walked queries for owned keys: all products are transposed, [keys, queries]. ptrs, row:
    addresses and row strides of q, dO and delta."""
    q_at, do_at, delta_at = ptrs
    q_row, do_row, delta_row = row
    step = tl.arange(0, N)
    q_at += start.to(tl.int64) * q_row
    do_at += start.to(tl.int64) * do_row
    delta_at += start.to(tl.int64) * delta_row
    for j in tl.range(start, stop, N):
        queries = j + step
        query_mask = queries < stop
        q = _load(q_at + (step * q_row)[:, None], query_mask[:, None], D, DA, DB, MASK)
        do = _load(do_at + (step * do_row)[:, None], query_mask[:, None], E, EA, EB, MASK)
        lse_at = delta_at + step * delta_row
        if MASK:
            lse = tl.load(lse_at, mask=query_mask, other=0.0)
            delta = tl.load(lse_at + 1, mask=query_mask, other=0.0)
        else:
            lse, delta = tl.load(lse_at), tl.load(lse_at + 1)
        lse = tl.where(lse == NEG_INF, 0.0, lse)
        visible = _is_visible(rows[:, None], queries[None, :], band, stop)
        products, dp = _dot_t(k, q, DB, PRECISION), _dot_t(v, do, EB, PRECISION)
        p, ds = _p_ds(products, dp, lse[None, :], delta[None, :], visible, scale, cap, MASK, CAP, PRECISION)
        dv = _add_dot(dv, p.to(do[0].dtype), do, EB, PRECISION)
        dk = _add_dot(dk, ds.to(q[0].dtype), q, DB, PRECISION)
        q_at += N * q_row
        do_at += N * do_row
        delta_at += N * delta_row
    return dk, dv


@triton.jit(do_not_specialize=SIZES)
def dkdv(
    tiles, entries, heads, q_home, q_work, k_home, v_home, kv_work, do_home, do_work, delta_home, delta_work,
    dkv_home, dkv_work, dk_out, dv_out, wire,
    first_tile: tl.int32, lanes: tl.int32, q_heads: tl.int32, kv_heads: tl.int32, q_columns: tl.int32,
    kv_columns: tl.int32, do_columns: tl.int32, delta_columns: tl.int32, dkv_columns: tl.int32,
    scale: tl.float32, cap: tl.float32,
    CAP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, DA: tl.constexpr, DB: tl.constexpr,
    E: tl.constexpr, EA: tl.constexpr, EB: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Accumulates dK and dV rows of a tile and KV head over all its query heads; complete rows go to dk_out and dv_out
    or to messages. dkv: dk and dv interleaved, float32."""
    tile, lane, rows, valid = tile_rows(tiles, first_tile, lanes, M)
    if lane >= tl.load(tile + 5):
        return
    flags, columns = tl.load(tile + 4), heads + tl.load(tile + 6) + lane * LANE
    step = tl.arange(0, M)
    column, first = tl.load(columns + 1), (tl.load(tile) + tl.load(tile + 7)).to(tl.int64)
    k_at, v_at, k_row, v_row = _keys(
        column, (flags & 4) != 0, k_home, v_home, kv_work, kv_heads, kv_columns, D, E
    )
    k = _load(k_at + first * k_row + (step * k_row)[:, None], valid[:, None], D, DA, DB, True)
    v = _load(v_at + first * v_row + (step * v_row)[:, None], valid[:, None], E, EA, EB, True)
    dk, dv = _zeros(M, DA, DB), _zeros(M, EA, EB)
    for x in tl.range(tl.load(tile + 2), tl.load(tile + 3), num_stages=1):
        entry = entries + x * ENTRY
        ends, band = _entry(entry)
        spaces = tl.load(entry + 8)
        q_row = tl.where((spaces & 1) != 0, q_columns, q_heads) * D
        do_row = tl.where((spaces & 2) != 0, do_columns, q_heads) * E
        delta_row = tl.where((spaces & 4) != 0, delta_columns, q_heads) * 2
        q_rows = tl.where((spaces & 1) != 0, q_work, q_home)
        do_rows = tl.where((spaces & 2) != 0, do_work, do_home) + tl.load(entry + 10).to(tl.int64) * do_row
        delta_rows = (
            tl.where((spaces & 4) != 0, delta_work, delta_home) + tl.load(entry + 11).to(tl.int64) * delta_row
        )
        lane_heads = heads + tl.load(entry + 9) + lane
        for y in tl.range(tl.load(lane_heads), tl.load(lane_heads + 1), 3, num_stages=1):
            ptrs = (
                q_rows + tl.load(heads + y) * D,
                do_rows + tl.load(heads + y + 1) * E,
                delta_rows + tl.load(heads + y + 2) * 2,
            )
            for part in tl.static_range(3):
                dk, dv = _dkdv_rows(
                    dk, dv, k, v, ptrs, (q_row, do_row, delta_row), ends[part], ends[part + 1], rows, band, scale, cap,
                    part != 1, CAP, N, D, DA, DB, E, EA, EB, PRECISION,
                )  # fmt: skip
    work = (flags & 2) != 0
    offset = (rows.to(tl.int64) * tl.where(work, dkv_columns, kv_heads) + tl.load(columns))[:, None]
    dkv_at = tl.where(work, dkv_work, dkv_home) + offset * (D + E)
    if flags & COMPLETE:
        staged, position = _target(tile, heads, lane, M)
        # selects scalars: AMD's compiler cannot select between tensors of pointers
        staging = _advance(wire, tile + 10)
        dk_to = tl.where(staged, staging, dk_out) + (position * tl.where(staged, D + E, D))[:, None]
        dv_to = tl.where(staged, staging + D, dv_out) + (position * tl.where(staged, D + E, E))[:, None]
        _merge(dkv_at, dk_to, valid[:, None], 1.0, 1.0, flags & 1, dk, D, DA, DB)
        _merge(dkv_at + D, dv_to, valid[:, None], 1.0, 1.0, flags & 1, dv, E, EA, EB)
    else:
        _merge(dkv_at, dkv_at, valid[:, None], 1.0, 1.0, flags & 1, dk, D, DA, DB)
        _merge(dkv_at + D, dkv_at + D, valid[:, None], 1.0, 1.0, flags & 1, dv, E, EA, EB)

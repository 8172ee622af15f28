"""Attention of one task in plain numpy: a block of query rows × a block of key rows under one band.

    suffixes: n query rows, m key rows, h query heads, d width of Q and K, w width of V and O

Keys and values come with one column per query head (the caller repeats shared KV heads). Query rows are taken
in strips, and each strip sees only the keys that its band can reach: no dense mask of a task is ever built.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from apportion.ir.arrays import Bools

Floats = NDArray[np.floating[Any]]

#: query rows of a strip; 256 rows × 8K keys × 8 heads of float64 are 128 MiB
STRIP = 256


def rounded(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    """The nearest numbers of bf16 or fp16, ties to even, in the dtype that they come in: float32 or float64."""
    if dtype == "fp16":
        with np.errstate(over="ignore"):  # what is too large becomes infinite, as on a device
            return values.astype(np.float16).astype(values.dtype)
    bits = values.astype(np.float32).view(np.uint32)
    finite = np.isfinite(values)
    bits += np.where(finite, np.uint32(0x7FFF) + (bits >> 16 & 1), np.uint32(0))  # carries into the exponent
    return (bits & np.uint32(0xFFFF0000)).view(np.float32).astype(values.dtype)


@dataclass(frozen=True)
class Scores:
    """Logits of raw products: s·scale, then softcap·tanh(s / softcap) where `softcap` is given."""

    scale: float
    softcap: float | None = None

    def logits(self, products: Floats) -> Floats:
        scaled = products * self.scale
        return scaled if self.softcap is None else self.softcap * np.tanh(scaled / self.softcap)

    def slope(self, logits: Floats) -> Floats | float:
        """d logits / d products, written in the logits: tanh' = 1 - tanh²."""
        return self.scale if self.softcap is None else self.scale * (1 - (logits / self.softcap) ** 2)


class Partial(NamedTuple):
    """Normalised output [n, h, w] and log-sum-exp [n, h]; (0, -inf) is the identity of `merge`."""

    o: Floats
    lse: Floats


class Gradients(NamedTuple):
    """Gradients per query head: dq [n, h, d], dk [m, h, d], dv [m, h, w]."""

    dq: Floats
    dk: Floats
    dv: Floats


@dataclass(frozen=True)
class Band:
    """dmin <= i - j <= dmax for query row i and key row j."""

    dmin: int
    dmax: int

    def strips(self, rows: int, keys: int) -> Iterator[tuple[slice, slice]]:
        """Strips of query rows, each with the keys that any of its rows may see, where there are any."""
        for a in range(0, rows, STRIP):
            b = min(a + STRIP, rows)
            reach = slice(max(0, a - self.dmax), min(keys, b - self.dmin))
            if reach.start < reach.stop:
                yield slice(a, b), reach

    def allowed(self, rows: slice, keys: slice) -> Bools:
        distance = np.arange(rows.start, rows.stop)[:, None] - np.arange(keys.start, keys.stop)
        return (self.dmin <= distance) & (distance <= self.dmax)


def identity(rows: int, heads: int, width: int, dtype: Any) -> Partial:
    """The result of rows that see no key."""
    return Partial(np.zeros((rows, heads, width), dtype), np.full((rows, heads), -np.inf, dtype))


def merge(a: Partial, b: Partial) -> Partial:
    """The attention over two disjoint sets of keys from the attention over each (online softmax)."""
    top = _finite(np.maximum(a.lse, b.lse))
    weight_a, weight_b = np.exp(a.lse - top), np.exp(b.lse - top)
    total = weight_a + weight_b
    seen = np.where(total > 0, total, 1)
    o = a.o * (weight_a / seen)[..., None] + b.o * (weight_b / seen)[..., None]
    return Partial(o, top + _log(total))


def add_sinks(part: Partial, sinks: Floats) -> Partial:
    """Merges one learned logit per head that has no value: [h]."""
    top = np.maximum(part.lse, sinks)
    lse = _finite(top) + _log(np.exp(part.lse - _finite(top)) + np.exp(sinks - _finite(top)))
    return Partial(part.o * np.exp(part.lse - _finite(lse))[..., None], lse)


def forward(q: Floats, k: Floats, v: Floats, band: Band, scores: Scores) -> Partial:
    """Attention of q [n, h, d] on k [m, h, d], v [m, h, w]; rows that see no key get (0, -inf)."""
    out = identity(len(q), q.shape[1], v.shape[2], q.dtype)
    for rows, keys in band.strips(len(q), len(k)):
        logits = _logits(q, k, rows, keys, band, scores)
        lse = _log_sum_exp(logits)
        weights = np.exp(logits - _finite(lse)[..., None])
        out.o[rows] = (weights @ v[keys].swapaxes(0, 1)).swapaxes(0, 1)
        out.lse[rows] = lse.T
    return out


def backward(
    q: Floats, k: Floats, v: Floats, do: Floats, lse: Floats, delta: Floats, band: Band, scores: Scores
) -> Gradients:
    """Gradients of a task from the merged statistics: lse and delta = rowsum(dO · O), both [n, h].

    Rows whose merged LSE is -inf saw no key anywhere and contribute nothing.
    """
    grads = Gradients(np.zeros_like(q), np.zeros_like(k), np.zeros_like(v))
    for rows, keys in band.strips(len(q), len(k)):
        logits = _logits(q, k, rows, keys, band, scores)
        weights = np.exp(logits - _finite(lse[rows].T)[..., None])
        weights[~np.isfinite(logits)] = 0
        do_hnw = do[rows].swapaxes(0, 1)
        d_weights = do_hnw @ v[keys].transpose(1, 2, 0)
        slope = scores.slope(np.where(np.isfinite(logits), logits, 0))
        d_products = weights * (d_weights - delta[rows].T[..., None]) * slope
        grads.dq[rows] += (d_products @ k[keys].swapaxes(0, 1)).swapaxes(0, 1)
        grads.dk[keys] += (d_products.swapaxes(1, 2) @ q[rows].swapaxes(0, 1)).swapaxes(0, 1)
        grads.dv[keys] += (weights.swapaxes(1, 2) @ do_hnw).swapaxes(0, 1)
    return grads


def sum_heads(per_query_head: Floats, kv_of: tuple[int, ...], kv_heads: int) -> Floats:
    """[m, h, d] gradients per query head added up in head order to [m, kv_heads, d]."""
    total = np.zeros((len(per_query_head), kv_heads, per_query_head.shape[2]), per_query_head.dtype)
    for head, column in enumerate(kv_of):
        total[:, column] += per_query_head[:, head]
    return total


def _logits(q: Floats, k: Floats, rows: slice, keys: slice, band: Band, scores: Scores) -> Floats:
    products = q[rows].swapaxes(0, 1) @ k[keys].transpose(1, 2, 0)
    return np.where(band.allowed(rows, keys), scores.logits(products), -np.inf).astype(q.dtype, copy=False)


def _log_sum_exp(logits: Floats) -> Floats:
    top = _finite(logits.max(axis=-1))
    return top + _log(np.exp(logits - top[..., None]).sum(axis=-1))


def _finite(lse: Floats) -> Floats:
    """-inf becomes 0, so that differences to it are never inf - inf."""
    return np.where(lse == -np.inf, np.zeros_like(lse), lse)


def _log(total: Floats) -> Floats:
    """log, with -inf for 0 and no warning."""
    return np.log(total, out=np.full_like(total, -np.inf), where=total > 0)

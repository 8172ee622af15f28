"""Plain attention in numpy, independent of the product's kernels: the reference for every backend.

`dense` takes a boolean mask. `Rows` computes a few rows at a time under a band mask whose square would be too large.
Queries that see no key get zeros and an LSE of -inf (with sinks: the sink).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class Answer(NamedTuple):
    """o [T, Hq, Dv], lse [T, Hq], and gradients shaped like their inputs."""

    o: Array
    lse: Array
    dq: Array
    dk: Array
    dv: Array
    dsinks: Array | None


@dataclass(frozen=True)
class Problem:
    """q [T, Hq, D], k [T, Hk, D], v [T, Hk, Dv], do [T, Hq, Dv], dlse [T, Hq], and parameters of the layer."""

    q: Array
    k: Array
    v: Array
    do: Array
    sinks: Array | None = None
    scale: float | None = None
    softcap: float | None = None
    dlse: Array | None = None

    @staticmethod
    def random(
        seed: int,
        tokens: int,
        q_heads: int = 2,
        kv_heads: int = 1,
        head_dim: int = 4,
        v_head_dim: int = 4,
        sinks: bool = False,
        softcap: float | None = None,
    ) -> Problem:
        """Draws normally distributed values in float64."""
        rng = np.random.default_rng(seed)
        q, k = (rng.standard_normal((tokens, heads, head_dim)) for heads in (q_heads, kv_heads))
        v, do = (rng.standard_normal((tokens, heads, v_head_dim)) for heads in (kv_heads, q_heads))
        return Problem(q, k, v, do, rng.standard_normal(q_heads) if sinks else None, None, softcap)


def dense(problem: Problem, allowed: Array) -> Answer:
    """Runs forward and backward in the dtype of q, head by head. allowed: bool [T, T]."""
    heads = [_head(problem, allowed, head) for head in range(problem.q.shape[1])]
    group = problem.q.shape[1] // problem.k.shape[1]
    o, lse, dq, dk, dv, dsinks = (np.stack(part, axis=-1) for part in zip(*heads, strict=True))
    dk, dv = (x.reshape(*x.shape[:2], -1, group).sum(-1) for x in (dk, dv))
    o, dq, dk, dv = (np.swapaxes(x, 1, 2) for x in (o, dq, dk, dv))
    return Answer(o, lse, dq, dk, dv, None if problem.sinks is None else dsinks)


def _head(problem: Problem, allowed: Array, head: int) -> tuple[Array, ...]:
    q, do = problem.q[:, head], problem.do[:, head]
    kv_head = head // (problem.q.shape[1] // problem.k.shape[1])
    k, v = problem.k[:, kv_head], problem.v[:, kv_head]
    scale = q.dtype.type(q.shape[-1] ** -0.5 if problem.scale is None else problem.scale)
    raw = (q @ k.T) * scale
    capped = raw if problem.softcap is None else problem.softcap * np.tanh(raw / problem.softcap)
    sink = np.full((len(q), 1), -np.inf if problem.sinks is None else problem.sinks[head], q.dtype)
    logits = np.concatenate([np.where(allowed, capped, -np.inf), sink], axis=1)
    with np.errstate(divide="ignore"):
        peak = np.nan_to_num(logits.max(axis=1, keepdims=True), neginf=0.0)
        total = np.exp(logits - peak).sum(axis=1, keepdims=True)
        lse = (peak + np.log(total))[:, 0]
    weights = np.exp(logits - peak) / np.where(total == 0, 1, total)
    p, p_sink = weights[:, :-1], weights[:, -1]
    o = p @ v
    dp = do @ v.T
    inner = (p * dp).sum(axis=1)  # the sink's value is zero, so it adds nothing here
    if problem.dlse is not None:
        inner = inner - problem.dlse[:, head]  # d lse / d logit is the logit's weight
    d_capped = p * (dp - inner[:, None])
    d_raw = d_capped if problem.softcap is None else d_capped * (1 - np.tanh(raw / problem.softcap) ** 2)
    return o, lse, d_raw @ k * scale, d_raw.T @ q * scale, p.T @ do, -(p_sink * inner).sum()


@dataclass(frozen=True)
class Rows:
    """One head under a band mask, a few query rows at a time. bands: [n, 6] as in `ir.masks.bands`, in global
    tokens."""

    problem: Problem
    bands: Array

    def chunks(self, begin: int, end: int, cells: int = 2**21) -> Iterator[tuple[slice, Array, Array]]:
        """Yields (query rows, keys that they may see, allowed [rows, keys]) for the rows of [begin, end)."""
        at = begin
        while at < end:
            keys = self._keys(at, min(at + 64, end))
            stop = min(end, at + max(1, min(64, cells // max(1, len(keys)))))
            yield slice(at, stop), keys, self._allowed(np.arange(at, stop), keys)
            at = stop

    def _keys(self, begin: int, end: int) -> Array:
        """The keys that any row of [begin, end) may see, in ascending order."""
        overlapping = self.bands[(self.bands[:, 0] < end) & (self.bands[:, 1] > begin)]
        lo = np.maximum(
            overlapping[:, 2], np.maximum(begin, overlapping[:, 0]) - np.minimum(overlapping[:, 5], end)
        )
        hi = np.minimum(
            overlapping[:, 3], np.minimum(end, overlapping[:, 1]) - np.maximum(overlapping[:, 4], -(2**40))
        )
        spans = [np.arange(a, b) for a, b in zip(lo.tolist(), hi.tolist(), strict=True) if a < b]
        return np.unique(np.concatenate(spans)) if spans else np.zeros(0, np.int64)

    def _allowed(self, rows: Array, keys: Array) -> Array:
        i, j = rows[:, None], keys[None, :]
        out = np.zeros((len(rows), len(keys)), bool)
        for q0, q1, k0, k1, dmin, dmax in self.bands.tolist():
            if q0 < rows[-1] + 1 and q1 > rows[0]:
                out |= (i >= q0) & (i < q1) & (j >= k0) & (j < k1) & (i - j >= dmin) & (i - j <= dmax)
        return out

    def forward(self, begin: int, end: int) -> tuple[Array, Array]:
        """o [rows, 1, Dv] and lse [rows, 1] of query rows [begin, end)."""
        o = np.zeros((end - begin, 1, self.problem.v.shape[2]))
        lse = np.full((end - begin, 1), -np.inf)
        for rows, keys, allowed in self.chunks(begin, end):
            local = slice(rows.start - begin, rows.stop - begin)
            part = self._part(rows, keys, allowed)
            if part is not None:
                p, lse[local, 0] = part
                o[local, 0] = p @ self.problem.v[keys, 0]
        return o, lse

    def backward(self, begin: int, end: int, dk: Array, dv: Array) -> Array:
        """dq [rows, 1, D] of query rows [begin, end); adds their share to dk [T, 1, D] and dv [T, 1, Dv]."""
        dq = np.zeros((end - begin, 1, self.problem.q.shape[2]))
        scale = self.problem.q.shape[2] ** -0.5
        for rows, keys, allowed in self.chunks(begin, end):
            part = self._part(rows, keys, allowed)
            if part is None:
                continue
            p, do = part[0], self.problem.do[rows, 0]
            dp = do @ self.problem.v[keys, 0].T
            ds = p * (dp - (p * dp).sum(axis=1, keepdims=True)) * scale
            dq[rows.start - begin : rows.stop - begin, 0] = ds @ self.problem.k[keys, 0]
            dk[keys, 0] += ds.T @ self.problem.q[rows, 0]
            dv[keys, 0] += p.T @ do
        return dq

    def _part(self, rows: slice, keys: Array, allowed: Array) -> tuple[Array, Array] | None:
        """Softmax weights [rows, keys] and lse [rows]; None if there are no keys."""
        if not len(keys):
            return None
        raw = self.problem.q[rows, 0] @ self.problem.k[keys, 0].T * self.problem.q.shape[2] ** -0.5
        logits = np.where(allowed, raw, -np.inf)
        peak = np.nan_to_num(logits.max(axis=1, keepdims=True), neginf=0.0)
        weights = np.exp(logits - peak)
        total = weights.sum(axis=1, keepdims=True)
        with np.errstate(divide="ignore"):
            lse = (peak + np.log(total))[:, 0]
        return weights / np.where(total == 0, 1, total), lse

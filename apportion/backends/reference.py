"""All ranks of a plan in one process: numpy, float64, slow and plain. The yardstick of the other backends.

tensors in token order ──scatter──► home rows of each rank ──programs──► home rows ──gather──► token order
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, Unpack

import numpy as np
from numpy.typing import DTypeLike

from apportion.backends.interp import compile_program, components
from apportion.backends.local_network import Array, Arrays, Network
from apportion.backends.local_ranks import Kernels, LocalLayer, Projection, Rank, take_turns
from apportion.backends.numpy_kernels import Scores
from apportion.ir.arrays import Floats
from apportion.ir.errors import ExecutionError, UnknownNameError
from apportion.ir.plan.tables import Layout
from apportion.ir.tensors import HEADLESS, TENSOR_NAMES, Tensor

if TYPE_CHECKING:
    from apportion.ir.bytes.codec import Plan  # which loads compiled loops; executing has none

__all__ = [
    "Kernels",
    "Projection",
    "Result",
    "Saved",
    "gather",
    "remap",
    "run",
    "run_backward",
    "run_block_backward",
    "run_block_forward",
    "run_forward",
    "scatter",
]


@dataclass(frozen=True)
class Saved:
    """What forward leaves for backward: each rank's home rows of q, k, v (or hidden states), o and lse."""

    layer: LocalLayer
    homes: tuple[dict[Tensor, Arrays], ...]


class Options(TypedDict, total=False):
    """Of a layer. sinks: [Hq], learned logits; scale: D^-1/2 by default; dtype: in which all is computed and kept,
    float64 by default; kernels: what computes a task."""

    sinks: Array | None
    scale: float | None
    softcap: float | None
    dtype: DTypeLike
    kernels: Kernels | None


class Result(NamedTuple):
    """Everything of one call, in token order; gradients are None without `do`, dsinks also without sinks."""

    o: Floats
    lse: Floats
    dq: Floats | None = None
    dk: Floats | None = None
    dv: Floats | None = None
    dsinks: Floats | None = None


def run(
    plan: Plan, kind: str, q: Array, k: Array, v: Array, do: Array | None = None, **options: Unpack[Options]
) -> Result:
    """Forward, and backward where `do` is given. Arguments as in `run_forward` and `run_backward`."""
    o, lse, saved = run_forward(plan, kind, q, k, v, **options)
    return Result(o, lse) if do is None else Result(o, lse, *run_backward(plan, kind, saved, do))


def run_forward(
    plan: Plan,
    kind: str,
    q: Array,
    k: Array,
    v: Array,
    **options: Unpack[Options],
) -> tuple[Floats, Floats, Saved]:
    """Planned attention of one kind: q [T, Hq, D], k [T, Hk, D], v [T, Hk, Dv] in token order.

    Returns o [T, Hq, Dv], lse [T, Hq] and what `run_backward` needs. A row that sees no key has o = 0 and
    lse = -inf (its sink logit, with sinks). Raises ExecutionError for wrong shapes and for a plan that cannot
    be executed.
    """
    layer = _layer(plan, **options)
    given = {Tensor.Q: (q,), Tensor.KV: (k, v)}
    _check_shapes(plan, layer, given)
    return _forward(plan, kind, layer, given)


def run_backward(
    plan: Plan, kind: str, saved: Saved, do: Array
) -> tuple[Floats, Floats, Floats, Floats | None]:
    """Gradients dq, dk, dv and dsinks [Hq] (None without sinks) from that of the output, do [T, Hq, Dv]."""
    homes, dsinks = _backward(plan, kind, saved, do)
    (dq,) = _gather_tensor(plan, homes, Tensor.DQ)
    dk, dv = _gather_tensor(plan, homes, Tensor.DKV)
    return dq, dk, dv, dsinks


def run_block_forward(
    plan: Plan,
    kind: str,
    x: Array,
    project: Projection,
    **options: Unpack[Options],
) -> tuple[Floats, Floats, Saved]:
    """As `run_forward`, for a plan that projects hidden states x [T, E] itself."""
    layer = replace(_layer(plan, **options), project=project, hidden=np.shape(x)[-1])
    home = _home(plan)
    position_ids = gather(home, [home.position_ids(rank) for rank in range(plan.header.ranks)])
    given = {Tensor.X: (x, position_ids)}
    _check_shapes(plan, layer, given)
    return _forward(plan, kind, layer, given)


def run_block_backward(plan: Plan, kind: str, saved: Saved, do: Array) -> tuple[Floats, Floats | None]:
    """Gradients of `run_block_forward`: dx [T, E] and dsinks [Hq] (or None)."""
    homes, dsinks = _backward(plan, kind, saved, do)
    (dx,) = _gather_tensor(plan, homes, Tensor.DX)
    return dx, dsinks


def scatter(layout: Layout, x: Array) -> list[Array]:
    """The rows of x [T, ...] that each rank holds, in row order."""
    return [x[layout.tokens(rank)] for rank in range(layout.spans.ranks)]


def gather(layout: Layout, parts: Sequence[Array]) -> Array:
    """The inverse of `scatter`: [T, ...] in token order."""
    tokens = np.concatenate([layout.tokens(rank) for rank in range(layout.spans.ranks)])
    rows = np.concatenate(list(parts))
    out = np.empty_like(rows)
    out[tokens] = rows
    return out


def remap(plan: Plan, index: int, parts: Sequence[Array], inverse: bool = False) -> list[Array]:
    """Each rank's rows [rows, ...] of the source layout of `plan.moves[index]`, moved to the target layout.

    `inverse` moves rows of the target layout back. Raises ExecutionError where sends and receives differ.
    """
    move = plan.moves[index]
    names = (move.target, move.source) if inverse else (move.source, move.target)
    source, target = (plan.layout(name) for name in names)
    mail: dict[tuple[int, int], deque[Array]] = defaultdict(deque)
    rows = [_move_rows(move.table.rank(rank).columns, inverse) for rank in range(plan.header.ranks)]
    for rank, part in enumerate(parts):
        if len(part) != source.rows_per_rank[rank]:
            raise ExecutionError(
                f"rank {rank} holds {source.rows_per_rank[rank]} rows of layout {names[0]}, got {len(part)}"
            )
        for _, peer, row, count in (r for r in rows[rank] if r[0]):
            mail[rank, peer].append(part[row : row + count])
    return [_arrivals(rank, rows[rank], mail, parts[rank], target) for rank in range(plan.header.ranks)]


def _move_rows(columns: Any, inverse: bool) -> list[tuple[int, int, int, int]]:
    send = columns["send"].astype(bool) ^ inverse
    return list(
        zip(send.tolist(), *(columns[name].tolist() for name in ("peer", "row", "rows")), strict=True)
    )


def _arrivals(
    rank: int, rows: list[tuple[int, int, int, int]], mail: Any, like: Array, target: Layout
) -> Array:
    out = np.empty((int(target.rows_per_rank[rank]), *like.shape[1:]), like.dtype)
    written = np.zeros(len(out), bool)
    for _, peer, row, count in (r for r in rows if not r[0]):
        if not mail[peer, rank] or len(mail[peer, rank][0]) != count:
            raise ExecutionError(
                f"remap: rank {rank} receives {count} rows from rank {peer}, which sends others"
            )
        out[row : row + count] = mail[peer, rank].popleft()
        written[row : row + count] = True
    if not written.all():
        raise ExecutionError(
            f"remap: rank {rank} got {int(written.sum())} of its {len(out)} rows of {target.name}"
        )
    return out


def _home(plan: Plan) -> Layout:
    return plan.layout(plan.header.home_layout)


def _gather_tensor(plan: Plan, homes: Sequence[dict[Tensor, Arrays]], tensor: Tensor) -> Arrays:
    for rank, home in enumerate(homes):
        if any(np.isnan(array).any() for array in home[tensor]):
            raise ExecutionError(
                f"rank {rank}: home rows of {TENSOR_NAMES[tensor]} were never written, or used up"
            )
    parts = zip(*(home[tensor] for home in homes), strict=True)
    return tuple(gather(_home(plan), part) for part in parts)


def _layer(
    plan: Plan,
    sinks: Array | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dtype: DTypeLike = np.float64,
    kernels: Kernels | None = None,
) -> LocalLayer:
    head = plan.header
    if sinks is not None and np.shape(sinks) != (head.q_heads,):
        raise ExecutionError(f"sinks have shape {np.shape(sinks)}; the plan has {head.q_heads} query heads")
    scores = Scores(head.head_dim**-0.5 if scale is None else scale, softcap)
    kept = None if sinks is None else np.asarray(sinks, dtype)
    return LocalLayer(scores, np.dtype(dtype), kept, kernels=kernels or Kernels())


def _check_shapes(plan: Plan, layer: LocalLayer, given: Mapping[Tensor, Arrays]) -> None:
    tokens = int(_home(plan).rows_per_rank.sum())
    for tensor, arrays in given.items():
        for part, array in zip(components(tensor, plan.header, layer.hidden), arrays, strict=True):
            want = (tokens, *_shape_of_row(plan, tensor, part.width))
            if np.shape(array) != want:
                raise ExecutionError(f"{part.name} has shape {np.shape(array)}; the plan is for {want}")
            if np.isnan(array).any():
                raise ExecutionError(f"{part.name} holds NaN, which here means rows that nobody wrote")


def _shape_of_row(plan: Plan, tensor: Tensor, width: int) -> tuple[int, ...]:
    return (() if tensor in HEADLESS else (plan.header.heads_of(tensor),)) + ((width,) if width else ())


def _forward(
    plan: Plan, kind: str, layer: LocalLayer, given: Mapping[Tensor, Arrays]
) -> tuple[Floats, Floats, Saved]:
    homes = _scatter_tensors(plan, layer, given)
    ranks = _execute(plan, kind, "forward", layer, homes)
    kept = (Tensor.X, Tensor.Q, Tensor.KV, Tensor.O)
    saved = tuple({t: arrays for t, arrays in rank.home.items() if t in kept} for rank in ranks)
    o, lse = _gather_tensor(plan, saved, Tensor.O)
    return o, lse, Saved(layer, saved)


def _backward(
    plan: Plan, kind: str, saved: Saved, do: Array
) -> tuple[list[dict[Tensor, Arrays]], Floats | None]:
    given = {Tensor.DO: (do,)}
    _check_shapes(plan, saved.layer, given)
    scattered = _scatter_tensors(plan, saved.layer, given)
    homes = [
        {**{tensor: tuple(a.copy() for a in arrays) for tensor, arrays in kept.items()}, **new}
        for kept, new in zip(saved.homes, scattered, strict=True)
    ]
    ranks = _execute(plan, kind, "backward", saved.layer, homes)
    if saved.layer.sinks is None:
        return [rank.home for rank in ranks], None
    dsinks = np.sum([rank.dsinks for rank in ranks], axis=0)
    return [rank.home for rank in ranks], dsinks.astype(saved.layer.dtype)


def _scatter_tensors(
    plan: Plan, layer: LocalLayer, given: Mapping[Tensor, Arrays]
) -> list[dict[Tensor, Arrays]]:
    """Each rank's home rows of the given tensors, in the layer's dtype (position ids stay integers)."""
    homes: list[dict[Tensor, Arrays]] = [{} for _ in range(plan.header.ranks)]
    for tensor, arrays in given.items():
        parts = [scatter(_home(plan), _as_dtype(np.asarray(array), layer.dtype)) for array in arrays]
        for home, rows in zip(homes, zip(*parts, strict=True), strict=True):
            home[tensor] = rows
    return homes


def _as_dtype(array: Array, dtype: np.dtype[Any]) -> Array:
    return array if np.issubdtype(array.dtype, np.integer) else array.astype(dtype)


def _execute(
    plan: Plan, kind: str, phase: str, layer: LocalLayer, homes: list[dict[Tensor, Arrays]]
) -> list[Rank]:
    if (kind, phase) not in plan.programs:
        raise UnknownNameError(
            "kind", kind, f"the plan has {', '.join(plan.header.kinds)}", "name one of these"
        )
    network = Network(plan.header.ranks)
    programs = plan.programs[kind, phase]
    compiled = [compile_program(programs.rank(rank), plan.header) for rank in range(plan.header.ranks)]
    rows = _home(plan).rows_per_rank
    ranks = [
        Rank(rank, program, phase, layer, network, int(rows[rank]), homes[rank])
        for rank, program in enumerate(compiled)
    ]
    take_turns(ranks, f"{kind} {phase}")
    network.check_empty()
    return ranks

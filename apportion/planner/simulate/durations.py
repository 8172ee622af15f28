"""How long each instruction keeps its rank's compute stream busy, all of them at once."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from apportion.ir.bands import area
from apportion.ir.isa import Op, Tensor
from apportion.planner.simulate.program import Floats, Ints, View

TASK_LIST = {"forward": "tasks", "backward": "grads"}

#: op -> how often it reads or writes the operands (a, b, c) of a row; what it accumulates into is not read first
_PASSES = np.zeros((max(Op) + 1, 3), np.int64)
_PASSES[Op.DELTA] = 1, 1, 1
_PASSES[Op.MERGE] = _PASSES[Op.ADD] = 1, 0, 2
_PASSES[Op.COPY] = 1, 0, 1
_PASSES[Op.CLEAR] = _PASSES[Op.FINISH] = 0, 0, 1
#: pushing gradients through a projection computes it again, and multiplies twice
_GRAD_PASSES = 3


class Costs(Protocol):
    """What the simulator asks of a cost model (see `planner.cost.CostModel`): microseconds at speed 1."""

    def attention_us(
        self, phase: str, q_rows: Ints, kv_rows: Ints, pairs: Ints, q_heads: Ints, kv_heads: Ints, /
    ) -> Floats: ...

    def chain_us(self, phase: str, q_rows: Ints, kv_rows: Ints, /) -> Floats: ...

    def launch_us(self, phase: str, /) -> float: ...

    def ideal_us(self, phase: str, pairs: int, q_heads: int, /) -> Floats: ...

    def rowop_us(self, moved_bytes: Ints, /) -> Floats: ...

    def linear_us(self, tokens: Ints, /) -> Floats: ...

    @property
    def linear_parameters(self) -> int: ...


def task_pairs(view: View) -> Ints:
    """int64 [tasks]: the (query, key) pairs of each task, exact."""
    name = TASK_LIST[view.phase]
    table, rows = view.source[name], view.operands.rows
    zero = np.zeros(len(table), np.int64)
    q, kv = (rows[view.operand(name, column)] for column in ("q", "kv"))
    return area(np.stack([zero, q, zero, kv, table["dmin"], table["dmax"]], axis=1))


def work_us(view: View, costs: Costs, pairs: Ints) -> Floats:
    """float64 [instructions]; a rank of speed s takes 1/s of the time of one of speed 1."""
    busy = _attention_us(view, costs, pairs) + _rowop_us(view, costs) + _projection_us(view, costs)
    speeds = view.cluster.speeds
    return busy if speeds is None else busy / np.asarray(speeds)[view.rank_of]


def _attention_us(view: View, costs: Costs, pairs: Ints) -> Floats:
    """The tasks of an instruction are one call, which takes as long as all of them, and as the longest alone."""
    name, found = TASK_LIST[view.phase], view.operands
    busy = np.zeros(len(view.instructions))
    if not len(pairs):
        return busy
    q, kv = (view.operand(name, column) for column in ("q", "kv"))
    rows, heads = (found.rows[q], found.rows[kv]), (found.heads[q], found.heads[kv])
    of = view.instruction_of(name)
    first = np.flatnonzero(np.diff(of, prepend=-1))
    together = np.add.reduceat(costs.attention_us(view.phase, *rows, pairs, *heads), first)
    longest = np.maximum.reduceat(costs.chain_us(view.phase, *rows), first)
    busy[of[first]] = np.maximum(together, longest) + costs.launch_us(view.phase)
    return busy


def _sums(view: View, name: str, values: NDArray[Any]) -> Floats:
    """Sums over the rows of a list that each instruction consumes."""
    return np.bincount(view.instruction_of(name), values, len(view.instructions)).astype(np.float64)


def _rowop_us(view: View, costs: Costs) -> Floats:
    """Memory-bound operations: the rows of an instruction count as one call."""
    moved = _sums(view, "rowops", _rowop_bytes(view)).astype(np.int64)
    busy, at = np.zeros(len(moved)), np.flatnonzero(moved)
    busy[at] = costs.rowop_us(moved[at])
    return busy


def _rowop_bytes(view: View) -> Ints:
    table, found = view.source["rowops"], view.operands
    op = view.instructions["op"][view.instruction_of("rowops")]
    a, b, c = (view.operand("rowops", column) for column in "abc")
    passes = _PASSES[op]
    moved: Ints = (passes * np.stack([found.bytes[x] for x in (a, b, c)], axis=1)).sum(1)
    moved -= np.where(((op == Op.MERGE) | (op == Op.ADD)) & (table["first"] == 1), found.bytes[c], 0)
    output = found.rows[c] * found.heads[c] * view.model.row_bytes(Tensor.DO, 1)
    return moved + np.where(op == Op.FINISH, output, 0)


def _projection_us(view: View, costs: Costs) -> Floats:
    """The projection's share of a layer's linear work, by multiplications."""
    model, found = view.model, view.operands
    op = view.instructions["op"][view.instruction_of("rowops")]
    passes = np.where(op == Op.PROJECT, 1, np.where(op == Op.PROJECT_GRAD, _GRAD_PASSES, 0))
    if not passes.any():
        return np.zeros(len(view.instructions))
    x, q, kv = (view.operand("rowops", column) for column in "abc")
    heads = [found.heads[operand] * (found.rows[operand] > 0) for operand in (q, kv)]
    columns = heads[0] * model.head_dim + heads[1] * (model.head_dim + model.value_dim)
    share = passes * model.hidden * columns / costs.linear_parameters
    return _sums(view, "rowops", share * costs.linear_us(found.rows[x]))

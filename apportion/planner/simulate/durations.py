"""How long each instruction keeps its rank's compute stream busy, all of them at once.

    attention   its tasks as one call, kernel launches, and what accumulators cost beyond results
    row ops     a launch, and the bytes that are read and written
    launch      packing of staged messages, before the round starts: their bytes twice
    wait        unpacking, after the round is complete
    the end     of a backward call: gradients of home rows are cast

The kernel times of a hardware hold writing each result once in the model's dtype. An accumulator is wider, is read
before it is changed, and that once an instruction, not once a task.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from apportion._core import durations as core
from apportion.ir.arrays import Floats, Ints
from apportion.ir.isa import ADDED, OPERAND_COLUMNS, RULES, TASK_LIST, Op, Rule, Use
from apportion.ir.masks.bands import area
from apportion.ir.tensors import Tensor
from apportion.planner.simulate.launches import KERNELS, Posted, cast_bytes
from apportion.planner.simulate.program import View


def pass_table(rules: Mapping[int, Rule]) -> Ints:
    """int64 [not the first, first row into a sum; codes; 4]: how often an op reads or writes operands a, b, c, d."""
    table = np.zeros((2, max(rules) + 1, len(OPERAND_COLUMNS["rowops"])), np.int64)
    for op, rule in rules.items():
        for argument in rule.arguments if rule.list == "rowops" else ():
            first, later = argument.passes or (1, 2 if argument.use is Use.ADD else 1)
            table[:, op, rule.columns.index(argument.column)] = later, first
    return table


def product_table(rules: Mapping[int, Rule]) -> Ints:
    """int64 [codes]: multiplications by the weights of the layer's projection."""
    return np.array([rules[op].products if op in rules else 0 for op in range(max(rules) + 1)])


_PASSES, _PRODUCTS = pass_table(RULES), product_table(RULES)


class Costs(Protocol):
    """What the simulator asks of a cost model (see `planner.cost.CostModel`): microseconds at speed 1."""

    def attention_us(
        self, phase: str, q_rows: Ints, kv_rows: Ints, pairs: Ints, q_heads: Ints, kv_heads: Ints, /
    ) -> Floats: ...

    def chain_us(self, phase: str, q_rows: Ints, kv_rows: Ints, diagonals: Ints, /) -> Floats: ...

    def launch_us(self, phase: str, /) -> float: ...

    def ideal_us(self, phase: str, pairs: int, q_heads: int, /) -> Floats: ...

    def moved_us(self, moved_bytes: Ints, /) -> Floats: ...

    def rowop_us(self, moved_bytes: Ints, /) -> Floats: ...

    @property
    def post_us(self) -> float: ...

    @property
    def contention(self) -> float: ...

    def linear_us(self, tokens: Ints, /) -> Floats: ...

    @property
    def linear_parameters(self) -> int: ...


class Work(NamedTuple):
    """What a program's work is made of, microseconds at speed 1 of all ranks together: its tasks alone, the same where
    kernels are as long as their longest task at least, starting them, and all else."""

    tasks: float
    kernels: float
    launches: float
    rows: float


def task_pairs(view: View) -> Ints:
    """int64 [tasks]: the (query, key) pairs of each task, exact."""
    name = TASK_LIST[view.phase]
    table, rows = view.source[name], view.operands.rows
    zero = np.zeros(len(table), np.int64)
    q, kv = (rows[view.operand(name, column)] for column in ("q", "kv"))
    return area(np.stack([zero, q, zero, kv, table["dmin"], table["dmax"]], axis=1))


def work_us(view: View, costs: Costs, pairs: Ints, posted: Posted) -> tuple[Floats, Work]:
    """float64 [instructions]; of a launch before it, of a wait after its round is complete. A rank of speed s takes 1/s
    of the time of one of speed 1. And what all of it is made of."""
    attention = _attention_us(view, costs, pairs)
    parts = attention.kernels, attention.launches, attention.accumulated, _rows_us(view, costs, posted)
    busy = sum((*parts, _projection_us(view, costs)), np.zeros(len(view.instructions)))
    kernels, launches = float(attention.kernels.sum()), float(attention.launches.sum())
    work = Work(attention.tasks_us, kernels, launches, float(busy.sum()) - kernels - launches)
    return busy / view.speeds[view.rank_of], work


def end_us(view: View, costs: Costs) -> Floats:
    """float64 [ranks]: casting gradients after the last instruction."""
    moved = cast_bytes(view)
    casts: Floats = np.where(moved > 0, costs.rowop_us(moved), 0.0)
    return casts / view.speeds


class _Attention(NamedTuple):
    """Of attention instructions, float64 [instructions]: their kernels, starting these, and what accumulators move
    beyond results; and all tasks alone."""

    kernels: Floats
    launches: Floats
    accumulated: Floats
    tasks_us: float


def _attention_us(view: View, costs: Costs, pairs: Ints) -> _Attention:
    """The tasks of an instruction are one call, which takes as long as all of them, and as the longest alone."""
    name, found = TASK_LIST[view.phase], view.operands
    kernels, launches, accumulated = np.zeros((3, len(view.instructions)))
    if not len(pairs):
        return _Attention(kernels, launches, accumulated, 0.0)
    q, kv = (view.operand(name, column) for column in ("q", "kv"))
    rows, heads = (found.rows[q], found.rows[kv]), (found.heads[q], found.heads[kv])
    of = view.instruction_of(name)
    first = np.flatnonzero(np.diff(of, prepend=-1))
    together = np.add.reduceat(costs.attention_us(view.phase, *rows, pairs, *heads), first)
    dmin, dmax = (view.source[name].wide(column) for column in ("dmin", "dmax"))
    longest = np.maximum.reduceat(costs.chain_us(view.phase, *rows, dmax - dmin + 1), first)
    at = of[first]
    kernels[at] = np.maximum(together, longest)
    launches[at] = KERNELS[view.instructions["op"][at]] * costs.launch_us(view.phase)
    accumulated[at] = costs.moved_us(_accumulated(view, of)[at])
    return _Attention(kernels, launches, accumulated, float(together.sum()))


def _accumulated(view: View, of: Ints) -> Ints:
    """int64 [instructions]: what reading and writing accumulators moves beyond the results in the model's dtype, each
    row once an instruction: none is read that a task overwrites, none is written wide that is complete then; and what
    statistics of rows move beside. of: int64 [tasks], their instructions."""
    table, found, model = view.source[TASK_LIST[view.phase]], view.source["operands"], view.model
    first = view.operands.ptr[view.rank_of][of]
    moved = np.zeros(len(view.instructions), np.int64)
    for column, argument in ADDED[view.phase].items():
        (tensor,) = argument.tensors
        operand = first + table.wide(column)
        row, rows, space, col, heads = (
            found[name][operand].astype(np.int64) for name in ("row", "rows", "space", "col", "heads")
        )
        lane = (col * (int(heads.max()) + 1) + heads) * 2 + space
        wide, narrow = model.row_bytes(tensor, 1), model.result_bytes(tensor)
        beside = model.accumulator_bytes if tensor == Tensor.O else 0
        fresh, done = np.flatnonzero(table["first"] & argument.flag), view.complete[column].tasks
        parts: list[tuple[Ints, Ints, Ints, int]] = [
            (np.arange(len(row)), row, row + rows, 2 * wide - narrow),
            (fresh, row[fresh], (row + rows)[fresh], -wide),
            (done.of, done.row0, done.row1, narrow + beside - wide),
        ]
        if tensor == Tensor.DQ:  # what its kernel computes on its way
            parts.append((*view.statistics.tasks, model.output_bytes + model.row_bytes(Tensor.DELTA, 1)))
        for ranges in parts:
            core.add_rows(moved, *ranges[:3], of, lane, view.operands.heads[operand], ranges[3])
    return moved


def _rows_us(view: View, costs: Costs, posted: Posted) -> Floats:
    """Memory-bound operations: the rows of an instruction are one kernel, as are the tiles that it packs or unpacks."""
    moved, waits = _row_bytes(view), np.flatnonzero(view.instructions["op"] == Op.WAIT)
    moved[view.launches] = posted.packed
    moved[waits] = posted.unpacked[view.launch_of[waits]]
    busy, at = np.zeros(len(moved)), np.flatnonzero(moved)
    busy[at] = costs.rowop_us(moved[at])
    return busy


def _row_bytes(view: View) -> Ints:
    """int64 [instructions]: what row operations read and write, but for rows that are in place."""
    table, found, model = view.source["rowops"], view.operands, view.model
    op, count = view.instructions["op"], view.instructions["count"]
    passes = _PASSES.reshape(-1, _PASSES.shape[2])
    moved = core.row_bytes(op, count, found.ptr[view.rank_of], table.values, found.bytes, passes)
    given, left = view.delivered
    source, target = (view.operand("rowops", column)[given] for column in "ac")
    at = view.instruction_of("rowops")[given]
    moved[at] = 0
    np.add.at(moved, at, (found.bytes[source] + found.results[target]) // found.rows[source] * left)
    some, rows = view.finished
    at, heads = view.instruction_of("rowops")[some], found.heads[view.operand("rowops", "c")[some]]
    moved[at] = 0
    np.add.at(moved, at, rows * heads * (model.row_bytes(Tensor.O, 1) + model.output_bytes))
    some, rows = view.stated
    at, named = (
        view.instruction_of("rowops")[some],
        [view.operand("rowops", column)[some] for column in "abc"],
    )
    moved[at] = 0
    np.add.at(moved, at, sum(found.bytes[one] // np.maximum(found.rows[one], 1) for one in named) * rows)
    return moved


def _sums(view: View, name: str, values: NDArray[Any]) -> Floats:
    """Sums over the rows of a list that each instruction consumes."""
    return np.bincount(view.instruction_of(name), values, len(view.instructions)).astype(np.float64)


def _projection_us(view: View, costs: Costs) -> Floats:
    """The projection's share of a layer's linear work, by multiplications."""
    model, found, op = view.model, view.operands, view.instructions["op"]
    if not _PRODUCTS[op].any():
        return np.zeros(len(op))
    passes = _PRODUCTS[op[view.instruction_of("rowops")]]
    x, q, kv = (view.operand("rowops", column) for column in "abc")
    heads = [found.heads[operand] * (found.rows[operand] > 0) for operand in (q, kv)]
    columns = heads[0] * model.head_dim + heads[1] * (model.head_dim + model.value_dim)
    share = passes * model.hidden * columns / costs.linear_parameters
    return _sums(view, "rowops", share * costs.linear_us(found.rows[x]))

"""Correctness proof of programs: one compiled walk over each rank (`core/ir/verify`).

It implements the rules `operands`, `transfers`, `heads`, `dataflow`, `delivery` and `results`. At the first violation,
or an unsupported form (listed in FORMAT.md), the walk of a rank stops; `trace` returns its state, rank by rank, and the
folder `explain` turns that into messages. `judge` returns True for a correct program.

Ranks are walked one after another, reusing scratch memory, or in ranges by several threads. With many tasks a range is
*settled* (tokens of received rows resolved, conditions checked) right after its walk; if it depends on ranks not yet
walked, it is walked again later. So the notes of the walk are never kept for all ranks at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from apportion._core import verify as core
from apportion.ir.arrays import Bools, Ints
from apportion.ir.errors import CapacityError
from apportion.ir.isa import TABLES, Op
from apportion.ir.plan.tables import Table
from apportion.ir.tensors import PHASES, Tensor
from apportion.ir.verify.attended import most_pieces, too_many_pieces_error
from apportion.ir.verify.homes import Homes
from apportion.ir.verify.view import HeadSets, Program
from apportion.ir.verify.walk.lists import Lists

_LIMIT = 2**30 - 1  # largest number in tables, so that tokens and rows of tiles can be told apart by size
_TOO_LARGE = "a number of its {} is beyond 2^30 - 1, the limit of the verifier"
_LONGEST = 2**21  # operands, tasks and rowops per range of ranks: some 200 MB of scratch memory
_MAX_HEADS = 60  # one bit per head group in a word
_DIAGONALS = ("dmin", "dmax")  # columns that may be negative; `structure` has checked the others


class ZerosError(Exception):
    """A task adds to rows that another rank sent as zeros, so ranges of ranks cannot be settled one by one."""


class Sets(NamedTuple):
    """The head sets of a plan, for tensors of the query and the KV side.

    bits: int64 [2 * words, sets], a bit for each group of heads, row 2 * word + side; number: int64 [2,
    sets], equal for equal sets; size: int64 [2, sets], heads; serves: bool [sets, sets], True if the second set has all
    KV heads that the query heads of the first set need.
    """

    bits: Ints
    number: Ints
    size: Ints
    serves: Bools


def sets_of(q: HeadSets, kv: HeadSets) -> Sets:
    """Builds the sets; with many heads, those that always occur together share a bit."""
    queries, keys = _members(q), _members(kv)
    members = [member if member.shape[1] <= _MAX_HEADS else _distinct(member) for member in (queries, keys)]
    word_count = -(-max(member.shape[1] for member in members) // _MAX_HEADS)
    bits = np.stack([_bits(member, word_count) for member in members], axis=1).reshape(2 * word_count, -1)
    needed: Bools = np.any(queries.reshape(len(queries), kv.heads, -1), axis=2)
    serves = needed.astype(np.float32) @ ~keys.T == 0  # heads missing from the other set, counted exactly
    return Sets(bits, np.array([q.canonical, kv.canonical]), np.array([q.size, kv.size]), serves)


def _members(sets: HeadSets) -> Bools:
    """bool [sets, heads]: membership of heads; numbers beyond the heads are ignored."""
    member = np.zeros((len(sets.members), sets.heads), bool)
    for number, heads in enumerate(sets.members):
        member[number, heads[heads < sets.heads]] = True
    return member


def _distinct(member: Bools) -> Bools:
    """Distinct columns."""
    last = {column.tobytes(): i for i, column in enumerate(np.ascontiguousarray(member.T))}
    return member[:, list(last.values())]


def _bits(member: Bools, word_count: int) -> Ints:
    """int64 [words, sets]: a bit for each group of heads, `_MAX_HEADS` to a word."""
    result = np.zeros((word_count, len(member)), np.int64)
    for group in range(member.shape[1]):
        result[group // _MAX_HEADS] |= member[:, group].astype(np.int64) << (group % _MAX_HEADS)
    return result


#: phase -> bool [codes of ops]: True for ops allowed in it
_IS_OF_PHASE = {
    phase: np.isin(np.arange(max(Op) + 1), [op for op in Op if phase in op.rule.phases]) for phase in PHASES
}


def _fields(program: Program, homes: Homes, sets: Sets, inputs: frozenset[Tensor]) -> tuple[Any, ...] | None:
    """The fields of the core's `Program` (core/ir/verify/program.hpp); None if it has tasks or instructions of the
    wrong phase. Raises CapacityError if it is too large."""
    names = ("operands", "instructions", "transfers", program.task_list, "rowops")
    tables = [program.source[name] for name in names]
    for name, table in zip(names, tables, strict=True):
        _check_numbers(name, table)
    if len(program.source["tasks"]) + len(program.source["grads"]) > len(tables[3]):
        return None
    if not _IS_OF_PHASE[program.phase][tables[1]["op"]].all():
        return None
    rounds = int(tables[1]["round"].max(initial=0)) + 1
    if rounds > 8 * len(tables[1]) + 1024:
        raise CapacityError(f"its rounds are numbered up to {rounds - 1}, with gaps too wide to verify")
    others = [tensor for tensor in Tensor if program.phase not in tensor.contents.phases]
    memory = homes.rows, homes.first, program.arena_rows, program.arena_heads
    heads = sets.bits, sets.number, sets.size, sets.serves
    bits = _bits_of(inputs), _bits_of(program.outputs), _bits_of(others)
    return program.source.arrays, memory, heads, *bits, program.phase == "backward", rounds


def _check_numbers(name: str, table: Table) -> None:
    values, names = table.values, TABLES[name]
    diagonals = [names.index(column) for column in _DIAGONALS if column in names]
    if values.size and (values.max() > _LIMIT or any(values[i].min() < -_LIMIT for i in diagonals)):
        raise CapacityError(_TOO_LARGE.format(name))


def _bits_of(tensors: Iterable[Tensor]) -> int:
    return sum(1 << tensor for tensor in tensors)


def judge(
    program: Program,
    homes: Homes,
    sets: Sets,
    inputs: frozenset[Tensor],
    lists: Lists,
    threads: int = 1,
    together: bool = False,
) -> bool:
    """True if the program is correct; `lists` then holds the attention of its tasks. Call `lists.begin` before, and
    `lists.end` after. Raises CapacityError for a program too large, ZerosError for one settled only `together`.

    inputs: tensors whose home rows hold values at the start. threads: number of ranges of ranks walked in parallel.
    together: settle all ranks at once.
    """
    arguments = _fields(program, homes, sets, inputs)
    if arguments is None:
        return False
    limit = most_pieces(len(program.source[program.task_list]))
    verdict, _ = core.judge(arguments, lists.core, together, (threads, _LONGEST, limit))
    if verdict == core.Verdict.ZEROS:
        raise ZerosError
    if verdict == core.Verdict.TOO_MANY:
        raise too_many_pieces_error(limit)
    return verdict == core.Verdict.RIGHT


def trace(program: Program, homes: Homes, sets: Sets, inputs: frozenset[Tensor]) -> core.Trace | None:
    """Trace of the walk, each rank by itself: the place where it stopped, and the attention of tasks; None if it could
    not start. For incorrect programs, and for pictures. Raises CapacityError if the program is too large.

    inputs: tensors whose home rows hold values at the start.
    """
    arguments = _fields(program, homes, sets, inputs)
    if arguments is None:
        return None
    limit = most_pieces(len(program.source[program.task_list]))
    result = core.trace(arguments, limit)
    if result is None:
        raise too_many_pieces_error(limit)
    return result

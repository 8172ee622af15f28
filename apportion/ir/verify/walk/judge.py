"""The proof that programs are right: one walk over each rank, compiled (`core/ir/verify`).

It is what the rules `operands`, `transfers`, `heads`, `dataflow`, `delivery` and `results` are. Where one of them does
not hold, or a program has a form that is not followed (FORMAT.md names those), the walk of a rank ends there; `trace`
tells what it saw, rank by rank, and the folder `explain` makes words of that. Of a right program `judge` says so.

Ranks are walked one after another, over the same scratch memory, or ranges of them by several threads. Where tasks are
many a range is settled as soon as it has been walked; one that hangs on ranks that were not is walked again when they
were. So what is noted of ranks is never kept of all of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from apportion._core import verify as core
from apportion.ir.arrays import Bools, Ints
from apportion.ir.errors import CapacityError
from apportion.ir.isa import TABLES, Op
from apportion.ir.plan.tables import Table
from apportion.ir.tensors import PHASES, Tensor
from apportion.ir.verify.attended import most_pieces, too_many_pieces
from apportion.ir.verify.homes import Homes
from apportion.ir.verify.view import HeadSets, Program
from apportion.ir.verify.walk.lists import Lists

_LIMIT = 2**30 - 1  # of all numbers in tables: tokens are told from rows of tiles by their size
_TOO_LARGE = "a number of its {} is beyond 2^30 - 1, the most that is followed"
_LONGEST = 2**21  # operands, tasks and rowops of a range of ranks: some 200 MB of scratch memory
_MOST_HEADS = 60  # a bit each, in a word
_DIAGONALS = ("dmin", "dmax")  # columns whose numbers may be negative; `structure` has seen to the others


class ZerosError(Exception):
    """Something was added to rows that another rank sent as zeros: ranges of ranks cannot be settled one by one."""


@dataclass(frozen=True, eq=False)
class Sets:
    """The head sets of a plan, for tensors of the query and the KV side.

    bits: int64 [2 * words, sets], a bit for each group of heads, both sides of a word after the other; number: int64
    [2, sets], equal for equal sets; size: int64 [2, sets], heads; serves: bool [sets, sets], whether the query heads of
    one find all their keys in the other.
    """

    bits: Ints
    number: Ints
    size: Ints
    serves: Bools


def sets_of(q: HeadSets, kv: HeadSets) -> Sets:
    """Where heads are many, those that only occur together share a bit."""
    queries, keys = _members(q), _members(kv)
    together = [one if one.shape[1] <= _MOST_HEADS else _distinct(one) for one in (queries, keys)]
    words = -(-max(one.shape[1] for one in together) // _MOST_HEADS)
    bits = np.stack([_bits(one, words) for one in together], axis=1).reshape(2 * words, -1)
    own: Bools = np.any(queries.reshape(len(queries), kv.heads, -1), axis=2)
    serves = own.astype(np.float32) @ ~keys.T == 0  # heads that one has and the other lacks, counted exactly
    return Sets(bits, np.array([q.canonical, kv.canonical]), np.array([q.size, kv.size]), serves)


def _members(sets: HeadSets) -> Bools:
    """bool [sets, heads]: whether each has each head; what goes beyond the heads has none."""
    member = np.zeros((len(sets.members), sets.heads), bool)
    for number, one in enumerate(sets.members):
        member[number, one[one < sets.heads]] = True
    return member


def _distinct(member: Bools) -> Bools:
    """One of each column."""
    last = {column.tobytes(): i for i, column in enumerate(np.ascontiguousarray(member.T))}
    return member[:, list(last.values())]


def _bits(member: Bools, words: int) -> Ints:
    """int64 [words, sets], a bit for each group of heads, so many to a word."""
    found = np.zeros((words, len(member)), np.int64)
    for group in range(member.shape[1]):
        found[group // _MOST_HEADS] |= member[:, group].astype(np.int64) << (group % _MOST_HEADS)
    return found


#: phase -> bool [codes of ops]: whether it may have such instructions
_IS_OF_PHASE = {
    phase: np.isin(np.arange(max(Op) + 1), [op for op in Op if phase in op.rule.phases]) for phase in PHASES
}


class Arrays(NamedTuple):
    """What the walk reads, in its order: each list with where the rows of each rank begin."""

    operands: Ints
    operand_ptr: Ints
    instructions: Ints
    instruction_ptr: Ints
    transfers: Ints
    transfer_ptr: Ints
    tasks: Ints
    task_ptr: Ints
    rowops: Ints
    rowop_ptr: Ints
    home_rows: Ints
    first_address: Ints
    arena_rows: Ints
    arena_heads: Ints
    bits: Ints
    number: Ints
    size: Ints
    serves: Bools


def _prepared(program: Program, homes: Homes, sets: Sets, given: frozenset[Tensor]) -> core.Program | None:
    """None where it has tasks or instructions of another phase. Raises CapacityError for what is too large."""
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
        raise CapacityError(f"its rounds are numbered up to {rounds - 1}, with gaps too wide to follow")
    lists = [(table.values, np.ascontiguousarray(table.ptr, np.int64)) for table in tables]
    foreign = [tensor for tensor in Tensor if program.phase not in tensor.contents.phases]
    arrays = Arrays(
        *lists[0],
        *lists[1],
        *lists[2],
        *lists[3],
        *lists[4],
        homes.rows,
        homes.first,
        program.arena_rows,
        program.arena_heads,
        sets.bits,
        sets.number,
        sets.size,
        sets.serves,
    )
    bits = _bits_of(given), _bits_of(program.owed), _bits_of(foreign)
    return core.Program(arrays, program.phase == "backward", *bits, rounds)


def _check_numbers(name: str, table: Table) -> None:
    values, names = table.values, TABLES[name]
    signed = [names.index(column) for column in _DIAGONALS if column in names]
    if values.size and (values.max() > _LIMIT or any(values[i].min() < -_LIMIT for i in signed)):
        raise CapacityError(_TOO_LARGE.format(name))


def _bits_of(tensors: Iterable[Tensor]) -> int:
    return sum(1 << tensor for tensor in tensors)


def judge(
    program: Program,
    homes: Homes,
    sets: Sets,
    given: frozenset[Tensor],
    lists: Lists,
    threads: int = 1,
    together: bool = False,
) -> bool:
    """Whether all is right with a program: then what its tasks attend to is in `lists`, where it has begun and is to
    end. Raises CapacityError for what is too large to follow, ZerosError unless ranks are walked `together`.

    homes: of the home rows. given: tensors whose home rows hold values at the start. threads: how many walk ranges of
    ranks at a time.
    """
    prepared = _prepared(program, homes, sets, given)
    if prepared is None:
        return False
    most = most_pieces(len(program.source[program.task_list]))
    verdict, _ = core.judge(prepared, lists.core, together, threads, _LONGEST, most)
    if verdict == core.Verdict.ZEROS:
        raise ZerosError
    if verdict == core.Verdict.TOO_MANY:
        raise too_many_pieces(most)
    return verdict == core.Verdict.RIGHT


def trace(program: Program, homes: Homes, sets: Sets, given: frozenset[Tensor]) -> core.Trace | None:
    """What the walk saw, each rank by itself: where it stopped, and what tasks attend to; None where it could not
    begin. For programs in which something is wrong, and for pictures. Raises CapacityError for what is too large.

    given: tensors whose home rows hold values at the start.
    """
    prepared = _prepared(program, homes, sets, given)
    if prepared is None:
        return None
    most = most_pieces(len(program.source[program.task_list]))
    found = core.trace(prepared, most)
    if found is None:
        raise too_many_pieces(most)
    return found

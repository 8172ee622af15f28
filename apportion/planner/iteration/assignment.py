"""The compact form of an iteration plan: what was asked, and what its placements chose.

    request      the job and its batches
    choices      per microbatch the blocks and their homes, who computes which cell, and what a search found
    id           of the iteration plan that the passes behind placement make of these

Programs are left out: they follow from the rest, and are 100 times as large. Columns are narrow integers, homes as
the step from the block before and ranks of cells as the step from the home of their queries; zlib takes what repeats.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np

from apportion.ir.arrays import Ints, group_of, offsets, within
from apportion.ir.bytes import wire
from apportion.ir.bytes.columns import Cell, Cells
from apportion.ir.bytes.job import Job, decode_request, encode_request
from apportion.ir.bytes.parts import encode_table
from apportion.ir.bytes.predictions import no_operands, rules_of
from apportion.ir.bytes.sequences import MAX_MICROBATCHES, packed, unpacked
from apportion.ir.errors import ConfigError, DecodeError, VersionError
from apportion.ir.isa import PHASES, VERSION
from apportion.ir.plan.tables import Table
from apportion.ir.request.batch import Batch
from apportion.ir.request.policy import Recipe
from apportion.ir.version import __version__
from apportion.planner.pipeline.feasibility import check_request
from apportion.planner.pipeline.pipeline import Made
from apportion.planner.pipeline.placing import Placed, grouped, unequal_groups
from apportion.planner.problem import Execution, Placement, Problem, Shards
from apportion.planner.recipe.recipes import passes_of
from apportion.planner.shard.blocks import row_weights
from apportion.planner.solvers.status import Limit, Status, Termination
from apportion.planner.tasks.cells import cut_cells

#: what the report says of a search
Search = Mapping[str, Any] | None

FORMAT = "apportion.assignment"
#: bytes of request and choices before compression. Few hostile bytes can make reading allocate this, and more
MOST_REQUEST, MOST_CHOICES = 16 << 20, 32 << 20
#: for the cells of an iteration, the blocks of queries in an attention kind, and its cells that an execution places:
#: about 1.4 GB of any of these
MOST_CELLS, MOST_PLACED = 1 << 24, 1 << 22
_LARGEST, _DIVISIONS = 2**62, 2**31
_BLOCKS, _EXECUTED, _DIVIDED = ("length", "home", "weight"), ("rank",), ("rank", "division")

_Few = msgspec.Meta(max_length=256)


class _ExecutionWire(msgspec.Struct):
    """Of one attention kind and phase; no columns: as in the phase before."""

    columns: Cell
    divided: bool


class _EndedWire(msgspec.Struct):
    status: Status
    bound: int | float
    value: int | float | None
    limit: Limit | None


class Choice(msgspec.Struct):
    """Of one microbatch. search: msgpack of the report's record, empty where nothing was searched; weight is counted
    from the pairs of each block's queries."""

    block_tokens: int
    heaviest: int
    bound: float
    ended: _EndedWire | None
    groups: Cell
    head_groups: int
    blocks: Cell
    executions: Annotated[list[_ExecutionWire], _Few]
    search: bytes


class _ChoicesWire(msgspec.Struct):
    """sequences: a column for each microbatch where the recipe packs, else none."""

    sequences: Annotated[list[bytes], msgspec.Meta(max_length=MAX_MICROBATCHES)]
    microbatches: Annotated[list[Choice], msgspec.Meta(max_length=MAX_MICROBATCHES)]


class _AssignmentWire(wire.Version):
    """request and choices are compressed."""

    release: str
    request: bytes
    choices: bytes
    id: bytes


_decode = msgspec.msgpack.Decoder(_AssignmentWire).decode
_decode_choices = msgspec.msgpack.Decoder(_ChoicesWire).decode
_decode_search = msgspec.msgpack.Decoder(dict[str, Any]).decode


@dataclass(frozen=True)
class Assignment:
    """What `encode_assignment` wrote, not checked against the request yet. sequences: int64 arrays, one a microbatch,
    where the recipe packs, else none."""

    job: Job
    batches: tuple[Batch, ...]
    sequences: tuple[Ints, ...]
    choices: tuple[Choice, ...]
    id: bytes


def encode_assignment(
    job: Job, batches: Sequence[Batch], sequences: Sequence[Ints], made: Sequence[Made], id_: bytes
) -> bytes | None:
    """The compact form of the iteration that was made of the request; None where that is larger than the limits
    above allow."""
    if sum(map(_cells, (each.placed for each in made))) > MOST_CELLS:
        return None
    request = encode_request(job, batches)
    choices = wire.encode_struct(
        _ChoicesWire([packed(own) for own in sequences], [_choice(each) for each in made])
    )
    if len(request) > MOST_REQUEST or len(choices) > MOST_CHOICES:
        return None
    held = _AssignmentWire(FORMAT, VERSION, __version__, _compressed(request), _compressed(choices), id_)
    return wire.encode_struct(held)


def decode_assignment(data: bytes) -> Assignment:
    """What is in `data`. Raises DecodeError, VersionError also where another release wrote it."""
    found: _AssignmentWire = wire.read_envelope(data, _decode, "assignment", FORMAT)
    if not wire.newer(found.version):
        wire.check_canonical(len(data), found, "assignment")
    if found.release != __version__:
        raise VersionError(
            f"assignment: release {found.release[:40]!r} made it, this is {__version__!r}, which may lower it to "
            "another plan: plan again, or use that release"
        )
    job, batches = decode_request(_expanded(found.request, MOST_REQUEST, "request"))
    raw = _expanded(found.choices, MOST_CHOICES, "choices")
    choices: _ChoicesWire = wire.unpack(_decode_choices, raw, "assignment: choices")
    if not wire.newer(found.version):
        wire.check_canonical(len(raw), choices, "assignment: choices")
    sequences = tuple(map(unpacked, choices.sequences))
    _check_microbatches(job, batches, sequences, len(choices.microbatches))
    return Assignment(job, batches, sequences, tuple(choices.microbatches), found.id)


def _check_microbatches(
    job: Job, batches: tuple[Batch, ...], sequences: tuple[Ints, ...], choices: int
) -> None:
    fits = 1 <= choices <= job.microbatches if job.packs else choices == len(batches)
    if not fits or len(sequences) != (choices if job.packs else 0):
        raise DecodeError(
            f"assignment: {choices} microbatches, of {len(sequences)} of which it says the sequences, for "
            f"{len(batches)} batches of a job of {job.microbatches} microbatches"
        )
    if not job.packs:
        return
    told, all_ = np.sort(np.concatenate(sequences)), np.arange(len(batches[0].lengths))
    if not np.array_equal(told, all_) or not all(len(own) for own in sequences):
        raise DecodeError("assignment: its microbatches do not have each sequence of the batch once")


def restored(problems: Sequence[Problem], choices: Sequence[Choice]) -> list[tuple[Placed, Search]]:
    """The placement of each microbatch as it was when it was planned, and what the report said of the search that
    found it. Raises DecodeError where a choice is not one for its problem; ConfigError, CapacityError as placing
    does."""
    found = [_restored(*pair) for pair in zip(problems, choices, strict=True)]
    _check_cells(sum(_cells(placed) for placed, _ in found))
    return found


def _restored(problem: Problem, choice: Choice) -> tuple[Placed, Search]:
    check_request(problem)
    search = _search(problem, choice.search)
    passes = passes_of(problem.policy.recipe if search is None else _recipe(search))
    groups, inner, lone = grouped(problem, passes)
    if lone is not None and lone.is_all:
        lone = None
    first = _first_ranks(choice.groups, problem.ranks)
    if first is not None:
        groups = unequal_groups(passes, first)
    placement = _placement(inner, choice, len(groups), first)
    _check(0 <= choice.block_tokens < _LARGEST and 0 <= choice.heaviest < _LARGEST, "sizes of blocks")
    # all that is asked of shards behind placement is the report's heaviest piece
    every, one = np.array([0, inner.batch.tokens]), np.zeros(1, np.int64)
    shards = Shards(every, one, one + choice.heaviest, choice.block_tokens)
    return Placed(problem, passes, groups, inner, shards, placement, lone), search


# ---------------------------------------------------------------------------------------------- writing


def _choice(made: Made) -> Choice:
    placed, shards, placement = made.placed, made.placed.shards, made.placed.placement
    weight = placement.weight - row_weights(placed.inner, placement.starts)
    return Choice(
        shards.block_tokens,
        int(shards.per_piece(shards.weight).max()) if shards.block_tokens else 0,
        float(placement.bound),
        None if placement.termination is None else _ended(placement.termination),
        b"" if placement.groups is None else _cell(size=np.diff(placement.groups)),
        placement.head_groups,
        _cell(length=placement.lengths, home=np.diff(placement.home, prepend=0), weight=weight),
        list(_executions(placed.inner, placement)),
        b"" if made.search is None else wire.encode_section(made.search),
    )


def _ended(found: Termination) -> _EndedWire:
    bound, value = (_plain(number) for number in (found.bound, found.value))
    return _EndedWire(found.status, bound, value, found.limit)


def _plain(number: Any) -> Any:
    """As the report has it, which is neither made a float nor an integer."""
    return number.item() if isinstance(number, np.generic) else number


def _executions(problem: Problem, placement: Placement) -> Iterator[_ExecutionWire]:
    """By kind and phase."""
    execution = placement.execution
    if execution is None:
        return
    for kind, bands in problem.bands.items():
        home = placement.home[cut_cells(bands, placement.starts).q]
        before: Execution | None = None
        for phase in PHASES:
            found = execution[kind, phase]
            columns: dict[str, Ints] = {} if found is before else {"rank": (found.rank - home).reshape(-1)}
            if found is not before and found.division is not None:
                columns["division"] = found.division.reshape(-1)
            yield _ExecutionWire(_cell(**columns), "division" in columns)
            before = found


def _cell(**columns: Ints) -> Cell:
    """A table of one rank, as plans have them; nothing for no rows."""
    rows = len(next(iter(columns.values()), ()))
    if not rows:
        return b""
    rules = rules_of(tuple(columns))
    return encode_table(Table(np.array([0, rows]), columns), rules)[0].tobytes()


def _compressed(data: bytes) -> bytes:
    return zlib.compress(data, 9)


# ---------------------------------------------------------------------------------------------- reading


def _expanded(data: bytes, most: int, what: str) -> bytes:
    """What `_compressed` took, at most so many bytes. Raises DecodeError."""
    stream = zlib.decompressobj()
    try:
        found = stream.decompress(data, most)
    except zlib.error as error:
        raise DecodeError(f"assignment: {what}: {error}") from None
    if not stream.eof or stream.unused_data:
        raise DecodeError(f"assignment: {what}: not whole, or more than the {most} bytes that are read")
    return found


def _check(holds: bool | np.bool_, what: str) -> None:
    if not holds:
        raise DecodeError(f"assignment: {what} that the request does not allow")


def _check_within(column: Ints, low: int, high: int, what: str) -> None:
    """Whether values are in [low, high)."""
    _check(not len(column) or (low <= int(column.min()) and int(column.max()) < high), what)


def _columns(cell: Cell, names: tuple[str, ...]) -> list[Ints]:
    """int64 columns. Raises DecodeError."""
    cells = Cells([cell], f"assignment: columns {', '.join(names)}", 0)
    table = cells.table(rules_of(names), 1, no_operands(1), lenient=False)
    return [table[name] for name in names]


def _search(problem: Problem, data: bytes) -> Search:
    """The record of a search, where the recipe searches."""
    searches = problem.policy.recipe.step("search") is not None
    _check(searches == bool(data), "the record of a search, or none,")
    if not searches:
        return None
    record: dict[str, Any] = wire.unpack(_decode_search, data, "assignment: search")
    wire.check_plain(record, "assignment: search")
    _check({"recipe", "stopped"} <= record.keys(), "a record of a search")
    return record


def _recipe(search: Mapping[str, Any]) -> Recipe:
    """What the search found."""
    try:
        recipe = Recipe.from_data(search["recipe"])
    except ConfigError as error:
        raise DecodeError(f"assignment: {error}") from None
    _check(recipe.step("search") is None, "a search found by a search")
    return recipe


def _first_ranks(cell: Cell, ranks: int) -> Ints | None:
    """int64 [groups + 1]; None without groups."""
    if not cell:
        return None
    (sizes,) = _columns(cell, ("size",))
    _check(0 < len(sizes) <= ranks, "groups of ranks")
    _check_within(sizes, 1, ranks + 1, "groups of ranks")
    first = offsets(sizes)
    _check(first[-1] == ranks, "groups of ranks")
    return first


def _placement(problem: Problem, choice: Choice, ranks: int, first: Ints | None) -> Placement:
    """ranks: as many homes as there are; first: the first ranks of groups that the placement made."""
    tokens = problem.batch.tokens
    length, home, weight = _columns(choice.blocks, _BLOCKS)
    _check(0 < len(length) <= tokens, "blocks")
    _check_within(length, 1, tokens + 1, "lengths of blocks")
    _check_within(home, -ranks, ranks, "homes")
    starts, home = offsets(length), np.cumsum(home)
    _check(starts[-1] == tokens, "lengths of blocks")
    _check_within(home, 0, ranks, "homes")
    _check(1 <= choice.head_groups <= problem.model.q_heads, "head groups")
    _check(math.isfinite(choice.bound), "a bound")
    _check_cells(_counted(problem, starts, choice.head_groups if choice.executions else None))
    execution = _execution(problem, choice, starts, home, ranks)
    _check(execution is not None or choice.head_groups == 1, "head groups")
    weight = weight + row_weights(problem, starts)
    ended = None if choice.ended is None else _termination(choice.ended)
    return Placement(starts, home, weight, choice.bound, first, ended, execution, choice.head_groups)


def _termination(found: _EndedWire) -> Termination:
    _check(math.isfinite(found.bound) and math.isfinite(found.value or 0.0), "a solver's bounds")
    return Termination(found.status, found.bound, found.value, found.limit)


def _execution(
    problem: Problem, choice: Choice, starts: Ints, home: Ints, ranks: int
) -> dict[tuple[str, str], Execution] | None:
    """Who computes each cell, where the placement says."""
    if not choice.executions:
        return None
    _check(len(choice.executions) == len(PHASES) * len(problem.bands), "executions")
    _check(not choice.groups, "executions by groups")
    told, found = iter(choice.executions), {}
    for kind, bands in problem.bands.items():
        at_home = home[cut_cells(bands, starts).q]
        before: Execution | None = None
        for phase in PHASES:
            before = _executed(next(told), at_home, choice.head_groups, ranks, before)
            found[kind, phase] = before
    return found


def _executed(
    told: _ExecutionWire, at_home: Ints, groups: int, ranks: int, before: Execution | None
) -> Execution:
    """at_home: int64 [cells], the home of their queries; before: of the phase before."""
    if not told.columns and before is not None:
        return before
    if not told.columns:
        _check(not len(at_home), "no ranks for cells")
        return Execution(np.zeros((groups, 0), np.int32))
    rank, *division = _columns(told.columns, _DIVIDED if told.divided else _EXECUTED)
    _check(len(rank) == groups * len(at_home), "cells")
    _check_within(rank, -ranks, ranks, "ranks of cells")
    rank = rank.reshape(groups, -1) + at_home
    _check_within(rank, 0, ranks, "ranks of cells")
    for part in division:
        _check_within(part, 0, _DIVISIONS, "divisions")
    parts = [part.reshape(groups, -1).astype(np.int32) for part in division]
    return Execution(rank.astype(np.int32), *parts)


# ---------------------------------------------------------------------------------------------- cells


def _check_cells(cells: int) -> None:
    if cells > MOST_CELLS:
        raise DecodeError(f"assignment: its blocks make {cells} cells or more, at most {MOST_CELLS} are read")


def _cells(placed: Placed) -> int:
    placement = placed.placement
    return _counted(
        placed.inner, placement.starts, placement.head_groups if placement.execution is not None else None
    )


def _counted(problem: Problem, starts: Ints, executed: int | None) -> int:
    """Cells of all attention kinds, or more than `MOST_CELLS`. executed: head groups whose cells are placed by
    themselves."""
    cells = [count_cells(bands, starts) for bands in problem.bands.values()]
    if executed is not None and executed * max(cells) > MOST_PLACED:
        return MOST_CELLS + 1
    return (executed or 1) * sum(cells)


def count_cells(bands: Ints, starts: Ints) -> int:
    """How many cells `cut_cells` makes of these; more than `MOST_CELLS` where they have more than `MOST_PLACED` blocks
    of queries. Takes time and memory for these blocks alone."""
    first = np.maximum(np.searchsorted(starts, bands[:, 0], "right") - 1, 0)
    blocks = np.maximum(np.searchsorted(starts, bands[:, 1], "left") - first, 0)
    if max(int(blocks.sum()), len(starts)) > MOST_PLACED:
        return MOST_CELLS + 1
    of = group_of(blocks)
    block = within(blocks) + first[of]
    q0, q1, k0, k1, dmin, dmax = bands[of].T
    q0, q1 = np.maximum(q0, starts[block]), np.minimum(q1, starts[block + 1])
    k0, k1 = np.maximum(k0, q0 - dmax), np.minimum(k1, q1 - dmin)
    keys = np.searchsorted(starts, k1, "left") - np.searchsorted(starts, k0, "right") + 1
    return int(keys[(q0 < q1) & (k0 < k1)].sum())

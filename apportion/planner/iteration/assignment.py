"""The compact form of an iteration plan: what was asked, and what its placements chose.

    request      the job and its batches
    choices      per microbatch the blocks and their homes, who computes which cell, and what a search found
    id           of the iteration plan that the passes behind placement make of these

Programs are left out: they follow from the rest, and are 100 times as large. Columns are narrow integers, homes as
the step from the block before and ranks of cells as the step from the home of their queries; zlib takes what repeats.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np

from apportion.ir.arrays import Ints
from apportion.ir.bytes import wire
from apportion.ir.bytes.cells.columns import Cell
from apportion.ir.bytes.cells.predictions import rules_of
from apportion.ir.bytes.job import Job, decode_request, encode_request
from apportion.ir.bytes.parts import encode_table
from apportion.ir.bytes.sequences import MAX_MICROBATCHES, packed, unpacked
from apportion.ir.errors import DecodeError, VersionError
from apportion.ir.isa import VERSION
from apportion.ir.plan.tables import Table
from apportion.ir.request.batch import Batch
from apportion.ir.tensors import PHASES
from apportion.ir.version import __version__
from apportion.planner.iteration.cell_counts import MOST_CELLS, cells_of
from apportion.planner.pipeline.pipeline import Made
from apportion.planner.problem import Execution, Placement, Problem
from apportion.planner.shard.blocks import row_weights
from apportion.planner.solvers.status import Limit, Status, Termination
from apportion.planner.tasks.cells import cut_cells

FORMAT = "apportion.assignment"
#: bytes of request and choices before compression. Few hostile bytes can make reading allocate this, and more
MOST_REQUEST, MOST_CHOICES = 16 << 20, 32 << 20

_Few = msgspec.Meta(max_length=256)


class ExecutionWire(msgspec.Struct):
    """Of one attention kind and phase; no columns: as in the phase before."""

    columns: Cell
    divided: bool


class EndedWire(msgspec.Struct):
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
    ended: EndedWire | None
    groups: Cell
    head_groups: int
    blocks: Cell
    executions: Annotated[list[ExecutionWire], _Few]
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


_decode_choices = msgspec.msgpack.Decoder(_ChoicesWire).decode


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
    if sum(map(cells_of, (each.placed for each in made))) > MOST_CELLS:
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
    found = wire.read_envelope(data, _AssignmentWire, "assignment", FORMAT)
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


def _ended(found: Termination) -> EndedWire:
    bound, value = (_plain(number) for number in (found.bound, found.value))
    return EndedWire(found.status, bound, value, found.limit)


def _plain(number: Any) -> Any:
    """As the report has it, which is neither made a float nor an integer."""
    return number.item() if isinstance(number, np.generic) else number


def _executions(problem: Problem, placement: Placement) -> Iterator[ExecutionWire]:
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
            yield ExecutionWire(_cell(**columns), "division" in columns)
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

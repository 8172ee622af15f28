"""The rounds of one rank's program: messages, offsets of tiles in messages, and places of staged messages in the
staging arena.

    launch step ──► Round ── sends     Message(peer, tiles at byte offsets, staged at …)
                          └─ receives

Waiting for a round frees its staging, so the arena only has to hold the largest total that is in flight at a time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from apportion.backends.interp import Operand, Program, components
from apportion.backends.torch.memory.arrays import DTYPES, Array, arrays_of, wire_dtype
from apportion.ir.isa import ALL_TO_ALL, RESULTS, Op
from apportion.ir.plan.messages import ALIGNMENT, find_messages
from apportion.ir.plan.tables import Header, ProgramSet
from apportion.ir.tensors import Space

#: alignment of staged messages, in bytes
PAGE = 256


class Message(NamedTuple):
    """Tiles that travel together. tiles: operands with their byte offsets in the message. at: byte offset
    in the staging arena, -1 for a message sent in place. results: whether its rows are results."""

    peer: int
    tiles: tuple[tuple[int, int], ...]
    size: int
    at: int
    results: bool

    @property
    def is_staged(self) -> bool:
        return self.at >= 0


class Round(NamedTuple):
    """The messages of a launch. out, into: the bytes of the staging arena that hold its staged sends and receives."""

    channel: int
    mode: int
    sends: tuple[Message, ...]
    receives: tuple[Message, ...]
    out: slice
    into: slice

    @property
    def is_dense(self) -> bool:
        return bool(self.mode & ALL_TO_ALL)


@dataclass(frozen=True)
class Rounds:
    """All rounds of a program. of_step: the round of each launch and wait; staging_bytes: size of the arena."""

    of_step: Mapping[int, Round]
    staging_bytes: int


def tile_arrays(
    operand: Operand, header: Header, hidden: int, results: bool = False
) -> Iterator[tuple[int, Array]]:
    """Layout of a tile in its message: each array and its byte offset. The arrays match a work arena, except that
    accumulated LSE travels in the accumulators' dtype, and results and narrow gradients in the model's."""
    arrays = arrays_of(operand.tensor, Space.WORK, header, len(operand.heads), hidden)
    offset, narrow = 0, results or header.narrows(operand.tensor)
    for array, part in zip(arrays, components(operand.tensor, header, hidden), strict=False):
        sent_array = array._replace(dtype=wire_dtype(operand.tensor, part, DTYPES[header.dtype], narrow))
        yield offset, sent_array
        offset += aligned(operand.rows * sent_array.row_bytes)


def aligned(size: int, multiple: int = ALIGNMENT) -> int:
    return -(-size // multiple) * multiple


def tile_bytes(operand: Operand, header: Header, hidden: int, results: bool) -> int:
    """The size of a tile in a message, in bytes."""
    offset, array = list(tile_arrays(operand, header, hidden, results))[-1]
    return offset + operand.rows * array.row_bytes


def find_rounds(programs: ProgramSet, program: Program, hidden: int, early: Mapping[int, int]) -> Rounds:
    """The rounds of one rank's program. hidden: width of X and dX, if they travel; early: launch step -> the step
    from which its messages occupy staging, if earlier than the launch."""
    messages = find_messages(programs, program.header)
    numbers, launches = iter(messages.of.tolist()), defaultdict(list)

    @cache
    def size(index: int, results: bool) -> int:
        return tile_bytes(program.operands[index], program.header, hidden, results)

    for step in program.steps:
        if step.op == Op.LAUNCH:
            results, drafts = bool(step.mode & RESULTS), dict[int, tuple[bool, Message]]()
            for transfer in step.transfers:
                number = next(numbers)
                at = 0 if messages.staged[number] else -1
                _, message = drafts.get(number, (None, Message(transfer.peer, (), 0, at, results)))
                start = aligned(message.size)
                tiles = *message.tiles, (transfer.operand, start)
                end = start + size(transfer.operand, results)
                drafts[number] = transfer.send, message._replace(tiles=tiles, size=end)
            by_peer = [drafts[number] for number in sorted(drafts)]
            launches[early.get(step.index, step.index)].append((step, by_peer))
    arena, under_way, rounds = _StagingArena(), {}, {}
    for step in program.steps:
        for launch, by_peer in launches[step.index]:
            out, into = (
                arena.place([message for send, message in by_peer if send == side]) for side in (True, False)
            )
            round_ = Round(launch.channel, launch.mode, out[0], into[0], out[1], into[1])
            rounds[launch.index] = under_way[launch.round] = round_
        if step.op == Op.WAIT:
            rounds[step.index] = under_way.pop(step.round)
            arena.release(rounds[step.index])
    return Rounds(rounds, arena.size)


class _StagingArena:
    """First-fit allocator of staged messages."""

    def __init__(self) -> None:
        self.size = 0
        self._spaces: list[slice] = []

    def place(self, messages: list[Message]) -> tuple[tuple[Message, ...], slice]:
        """Places the staged ones of a round's sends or receives next to each other; returns them and their space."""
        space = self._take(sum(aligned(message.size) for message in messages if message.is_staged))
        placed, offset = [], space.start
        for message in messages:
            placed.append(message._replace(at=offset) if message.is_staged else message)
            offset += aligned(message.size) * message.is_staged
        return tuple(placed), space

    def release(self, round_: Round) -> None:
        self._spaces = [space for space in self._spaces if space not in (round_.out, round_.into)]

    def _take(self, size: int) -> slice:
        """Takes the first free gap of `size` bytes; grows the arena if there is none."""
        start = 0
        for space in sorted(self._spaces, key=lambda space: space.start):
            if start + size <= space.start:
                break
            start = aligned(space.stop, PAGE)
        block = slice(start, start + size)
        self._spaces += [block] if size else []
        self.size = max(self.size, block.stop)
        return block

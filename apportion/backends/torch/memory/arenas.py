"""A rank's memory during one call: home rows, work arenas and staging, and operands as views of them.

inputs     home rows that the caller passes in
results    home rows that the call allocates; they outlive it
buffer     work arenas and the staging of messages, one per call from a pool, reused by the next layer
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from threading import Lock
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from apportion.backends.interp import Operand, Program, Step
from apportion.backends.torch.envelope import UNPADDED, Envelope
from apportion.backends.torch.memory.arrays import DTYPES, Array, arrays_of, part_views
from apportion.backends.torch.memory.head_columns import Columns, pick, put
from apportion.backends.torch.memory.rounds import PAGE, Message, Round, aligned, tile_arrays
from apportion.ir.errors import ExecutionError
from apportion.ir.tensors import HEADLESS, Space, Tensor as Name

Parts = tuple[Tensor, ...]


class Post(NamedTuple):
    """One message to or from a peer, uint8 [n]."""

    send: bool
    peer: int
    data: Tensor


class Buffer:
    """Bytes that a call owns exclusively. data: uint8, uninitialised."""

    __slots__ = ("__weakref__", "data")

    def __init__(self, size: int, device: torch.device) -> None:
        self.data = torch.empty(size, dtype=torch.uint8, device=device)


class Pool:
    """Byte buffers that calls take and give back, so that layers share them; a pool keeps as many per device and stream
    as calls hold at the same time."""

    def __init__(self) -> None:
        self._free: dict[tuple[torch.device, int], list[Buffer]] = {}
        self._lock = Lock()  # autograd runs backward in its own threads

    def take(self, size: int, device: torch.device) -> Buffer:
        """Takes at least `size` bytes: the most recently returned buffer that is large enough, else a new one."""
        with self._lock:
            free = self._free.setdefault(_stream(device), [])
            for i in reversed(range(len(free))):
                if free[i].data.numel() >= size:
                    return free.pop(i)
            if free:
                free.pop()
        return Buffer(size, device)

    def give(self, buffer: Buffer) -> None:
        """Puts the buffer back; only work already queued on its stream may still use it."""
        with self._lock:
            self._free.setdefault(_stream(buffer.data.device), []).append(buffer)


def _stream(device: torch.device) -> tuple[torch.device, int]:
    """The device and its current stream; buffers are reused in stream order."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return device, stream


class View:
    """Rows and head columns of an operand. `read` returns views of the memory if columns are evenly spaced, else
    copies, which `write` stores back after changes in place."""

    __slots__ = ("_columns", "_parts", "_rows", "operand")

    def __init__(self, operand: Operand, parts: Parts) -> None:
        self.operand = operand
        self._rows = tuple(part.narrow(0, operand.row, operand.rows) for part in parts)
        self._columns: Columns | None = None if operand.tensor in HEADLESS else operand.columns
        self._parts = None if isinstance(self._columns, tuple) else self._gather()

    def _gather(self) -> Parts:
        columns = self._columns
        return self._rows if columns is None else tuple(pick(rows, columns) for rows in self._rows)

    def read(self) -> Parts:
        return self._gather() if self._parts is None else self._parts

    def write(self, parts: Sequence[Tensor]) -> None:
        """Stores parts that `read` returned; does nothing for views."""
        if self._parts is None and self._columns is not None:
            for rows, part in zip(self._rows, parts, strict=True):
                put(rows, self._columns, part)

    def fill(self, parts: Sequence[Tensor]) -> None:
        """Copies parts into the operand's rows."""
        targets = self.read()
        for target, part in zip(targets, parts, strict=True):
            target.copy_(part)
        self.write(targets)


class Arenas:
    """Layout of a program's work arenas and staging in one buffer: the byte offset of each array. envelope: sizes that
    the buffer is padded to; result_only: sums whose home rows are all written as final results, which the engine holds,
    so that they need no accumulators."""

    def __init__(
        self,
        program: Program,
        staging_bytes: int,
        hidden: int,
        envelope: Envelope = UNPADDED,
        result_only: frozenset[Name] = frozenset(),
    ) -> None:
        self.result_only = result_only
        self.header, self.hidden, self.staging_bytes = program.header, hidden, staging_bytes
        self.columns = {arena.tensor: arena.heads for arena in program.arenas}
        self.placements: dict[Name, list[tuple[int, Array, int]]] = {}
        self._specs: dict[tuple[Name, Space], list[Array]] = {}
        self._bound: WeakKeyDictionary[Buffer, BoundArenas] = WeakKeyDictionary()
        if program.writes_dx_once:
            (dx,) = self.arrays(Name.DX, Space.HOME)
            self._specs[Name.DX, Space.HOME] = [dx._replace(dtype=DTYPES[self.header.dtype])]
        self.size = aligned(staging_bytes, PAGE)
        for arena in program.arenas:
            arrays = self.placements[arena.tensor] = []
            for array in self.arrays(arena.tensor, Space.WORK):
                arrays.append((self.size, array, arena.rows))
                self.size += aligned(arena.rows * array.row_bytes, PAGE)
        self.size = envelope.size("buffer_bytes", self.size)

    def arrays(self, tensor: Name, space: Space) -> list[Array]:
        """The arrays of a tensor, at home or in this program's arena."""
        key = tensor, space
        if key not in self._specs:
            columns = self.columns.get(tensor) if space == Space.WORK else None
            self._specs[key] = arrays_of(tensor, space, self.header, columns, self.hidden)
        return self._specs[key]

    def bind(self, buffer: Buffer) -> BoundArenas:
        """Binds the arenas to a buffer of at least `size` bytes; cached for the last buffer."""
        if buffer not in self._bound:
            self._bound[buffer] = BoundArenas(self, buffer)
        return self._bound[buffer]


class BoundArenas:
    """Arenas in a buffer. work: their arrays; staging: uint8 [bytes]; posts: cached messages of launch steps."""

    def __init__(self, arenas: Arenas, buffer: Buffer) -> None:
        self.work: dict[Name, Parts] = {
            tensor: tuple(_array(buffer.data, offset, array, rows) for offset, array, rows in placements)
            for tensor, placements in arenas.placements.items()
        }
        self.staging = buffer.data[: arenas.staging_bytes]
        self.posts: dict[int, tuple[Post, ...]] = {}


def _array(buffer: Tensor, offset: int, array: Array, rows: int) -> Tensor:
    return buffer[offset : offset + rows * array.row_bytes].view(array.dtype).view(array.shape(rows))


class Memory:
    """Home rows, work arenas and staging of one call. `rows`: home rows with tokens; padding: rows after them; inputs:
    home tensors that the caller passes in; others are allocated on first use."""

    def __init__(
        self, arenas: Arenas, rows: int, inputs: Mapping[Name, Parts], buffer: Buffer, padding: int = 0
    ) -> None:
        self._arenas, self._rows, self._padding, self.buffer = arenas, rows, padding, buffer
        self.device = buffer.data.device
        self.home: dict[Name, Parts] = dict(inputs)
        self._bound = arenas.bind(buffer)
        self.work, self.staging = self._bound.work, self._bound.staging

    def arrays(self, operand: Operand) -> Parts:
        """The arrays that hold an operand. Raises ExecutionError if it exceeds the rank's memory."""
        arrays = self.home_arrays(operand.tensor) if operand.is_home else self.work.get(operand.tensor)
        if arrays is None or operand.row + operand.rows > len(arrays[0]):
            raise ExecutionError(f"{operand} exceeds this rank's rows: the plan was not verified")
        return arrays

    def view(self, operand: Operand) -> View:
        """The operand's rows, part by part."""
        specs = self._arenas.arrays(operand.tensor, operand.space)
        return View(operand, part_views(self.arrays(operand), specs))

    def home_arrays(self, tensor: Name) -> Parts:
        """The arrays [rows, …] of a home tensor, allocated on first use."""
        if tensor not in self.home:
            specs = self._arenas.arrays(tensor, Space.HOME)
            is_result = tensor in self._arenas.result_only
            parts = [self.allocate(spec.shape(0)[1:], spec.dtype) for spec in specs[is_result:]]
            if is_result:
                parts.insert(0, torch.empty(specs[0].shape(0), dtype=specs[0].dtype, device=self.device))
            self.home[tensor] = tuple(parts)
            if tensor == Name.O and self._padding:
                self.home[tensor][1][self._rows :] = -torch.inf
        return self.home[tensor]

    def allocate(self, width: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocates a result [rows, *width]: uninitialised, since a verified plan reads no row before it is written,
        with zeros in padding."""
        out = torch.empty(self._rows + self._padding, *width, dtype=dtype, device=self.device)
        if self._padding:
            out[self._rows :] = 0
        return out

    def home_rows(self, tensor: Name) -> Parts:
        """The parts of a home tensor, [rows, …] each."""
        return part_views(self.home_arrays(tensor), self._arenas.arrays(tensor, Space.HOME))

    def tile_parts(self, message: Message, operands: Sequence[Operand]) -> list[Parts]:
        """The parts of each tile of a staged message."""
        tiles = []
        for index, start in message.tiles:
            operand, header = operands[index], self._arenas.header
            offsets, specs = zip(
                *tile_arrays(operand, header, self._arenas.hidden, message.results), strict=True
            )
            places = (message.at + start + offset for offset in offsets)
            arrays = [
                _array(self.staging, at, spec, operand.rows) for at, spec in zip(places, specs, strict=True)
            ]
            tiles.append(part_views(arrays, specs))
        return tiles

    def posts(self, step: Step, round_: Round, operands: Sequence[Operand]) -> tuple[Post, ...]:
        """The messages of a launch, receives first."""
        posts = self._bound.posts.get(step.index)
        if posts is None:
            sides = ((False, round_.receives), (True, round_.sends))
            posts = tuple(
                Post(send, message.peer, self._message_bytes(message, operands))
                for send, messages in sides
                for message in messages
            )
            if not any(operands[m.tiles[0][0]].is_home for _, side in sides for m in side if not m.is_staged):
                self._bound.posts[step.index] = posts  # the same memory in each call
        return posts

    def _message_bytes(self, message: Message, operands: Sequence[Operand]) -> Tensor:
        """The bytes of a message: in the staging arena, or in place if its tiles are contiguous."""
        if message.is_staged:
            return self.staging[message.at : message.at + message.size]
        first, last = (operands[message.tiles[i][0]] for i in (0, -1))
        (array,) = self.arrays(last)
        return array[first.row : last.row + last.rows].flatten().view(torch.uint8)

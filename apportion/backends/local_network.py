"""Between ranks of one process: tiles on their way, operands in a rank's memory, and rounds under way."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from apportion.backends.interp import Operand, Step
from apportion.ir.errors import ExecutionError
from apportion.ir.tensors import HEADLESS

Array = NDArray[Any]
Arrays = tuple[Array, ...]


class Tile(NamedTuple):
    """What one send put on the wire."""

    operand: Operand
    values: Arrays


class Network:
    """Tiles on their way, and which rank has launched which round."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._launched: dict[int, set[int]] = defaultdict(set)
        self._mail: dict[tuple[int, int, int], deque[Tile]] = defaultdict(deque)

    def launch(self, round_: int, rank: int) -> None:
        self._launched[round_].add(rank)

    def missing(self, round_: int, peers: set[int]) -> set[int]:
        """The peers that have not launched the round."""
        return peers - self._launched[round_]

    def send(self, round_: int, source: int, target: int, tile: Tile) -> None:
        self._mail[round_, source, target].append(tile)

    def receive(self, round_: int, source: int, target: int, into: Operand) -> Tile:
        """The next tile of the pair. Both sides list a pair's transfers alike, else ExecutionError."""
        queue = self._mail[round_, source, target]
        if not queue:
            raise ExecutionError(f"receives {into} from rank {source}, which sends no more in round {round_}")
        tile = queue.popleft()
        sent, wanted = ((o.tensor, o.rows, o.heads) for o in (tile.operand, into))
        if sent != wanted:
            raise ExecutionError(f"receives {into} from rank {source}, which sends {tile.operand}")
        return tile

    def check_empty(self) -> None:
        for (round_, source, target), queue in self._mail.items():
            if queue:
                tile = queue[0].operand
                raise ExecutionError(
                    f"round {round_}: rank {target} does not receive {tile} of rank {source}"
                )


@dataclass(frozen=True, eq=False)
class LocalView:
    """An operand in a rank's memory: `arrays` are the tensor's whole home or work arrays."""

    operand: Operand
    arrays: Arrays

    @property
    def _index(self) -> tuple[Any, ...]:
        rows = self.operand.row_slice
        return (rows,) if self.operand.tensor in HEADLESS else (rows, self.operand.columns)

    def peek(self) -> Arrays:
        """A copy of the values, whatever they are."""
        return tuple(np.array(array[self._index]) for array in self.arrays)

    def read(self) -> Arrays:
        """A copy of the values. Raises ExecutionError where rows hold no value."""
        values = self.peek()
        for value in values:
            if np.isnan(value).any():
                row = self.operand.row + int(np.argwhere(np.isnan(value))[0][0])
                raise ExecutionError(f"reads {self.operand}: row {row} is unwritten, used up or in flight")
        return values

    def write(self, values: Sequence[Array]) -> None:
        for array, value in zip(self.arrays, values, strict=True):
            array[self._index] = value

    def poison(self) -> None:
        for array in self.arrays:
            array[self._index] = nothing(array.dtype)


def nothing(dtype: np.dtype[Any]) -> float | int:
    """What rows without a value hold."""
    return np.nan if np.issubdtype(dtype, np.floating) else -1


class Flight(NamedTuple):
    """A launched round: the operands it touches, with what they must hold until its wait."""

    step: Step
    held: tuple[tuple[LocalView, Arrays], ...]

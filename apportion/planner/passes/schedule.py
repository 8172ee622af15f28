"""Order transfers into slots and rounds (FCP, section 4.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from apportion.ir.errors import ConfigError
from apportion.planner.solvers.matching import matchings, max_degree

Ints = NDArray[np.integer[Any]]


@dataclass(frozen=True)
class Slots:
    """slot: int32 [edges]; `slots` of them in all, `coalesce` to a round, `buffers` rounds in flight."""

    slot: Ints
    slots: int
    max_degree: int
    coalesce: int
    buffers: int

    @property
    def rounds(self) -> int:
        return -(-self.slots // self.coalesce)

    @property
    def round(self) -> Ints:
        return self.slot // self.coalesce

    def place(self, depth: int) -> Ints:
        """int32 [edges]: the buffer place of each tile where `depth` rounds are held at a time. Tiles that one rank
        receives (or sends) in rounds less than `depth` apart never share a place."""
        return self.round % depth * self.width + self.slot % self.coalesce

    @property
    def width(self) -> int:
        """Tiles that a rank sends or receives in one round, at most."""
        return min(self.coalesce, self.slots)

    def places(self, depth: int) -> int:
        """How many places `place` uses."""
        return min(depth, self.rounds) * self.width


# `auto` makes rounds of about this many tokens a rank: enough work behind each to hide it (FCP, section 4.2, coalesces
# four blocks of 2K), but
AUTO_ROUND_TOKENS = 8192
# keeps this many rounds where there are as many slots, so that some overlap others.
AUTO_ROUNDS = 8


@dataclass(frozen=True)
class Matchings:
    """Every slot is a matching; there are exactly as many as the busiest rank has tiles to send or receive.

    coalesce: slots per round; buffers: rounds of tiles that a rank holds at a time (FCP's evaluation uses three).
    """

    coalesce: int | Literal["auto"] = "auto"
    buffers: int = 3

    def __post_init__(self) -> None:
        if self.coalesce != "auto":
            _positive("coalesce", self.coalesce)
        _positive("buffers", self.buffers)

    def __call__(self, src: Ints, dst: Ints, rows: Ints, ranks: int) -> Slots:
        """Slots of the tiles src -> dst of so many rows each, integers [edges]."""
        slot = matchings(src, dst, ranks)
        slots = int(slot.max()) + 1 if len(slot) else 0
        return Slots(slot, slots, max_degree(src, dst, ranks), self._coalesce(slots, rows), self.buffers)

    def _coalesce(self, slots: int, rows: Ints) -> int:
        if self.coalesce != "auto":
            return self.coalesce
        longest = int(rows.max()) if len(rows) else 1
        return max(1, min(AUTO_ROUND_TOKENS // longest, -(-slots // AUTO_ROUNDS)))


def _positive(name: str, value: int | str) -> None:
    if type(value) is not int or value < 1:
        rule = "must be a positive integer"
        raise ConfigError(f"recipe.schedule.matchings.{name}", value, rule, "use 4, or leave it out")

"""Sizes to which all plans of a run are padded, so that shapes, buffers and work lists are equal in every step, as
captured graphs and compiled models need.

    rows             of a rank, padding among them          every tensor that layers are given and give back
    buffer_bytes     work arenas and staging of a call      one buffer, never a larger one later
    table_numbers    of a program's tables (engine stage)   one copy to the device, equally long
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from apportion.ir.errors import ConfigError
from apportion.ir.fields import integer, number


@dataclass(frozen=True)
class Envelope:
    """The sizes, each the most of any rank and plan; 0: no padding. Raises ConfigError."""

    rows: int = 0
    buffer_bytes: int = 0
    table_numbers: int = 0

    def __post_init__(self) -> None:
        for each in fields(self):
            object.__setattr__(self, each.name, integer(f"envelope.{each.name}", getattr(self, each.name), 0))

    @staticmethod
    def around(sizes: Iterable[tuple[int, int, int]], margin: float = 1.1) -> Envelope:
        """The largest of the `sizes()` of handles, times `margin`; take the largest of all ranks, as each plan is
        larger on another one. Raises ConfigError where there are none."""
        margin, found = number("margin", margin, 1.0), list(sizes)
        if not found:
            raise ConfigError(
                "sizes", [], "must be those of a plan at least", "give those of a few dozen batches"
            )
        most = (max(sizes) for sizes in zip(*found, strict=True))
        return Envelope(*(int(size * margin) for size in most))

    def size(self, name: str, need: int) -> int:
        """What a plan that needs so much gets. Raises ConfigError where that is beyond the envelope."""
        most: int = getattr(self, name)
        if need > most > 0:
            remedy = "make it larger (Envelope.around of more batches, or a larger margin)"
            raise ConfigError(f"envelope.{name}", most, f"a plan needs {need} on this rank", remedy)
        return most or need


UNPADDED = Envelope()

"""Sizes to which all plans of a run are padded, so that shapes, buffers and work lists are the same in every step, as
captured graphs and compiled models require.

    rows             of a rank, with padding                length of every input and output tensor of layers
    buffer_bytes     work arenas and staging of a call      one buffer that never grows
    table_numbers    of a program's tables (engine stage)   one copy to the device, of constant size
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from apportion.ir.errors import ConfigError
from apportion.ir.fields import integer, number


@dataclass(frozen=True)
class Envelope:
    """The sizes to pad to, each the maximum over ranks and plans; 0: no padding. Raises ConfigError for a size that is
    not an integer or is negative."""

    rows: int = 0
    buffer_bytes: int = 0
    table_numbers: int = 0

    def __post_init__(self) -> None:
        for item in fields(self):
            object.__setattr__(self, item.name, integer(f"envelope.{item.name}", getattr(self, item.name), 0))

    @staticmethod
    def around(sizes: Iterable[tuple[int, int, int]], margin: float = 1.1) -> Envelope:
        """The maximum of the handles' `sizes()` times `margin`; pass the sizes of all ranks, since the largest rank
        differs by plan. Raises ConfigError if there are no sizes."""
        margin, rows = number("margin", margin, 1.0), list(sizes)
        if not rows:
            raise ConfigError(
                "sizes", [], "must be the sizes of at least one plan", "pass the sizes of a few dozen batches"
            )
        maxima = (max(sizes) for sizes in zip(*rows, strict=True))
        return Envelope(*(int(size * margin) for size in maxima))

    def size(self, name: str, need: int) -> int:
        """The padded size for a plan that needs `need`. Raises ConfigError if that exceeds the envelope."""
        limit: int = getattr(self, name)
        if need > limit > 0:
            remedy = "make it larger (Envelope.around of more batches, or a larger margin)"
            raise ConfigError(f"envelope.{name}", limit, f"a plan needs {need} on this rank", remedy)
        return limit or need


UNPADDED = Envelope()

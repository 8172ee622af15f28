"""Metrics of a loader, and the facts of an iteration that ranks exchange."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from zlib import crc32

from apportion.backends.torch.transport import as_bits, as_floats
from apportion.ir.arrays import Ints
from apportion.trainer.loading.rows import Rows


class Facts(NamedTuple):
    """Facts of an iteration, over all microbatches, that ranks exchange: labels and their weight; checksums of the
    names, dtypes and widths of the samples' fields, and of the numbers of all samples; `Rows.shared`."""

    label_count: int
    weight: float
    form: int
    drawn: int = 0
    shared: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def of(rows: Sequence[Rows], samples: Sequence[Ints]) -> Facts:
        """The facts of this rank. samples: each microbatch's, as drawn."""
        label_count, weight = sum(row.label_count for row in rows), sum(row.weight for row in rows)
        form = crc32("; ".join(row.form for row in rows).encode())
        drawn = crc32(str([indexes.tolist() for indexes in samples]).encode())
        return Facts(label_count, weight, form, drawn, tuple(pair for row in rows for pair in row.shared))

    def numbers(self) -> list[int]:
        """The facts as int64 for the exchange: bits of float64, which holds integers below 2^53 exactly."""
        return as_bits([*self[:-1], *(number for pair in self.shared for number in pair)])

    @staticmethod
    def read(numbers: Sequence[int]) -> Facts:
        """The inverse of `numbers`."""
        label_count, weight, form, drawn, *rest = as_floats(numbers)
        shared = tuple(zip(map(int, rest[::2]), map(int, rest[1::2]), strict=True))
        return Facts(int(label_count), weight, int(form), int(drawn), shared)


#: facts of a rank that could not read its samples
NO_ROWS = Facts(-1, 0.0, 0)


def differing_sample(ranks: Sequence[Facts]) -> tuple[int, dict[int, str]] | None:
    """A sample that differs between ranks, and the checksum on each rank that has it."""
    checksums = dict[int, dict[int, str]]()
    for rank, facts in enumerate(ranks):
        for sample, checksum in facts.shared:
            checksums.setdefault(sample, {})[rank] = f"checksum {checksum:08x}"
    return next((item for item in checksums.items() if len({*item[1].values()}) > 1), None)


@dataclass
class Meters:
    """Counters of this process. tokens: total over ranks, in microbatches that the trainer has finished."""

    iterations: int = 0
    tokens: int = 0
    waited_s: float = 0.0
    _spent_s: float = 0.0  # on these microbatches, and waiting for them
    _since_s: float = field(default_factory=time.monotonic)

    def begin(self) -> None:
        """Starts timing a pass."""
        self._since_s = time.monotonic()

    def end(self, tokens: int) -> None:
        """Records the end of a microbatch."""
        now_s = time.monotonic()
        self.tokens += tokens
        self._spent_s, self._since_s = self._spent_s + now_s - self._since_s, now_s

    def summary(self) -> dict[str, Any]:
        """The metrics as plain data; tokens_per_s: within passes."""
        rate = self.tokens / self._spent_s if self._spent_s else 0.0
        counts = {"iterations": self.iterations, "tokens": self.tokens}
        return {**counts, "tokens_per_s": rate, "waited_s": self.waited_s}

"""What a loader counts, and tells when it is asked."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from apportion.backends.torch.handle import PlanHandle
from apportion.ir.arrays import Ints
from apportion.ir.plan.totals import pairs
from apportion.trainer.loading.rows import Rows


class Facts(NamedTuple):
    """What ranks tell each other of an iteration, all microbatches together: labels and their weight, tokens, pairs of
    (query, key) over heads that a layer of each kind computes forward, bytes that it sends; checksums of the names,
    dtypes and widths of the samples' fields, and of the numbers of all samples; `Rows.shared`."""

    valid: int
    weight: float
    tokens: int
    pairs: float
    bytes: int
    form: int
    drawn: int = 0
    shared: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def of(
        handles: Sequence[PlanHandle], rows: Sequence[Rows], samples: Sequence[Ints], device: Any
    ) -> Facts:
        """This rank's. samples: of each microbatch, as they were drawn."""
        return Facts(
            sum(one.valid for one in rows),
            sum(one.weight for one in rows),
            sum(handle.rows for handle in handles),
            sum(_pairs(handle) for handle in handles),
            sum(handle.sent_bytes(device) for handle in handles),
            crc32("; ".join(one.form for one in rows).encode()),
            crc32(str([own.tolist() for own in samples]).encode()),
            tuple(pair for one in rows for pair in one.shared),
        )

    def numbers(self) -> list[int]:
        """As int64, which is what ranks can exchange."""
        own = [as_bits(value) if isinstance(value, float) else value for value in self[:-1]]
        return [*own, *(number for pair in self.shared for number in pair)]

    @staticmethod
    def read(numbers: Sequence[int]) -> Facts:
        """The inverse of `numbers`."""
        valid, weight, tokens, work, sent, form, drawn, *rest = numbers
        shared = tuple(zip(rest[::2], rest[1::2], strict=True))
        return Facts(valid, as_float(weight), tokens, as_float(work), sent, form, drawn, shared)


def apart(ranks: Sequence[Facts]) -> tuple[int, dict[int, str]] | None:
    """A sample that has other tokens on some ranks than on others, and the checksum of each rank that has it."""
    found = dict[int, dict[int, str]]()
    for rank, one in enumerate(ranks):
        for sample, checksum in one.shared:
            found.setdefault(sample, {})[rank] = f"checksum {checksum:08x}"
    return next((item for item in found.items() if len({*item[1].values()}) > 1), None)


#: of a rank that could not read its samples
NOTHING = Facts(-1, 0.0, 0, 0.0, 0, 0)


@dataclass
class Meters:
    """Counts of this process since it began. An imbalance is the busiest rank's share over the mean, less 1."""

    waited_s: float = 0.0
    compiled_s: float = 0.0
    iterations: int = 0
    tokens: int = 0
    sent_bytes: int = 0
    imbalance: dict[str, float] = field(default_factory=lambda: {"compute": 0.0, "tokens": 0.0})
    _ended: tuple[int, float] = (0, 0.0)  # tokens of iterations that ended, and the seconds of these
    _now: tuple[int, float] | None = None  # tokens of the one that runs, and since when

    def begin(self) -> None:
        """A pass: what a pass before it left unended is not timed."""
        self._now = None

    def end(self) -> None:
        """Of the iteration that runs, if one does: the trainer is done with its last batch."""
        if self._now is not None:
            (tokens, spent_s), (own, since_s) = self._ended, self._now
            self._ended, self._now = (tokens + own, spent_s + time.monotonic() - since_s), None

    def add(self, ranks: Sequence[Facts], timed: bool) -> None:
        """One iteration, of all ranks. timed: whether all of its microbatches will be given out."""
        self.end()
        tokens = sum(one.tokens for one in ranks)
        self._now = (tokens, time.monotonic()) if timed else None
        self.iterations += 1
        self.tokens += tokens
        self.sent_bytes += sum(one.bytes for one in ranks)
        self.imbalance = {
            "compute": _imbalance([one.pairs for one in ranks]),
            "tokens": _imbalance([one.tokens for one in ranks]),
        }

    def told(self) -> dict[str, Any]:
        """tokens_per_s: of all ranks, over iterations that ended, each from its first batch to the next one's; what
        lies between passes is not counted."""
        tokens, spent_s = self._ended
        return {
            "iterations": self.iterations,
            "tokens": self.tokens,
            "tokens_per_s": tokens / spent_s if spent_s else 0.0,
            "waited_s": self.waited_s,
            "compiled_s": self.compiled_s,
            "sent_bytes_per_layer": self.sent_bytes // max(self.iterations, 1),
            "imbalance": dict(self.imbalance),
        }


def _pairs(handle: PlanHandle) -> float:
    header, programs = handle.slice.header, handle.slice.programs
    return sum(float(pairs(programs[kind, "forward"], header)[0]) for kind in header.kinds)


def _imbalance(values: Sequence[float]) -> float:
    mean = sum(values) / len(values)
    return max(values) / mean - 1.0 if mean else 0.0


def as_bits(value: float) -> int:
    """A float64 as an int64."""
    return int(np.float64(value).view(np.int64))


def as_float(bits: int) -> float:
    """The inverse of `as_bits`."""
    return float(np.int64(bits).view(np.float64))

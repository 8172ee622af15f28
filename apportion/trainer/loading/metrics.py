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
        """As int64, which is what ranks can exchange: bits of float64, which hold whole numbers below 2^53."""
        return as_bits([*self[:-1], *(number for pair in self.shared for number in pair)])

    @staticmethod
    def read(numbers: Sequence[int]) -> Facts:
        """The inverse of `numbers`."""
        valid, weight, tokens, work, sent, form, drawn, *rest = as_floats(numbers)
        shared = tuple(zip(map(int, rest[::2]), map(int, rest[1::2]), strict=True))
        return Facts(int(valid), weight, int(tokens), work, int(sent), int(form), int(drawn), shared)


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
    iterations: int = 0
    tokens: int = 0
    sent_bytes: int = 0
    imbalance: dict[str, float] = field(default_factory=lambda: {"compute": 0.0, "tokens": 0.0})
    _given: int = 0  # tokens of microbatches that the trainer is done with
    _spent_s: float = 0.0  # on these, and waiting for them
    _since_s: float = 0.0

    def begin(self) -> None:
        """A pass."""
        self._since_s = time.monotonic()

    def end(self, tokens: int) -> None:
        """Of a microbatch of so many tokens on all ranks."""
        now_s = time.monotonic()
        self._given += tokens
        self._spent_s, self._since_s = self._spent_s + now_s - self._since_s, now_s

    def add(self, ranks: Sequence[Facts]) -> None:
        """One iteration, of all ranks."""
        self.iterations += 1
        self.tokens += sum(one.tokens for one in ranks)
        self.sent_bytes += sum(one.bytes for one in ranks)
        self.imbalance = {
            "compute": _imbalance([one.pairs for one in ranks]),
            "tokens": _imbalance([one.tokens for one in ranks]),
        }

    def told(self) -> dict[str, Any]:
        """tokens_per_s: of all ranks, in passes, over microbatches that the trainer is done with."""
        return {
            "iterations": self.iterations,
            "tokens": self.tokens,
            "tokens_per_s": self._given / self._spent_s if self._spent_s else 0.0,
            "waited_s": self.waited_s,
            "sent_bytes_per_layer": self.sent_bytes // max(self.iterations, 1),
            "imbalance": dict(self.imbalance),
        }


def _pairs(handle: PlanHandle) -> float:
    header, programs = handle.slice.header, handle.slice.programs
    return sum(float(pairs(programs[kind, "forward"], header)[0]) for kind in header.kinds)


def _imbalance(values: Sequence[float]) -> float:
    mean = sum(values) / len(values)
    return max(values) / mean - 1.0 if mean else 0.0


def as_bits(values: Sequence[float]) -> list[int]:
    """float64 as int64."""
    bits: list[int] = np.array(values, np.float64).view(np.int64).tolist()
    return bits


def as_floats(bits: Sequence[int]) -> list[float]:
    """The inverse of `as_bits`."""
    values: list[float] = np.array(bits, np.int64).view(np.float64).tolist()
    return values

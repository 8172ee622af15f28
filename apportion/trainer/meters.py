"""What a loader counts, and tells when it is asked."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from apportion.backends.torch.handle import PlanHandle
from apportion.ir.pairs import pairs
from apportion.trainer.rows import Rows


class Facts(NamedTuple):
    """What ranks tell each other of an iteration, all microbatches together: labels and their weight, tokens, pairs of
    (query, key) over heads that a layer of each kind computes forward, bytes that it sends."""

    valid: int
    weight: float
    tokens: int
    pairs: float
    bytes: int

    @staticmethod
    def of(handles: Sequence[PlanHandle], rows: Sequence[Rows], device: Any) -> Facts:
        """This rank's."""
        return Facts(
            sum(one.valid for one in rows),
            sum(one.weight for one in rows),
            sum(handle.rows for handle in handles),
            sum(_pairs(handle) for handle in handles),
            sum(handle.sent_bytes(device) for handle in handles),
        )

    def numbers(self) -> list[int]:
        """As int64, which is what ranks can exchange."""
        return [as_bits(value) if isinstance(value, float) else value for value in self]

    @staticmethod
    def read(numbers: Sequence[int]) -> Facts:
        """The inverse of `numbers`."""
        valid, weight, tokens, work, sent = numbers
        return Facts(valid, as_float(weight), tokens, as_float(work), sent)


#: of a rank that could not read its samples
NOTHING = Facts(-1, 0.0, 0, 0.0, 0)


@dataclass
class Meters:
    """Counts of this process since it began. An imbalance is the busiest rank's share over the mean, less 1."""

    waited_s: float = 0.0
    compiled_s: float = 0.0
    iterations: int = 0
    tokens: int = 0
    sent_bytes: int = 0
    imbalance: dict[str, float] = field(default_factory=lambda: {"compute": 0.0, "tokens": 0.0})
    _begun_s: float | None = None
    _taken_s: float = 0.0

    def begin(self) -> None:
        """A batch is given out: time counts from the first on."""
        self._taken_s = time.monotonic()
        if self._begun_s is None:
            self._begun_s = self._taken_s

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
        """tokens_per_s: of all ranks, from the first batch to the last one given out."""
        spent_s = self._taken_s - (self._taken_s if self._begun_s is None else self._begun_s)
        return {
            "iterations": self.iterations,
            "tokens": self.tokens,
            "tokens_per_s": self.tokens / spent_s if spent_s else 0.0,
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

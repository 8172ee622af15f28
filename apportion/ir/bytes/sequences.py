"""Sequence indexes of the microbatches of an iteration: encoded columns and the id over them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import numpy as np

from apportion.ir.arrays import Ints
from apportion.ir.errors import DecodeError
from apportion.ir.hashing import digest

FORMAT = "apportion.iteration"


MAX_MICROBATCHES = 4096


_INDEX = np.dtype("<u4")


def iteration_id(plans: Iterable[bytes], indexes: Iterable[Ints], deferred: Ints) -> bytes:
    """Computes the id of an iteration plan from its microbatches' ids and sequences and the deferred sequences."""
    leaves = [part for plan, seqs in zip(plans, indexes, strict=True) for part in (plan, digest(pack(seqs)))]
    return digest(b"".join([FORMAT.encode(), b"\0", *leaves, digest(pack(deferred))]))


def consecutive(counts: Iterable[int]) -> tuple[Ints, ...]:
    """Sequence indexes of microbatches with `counts` consecutive sequences each."""
    bounds = np.cumsum([0, *counts]).tolist()
    return tuple(np.arange(*pair) for pair in pairwise(bounds))


def pack(column: Ints) -> bytes:
    """Encodes a column: 4 bytes per number, little endian."""
    return column.astype(_INDEX).tobytes()


def unpack(data: bytes) -> Ints:
    """Decodes a column to int64. Raises DecodeError."""
    if len(data) % _INDEX.itemsize:
        raise DecodeError(
            f"iteration: a column of {len(data)} bytes, expected {_INDEX.itemsize} for each sequence"
        )
    return np.frombuffer(data, _INDEX).astype(np.int64)

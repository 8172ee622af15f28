"""Mask specs defined by a rule over positions: causal, windows, chunks, prefixes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from apportion.ir.arrays import Ints
from apportion.ir.fields import integer, keep
from apportion.ir.masks.bands import INF, MAX_TOKENS
from apportion.ir.masks.spec import CAUSAL, FULL, Diagonal, Diagonals, Gridded, Row, Uniform


@dataclass(frozen=True)
class Causal(Diagonal):
    """j <= i."""

    def diagonals(self) -> Diagonals:
        return (CAUSAL,)


@dataclass(frozen=True)
class Full(Diagonal):
    """Every pair of the sequence."""

    def diagonals(self) -> Diagonals:
        return (FULL,)


@dataclass(frozen=True)
class SlidingWindow(Diagonal):
    """i - window < j <= i + right: `window` keys up to and including the token itself, and `right` keys after it.

    (flash-attn's `window_size=(w - 1, 0)` is `sliding_window(w)`.)
    """

    window: int
    right: int = 0

    def __post_init__(self) -> None:
        keep(self, "sliding_window.window", integer, 1, MAX_TOKENS)
        keep(self, "sliding_window.right", integer, 0, MAX_TOKENS)

    def diagonals(self) -> Diagonals:
        return ((-self.right, self.window - 1),)


@dataclass(frozen=True)
class SinkWindow(Uniform):
    """j <= i and (j < sink or j > i - window): the first tokens and the most recent ones."""

    sink: int
    window: int

    def __post_init__(self) -> None:
        keep(self, "sink_window.sink", integer, 0, MAX_TOKENS)
        keep(self, "sink_window.window", integer, 1, MAX_TOKENS)

    def rows(self, lengths: Ints) -> tuple[Row, ...]:
        sink = np.minimum(self.sink, lengths)
        return (0, lengths, 0, sink, 0, INF), (0, lengths, sink, lengths, 0, self.window - 1)

    def diagonals(self) -> Diagonals:
        recent = (0, self.window - 1)
        return (CAUSAL, recent) if self.sink else (recent,)


@dataclass(frozen=True)
class CausalBlockwise(Uniform):
    """In-context learning: j <= i, and in all but the last `test` blocks also (j < sink * block or
    j >= i - local * block)."""

    block: int
    local: int
    sink: int = 1
    test: int = 1

    def __post_init__(self) -> None:
        keep(self, "causal_blockwise.block", integer, 1, MAX_TOKENS)
        for item in ("local", "sink", "test"):
            keep(self, f"causal_blockwise.{item}", integer, 0, MAX_TOKENS)

    def rows(self, lengths: Ints) -> tuple[Row, ...]:
        test = np.clip(((lengths - 1) // self.block + 1 - self.test) * self.block, 0, lengths)
        sink = np.minimum(self.sink * self.block, test)
        return (
            (0, test, 0, sink, 0, INF),
            (0, test, sink, test, 0, self.local * self.block),
            (test, lengths, 0, lengths, 0, INF),
        )

    def diagonals(self) -> Diagonals:
        local = (0, self.local * self.block)
        return (CAUSAL, local) if self.sink or self.test else (local,)


@dataclass(frozen=True)
class PrefixLM(Uniform):
    """j < prefix or j <= i."""

    prefix: int

    def __post_init__(self) -> None:
        keep(self, "prefix_lm.prefix", integer, 0, MAX_TOKENS)

    def rows(self, lengths: Ints) -> tuple[Row, ...]:
        prefix = np.minimum(self.prefix, lengths)
        return (0, prefix, 0, prefix, -INF, INF), (prefix, lengths, 0, lengths, 0, INF)

    def diagonals(self) -> Diagonals:
        return (FULL, CAUSAL) if self.prefix else (CAUSAL,)


@dataclass(frozen=True)
class BlockCausal(Gridded):
    """Chunks of a video: chunk(j) <= chunk(i), and chunk(j) > chunk(i) - window if there is a window."""

    name: ClassVar[str] = "block_causal"
    chunk: int
    window: int | None = None

    def __post_init__(self) -> None:
        keep(self, "block_causal.chunk", integer, 1, MAX_TOKENS)
        if self.window is not None:
            keep(self, "block_causal.window", integer, 1, MAX_TOKENS)

    def row(self, starts: Ints, stops: Ints) -> Row:
        first = 0 if self.window is None else np.maximum(starts - (self.window - 1) * self.chunk, 0)
        return starts, stops, first, stops, -INF, INF

    def diagonals(self) -> Diagonals:
        return (FULL,)


@dataclass(frozen=True)
class Chunked(Gridded):
    """i // chunk == j // chunk and j <= i, as in Llama 4; the grid restarts in each sequence."""

    name: ClassVar[str] = "chunked"
    chunk: int

    def __post_init__(self) -> None:
        keep(self, "chunked.chunk", integer, 1, MAX_TOKENS)

    def row(self, starts: Ints, stops: Ints) -> Row:
        return starts, stops, starts, stops, 0, INF

    def diagonals(self) -> Diagonals:
        return (CAUSAL,)

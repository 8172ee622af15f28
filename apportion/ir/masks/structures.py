"""Mask specs that list the parts of a sequence: answers, images, nodes, documents, bands, slices."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from apportion.ir.arrays import Ints
from apportion.ir.errors import ConfigError
from apportion.ir.fields import integer, keep
from apportion.ir.masks import bands as algebra
from apportion.ir.masks.bands import INF, MAX_TOKENS
from apportion.ir.masks.spec import (
    CAUSAL,
    FULL,
    Columns,
    Diagonals,
    Mask,
    append_range,
    as_bands,
    check_count,
    check_inner,
    check_inside,
    check_rects,
    check_sum,
    lengths_of,
    lower_runs,
    lower_unlabelled,
    merge_runs,
    read_rows,
    read_table,
)
from apportion.ir.masks.windows import Causal


@dataclass(frozen=True)
class SharedQuestion(Mask):
    """One prompt with several answers: each answer sees the prompt and itself causally and continues the prompt's
    positions."""

    prompt: int
    answers: tuple[int, ...]
    structured: ClassVar[bool] = True

    def __post_init__(self) -> None:
        keep(self, "shared_question.prompt", integer, 1, MAX_TOKENS)
        object.__setattr__(self, "answers", lengths_of("shared_question.answers", self.answers))

    def parts(self) -> int:
        return 1 + len(self.answers)

    def _starts(self) -> Ints:
        return np.cumsum([self.prompt, *self.answers])

    def bands(self, length: int) -> Ints:
        edges, prompt = self._starts(), self.prompt
        start, stop = edges[1:-1], edges[2:]
        head = min(int(edges[min(1, len(self.answers))]), length)  # the prompt and the first answer, merged
        answer_bands = (start, stop, start, stop, 0, INF)
        return as_bands((0, head, 0, head, 0, INF), (start, stop, 0, prompt, -INF, INF), answer_bands)

    def diagonals(self) -> Diagonals:
        return (CAUSAL,)

    def runs(self, length: int) -> Columns:
        answer_starts = self._starts()[1:-1]
        return np.append(0, answer_starts), np.append(0, np.full(len(answer_starts), self.prompt))

    def unlabelled(self, length: int) -> Columns:
        edges = self._starts()
        tokens = (edges if len(self.answers) != 1 else edges[1:]) - 1
        return tokens, np.full(len(tokens), -1)

    def check(self, length: int, field: str) -> None:
        check_sum(field, "prompt and answers", self.prompt + sum(self.answers), length)


@dataclass(frozen=True)
class ImageSpans(Mask):
    """`mask` (default: causal), plus all pairs within each span [start, end): images inside text."""

    spans: tuple[tuple[int, int], ...]
    mask: Mask = field(default_factory=Causal)

    def __post_init__(self) -> None:
        path = "image_spans.spans"
        table = read_table(path, self.spans, 2, "start, end", 0)
        for i, (start, end) in enumerate(table):
            if start >= end or (i and start < table[i - 1][1]):
                raise ConfigError(
                    f"{path}[{i}]", [start, end], "must be ascending and not overlap", "sort the spans"
                )
        object.__setattr__(self, "spans", table)
        check_inner("image_spans.mask", self.mask)

    def parts(self) -> int:
        return len(self.spans) + self.mask.parts()

    def bands(self, length: int) -> Ints:
        edges = np.array([0, *(edge for span in self.spans for edge in span), length])
        text, image = (edges[0::2], edges[1::2]), (edges[1:-1:2], edges[2:-1:2])
        if isinstance(self.mask, Causal):  # an image sees all earlier keys: one band instead of two
            return as_bands((*text, 0, text[1], 0, INF), (*image, 0, image[1], -INF, INF))
        return as_bands(*(part.T for part in self._span_bands(self.mask.bands(length), text, image, length)))

    def diagonals(self) -> Diagonals:
        inner = self.mask.diagonals()
        return (*inner, FULL) if self.spans and FULL not in inner else inner

    def _span_bands(self, inner: Ints, text: Columns, image: Columns, length: int) -> Iterable[Ints]:
        """The inner bands without the pairs inside images, and full bands for those pairs."""
        for start, end in zip(*text, strict=True):
            yield algebra.intersect(inner, [start, end, 0, length])
        for start, end in zip(*image, strict=True):
            yield algebra.intersect(inner, [start, end, 0, start])
            yield algebra.intersect(inner, [start, end, end, length])
            yield np.array([[start, end, start, end, -INF, INF]])

    def check(self, length: int, field: str) -> None:
        if self.spans and self.spans[-1][1] > length:
            rule = f"must end within the sequence ({length} tokens)"
            raise ConfigError(
                f"{field}.image_spans.spans", self.spans[-1], rule, "correct the span or the length"
            )
        self.mask.check(length, f"{field}.image_spans.mask")


@dataclass(frozen=True)
class Tree(Mask):
    """Nodes (parent or -1, length), parents first: a node sees its ancestors fully and itself causally, and
    continues its parent's positions."""

    nodes: tuple[tuple[int, int], ...]
    structured: ClassVar[bool] = True

    def __post_init__(self) -> None:
        table = read_table("tree.nodes", self.nodes, 2, "parent, length", -1)
        if not table:
            raise ConfigError("tree.nodes", table, "must have a node", "write [[-1, length]]")
        for i, (parent, length) in enumerate(table):
            integer(f"tree.nodes[{i}] length", length, 1, MAX_TOKENS)
            if parent >= i:
                raise ConfigError(
                    f"tree.nodes[{i}]",
                    [parent, length],
                    "a parent must come before its node",
                    "reorder the nodes",
                )
        object.__setattr__(self, "nodes", table)

    def parts(self) -> int:
        return len(self.nodes)

    def _columns(self) -> tuple[Ints, Ints, Ints]:
        """(parent, start, stop) of every node."""
        parent, length = np.array(self.nodes).T
        stop = np.cumsum(length)
        return parent, stop - length, stop

    def bands(self, length: int) -> Ints:
        """Bands of the nodes: a node's causal band extends over the ancestors stored just before it; its other
        ancestors get rectangles."""
        _, starts, stops = self._columns()
        bands: list[tuple[int, int, int, int, int, int]] = []
        paths: list[tuple[tuple[int, int], ...]] = []
        for (parent, _), start, stop in zip(self.nodes, starts.tolist(), stops.tolist(), strict=True):
            parent_path = paths[parent] if parent >= 0 else ()
            paths.append(append_range(parent_path, start, stop))
            *ranges, (first, _) = paths[-1]
            bands.append((start, stop, first, stop, 0, INF))
            bands += [(start, stop, low, high, -INF, INF) for low, high in ranges]
            check_count("tree.nodes", len(bands))
        return np.array(bands)

    def diagonals(self) -> Diagonals:
        return (CAUSAL,)

    def _depths(self) -> Ints:
        """Position of each node's first token."""
        depth: list[int] = []
        for parent, _ in self.nodes:
            depth.append(depth[parent] + self.nodes[parent][1] if parent >= 0 else 0)
        return np.array(depth)

    def runs(self, length: int) -> Columns:
        return merge_runs(self._columns()[1], self._depths())

    def unlabelled(self, length: int) -> Columns:
        """A node's last token predicts the first token of its child, if it has exactly one."""
        parent, start, stop = self._columns()
        children = np.bincount(parent[parent >= 0], minlength=len(parent))
        label = np.full(len(parent), -1)
        label[parent[parent >= 0]] = start[parent >= 0]
        label[children != 1] = -1
        return stop - 1, label

    def check(self, length: int, field: str) -> None:
        check_sum(field, "the nodes", int(self._columns()[2][-1]), length)


@dataclass(frozen=True)
class Documents(Mask):
    """A pack: each document sees itself under `mask`; positions restart, and no label crosses documents."""

    lengths: tuple[int, ...]
    mask: Mask = field(default_factory=Causal)
    structured: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", lengths_of("documents.lengths", self.lengths))
        check_inner("documents.mask", self.mask)

    def parts(self) -> int:
        return len(self.lengths) * self.mask.parts()

    def _columns(self) -> Columns:
        """(lengths, starts)."""
        lengths = np.array(self.lengths, np.int64)
        return lengths, np.cumsum(lengths) - lengths

    def bands(self, length: int) -> Ints:
        return self.mask.lower(*self._columns())

    def diagonals(self) -> Diagonals:
        return self.mask.diagonals()

    def runs(self, length: int) -> Columns:
        return lower_runs(self.mask, *self._columns())

    def unlabelled(self, length: int) -> Columns:
        return lower_unlabelled(self.mask, *self._columns())

    def check(self, length: int, field: str) -> None:
        check_sum(field, "the documents", sum(self.lengths), length)
        for document_length in sorted(set(self.lengths)):
            self.mask.check(document_length, f"{field}.documents.mask")


@dataclass(frozen=True)
class Bands(Mask):
    """Raw bands (q0, q1, k0, k1, dmin, dmax); disjoint; diagonals of +-2**62 and beyond are unbounded."""

    rows: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        rows = read_rows("bands.bands", self.rows, 6, "q0, q1, k0, k1, dmin, dmax")
        table = np.array(rows, np.int64).reshape(-1, 6)
        check_rects("bands.bands", table)
        algebra.check_disjoint("bands.bands", table)
        object.__setattr__(self, "rows", tuple(map(tuple, table.tolist())))

    def bands(self, length: int) -> Ints:
        return as_bands(np.array(self.rows, np.int64).reshape(-1, 6).T)

    def diagonals(self) -> Diagonals:
        return algebra.diagonals(self.bands(0))

    def check(self, length: int, field: str) -> None:
        check_inside(f"{field}.bands.bands", self.rows, length)


@dataclass(frozen=True)
class Slices(Mask):
    """Raw slices (q0, q1, k0, k1, type), the type by number or name: 0 FULL, 1 CAUSAL (bottom-right), 2 INVCAUSAL
    (top-left), 3 BICAUSAL (both)."""

    rows: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        numbered = algebra.number_types("slices.slices", self.rows)
        listed = read_rows("slices.slices", numbered, 5, "q0, q1, k0, k1, type")
        table = np.array(listed, np.int64).reshape(-1, 5)
        check_rects("slices.slices", table)
        algebra.check_types("slices.slices", table)
        algebra.check_disjoint("slices.slices", algebra.from_slices(table))
        object.__setattr__(self, "rows", tuple(map(tuple, table.tolist())))

    def bands(self, length: int) -> Ints:
        return as_bands(algebra.from_slices(self.rows).T)

    def diagonals(self) -> Diagonals:
        return algebra.diagonals(self.bands(0))

    def check(self, length: int, field: str) -> None:
        check_inside(f"{field}.slices.slices", self.rows, length)

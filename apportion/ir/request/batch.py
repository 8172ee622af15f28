"""The batch: concatenated sequences on the token axis, and a mask for each attention kind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from apportion.ir.arrays import Floats, Ints, offsets
from apportion.ir.errors import ConfigError, UnknownNameError
from apportion.ir.fields import instances, integer, integers, known, load, sequence, suggestion
from apportion.ir.masks import bands as algebra, specs as masks
from apportion.ir.masks.bands import MAX_DIAGONALS, MAX_TOKENS
from apportion.ir.masks.predecessors import Branches, branches_of, is_ordered, lower_links
from apportion.ir.masks.spec import Diagonal, Mask, expand_runs, lower_runs, lower_unlabelled
from apportion.ir.request.sequences import (
    Kind,
    Sequence,
    check_count,
    check_fit,
    check_lengths,
    checked_indexes,
    kinds_of,
    masks_by_kind,
    own_columns,
    read_homes,
    read_mask,
    read_sequences,
    select_fields,
    select_masks,
    without_default,
)

MAX_BANDS = 50_000_000
_COMPACT_FIELDS = ("lengths", "mask", "home_ranks")


@dataclass(frozen=True, eq=False)
class Batch:
    """Sequences in order; build with the validating `from_` functions.

    lengths: int64 [n], each at least 1. masks: attention kind -> its `Kind`, sorted. home_ranks, own_positions and
    own_labels: fields of single sequences, by sequence index. Raises ConfigError (UnknownNameError for an unknown
    kind).
    """

    lengths: Ints
    masks: Mapping[str, Kind]
    home_ranks: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    own_positions: Mapping[int, Ints] = field(default_factory=dict)
    own_labels: Mapping[int, Ints] = field(default_factory=dict)
    _cache: dict[Any, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "masks", dict(sorted(self.masks.items())))
        check_lengths(self.lengths)
        for kind, kind_masks in self.masks.items():
            check_fit(kind, kind_masks, self.lengths)
        _check_structure(self, lambda spec: spec.structured)
        self.lengths.setflags(write=False)

    # ---- construction

    @staticmethod
    def from_lengths(
        lengths: ArrayLike,
        mask: Mask | Mapping[str, Mask] | None = None,
        home_ranks: Iterable[Iterable[int] | None] | None = None,
    ) -> Batch:
        """Builds a batch of sequences of these lengths, all under `mask`: one spec (default: causal), or {kind: spec}
        for several kinds.

        home_ranks: for each sequence, its allowed home ranks, or None for all.
        """
        array = integers("lengths", lengths, 1, MAX_TOKENS)
        index = np.zeros(len(array), np.int64)
        kinds = {kind: Kind((spec,), index) for kind, spec in masks_by_kind("mask", mask).items()}
        return Batch(array, kinds, read_homes(home_ranks, len(array)))

    @staticmethod
    def from_sequences(sequences: Iterable[Sequence]) -> Batch:
        """Builds a batch of sequences with their own masks, which must all name the same attention kinds."""
        items = list(instances("sequences", sequences, Sequence))
        lengths = integers("lengths", [item.length for item in items], 1, MAX_TOKENS)
        by_kind = [masks_by_kind(f"sequences[{i}].mask", item.mask) for i, item in enumerate(items)]
        return Batch(
            lengths,
            kinds_of(by_kind),
            read_homes([item.home_ranks for item in items], len(items)),
            own_columns("positions", [item.positions for item in items], lengths, 0),
            own_columns("labels", [item.labels for item in items], lengths, -1),
        )

    @staticmethod
    def from_cu_seqlens(cu_seqlens: ArrayLike, mask: Mask | Mapping[str, Mask] | None = None) -> Batch:
        """Builds a batch from cumulative lengths [n + 1], like those of varlen attention kernels."""
        cu = integers("cu_seqlens", cu_seqlens, 0, MAX_TOKENS)
        if len(cu) < 2 or cu[0] != 0:
            raise ConfigError(
                "cu_seqlens", cu.tolist()[:8], "must begin with 0 and have an end", "write [0, n]"
            )
        for i in np.flatnonzero(np.diff(cu) <= 0):
            raise ConfigError(
                f"cu_seqlens[{i + 1}]", int(cu[i + 1]), f"must be more than {cu[i]}", "drop empty sequences"
            )
        return Batch.from_lengths(np.diff(cu), mask)

    @staticmethod
    def from_slices(tokens: int, slices: ArrayLike) -> Batch:
        """Builds a batch of one sequence of `tokens` tokens under raw slices (q0, q1, k0, k1, type), as `masks.slices`
        accepts them."""
        return Batch.from_lengths([integer("tokens", tokens, 1, MAX_TOKENS)], masks.slices(slices))

    @staticmethod
    def from_data(data: Any) -> Batch:
        """Builds a batch from plain data, in either form:

            {"sequences": [{"length": 8192, "mask": {"causal": {}}}, …]}
            {"lengths": [8192, …], "mask": {"causal": {}}}

        A mask may be {kind: mask}; the default is causal. Sequences may have home_ranks, positions and labels; the form
        with lengths may have home_ranks, one entry per sequence.
        """
        known("batch", data, ("sequences", *_COMPACT_FIELDS))
        if "sequences" in data:
            known("batch", data, ("sequences",))
            items = sequence("batch.sequences", data["sequences"])
            check_count(len(items))
            return Batch.from_sequences(read_sequences(items))
        known("batch", data, _COMPACT_FIELDS, ("lengths",))
        return Batch.from_lengths(
            sequence("batch.lengths", data["lengths"]),
            read_mask(data.get("mask"), "batch.mask"),
            data.get("home_ranks"),
        )

    @staticmethod
    def load(path: str | Path) -> Batch:
        """Loads a batch from a JSON or YAML file."""
        return Batch.from_data(load(path))

    def take(self, indexes: ArrayLike) -> Batch:
        """Selects sequences, in the order of `indexes` (distinct integers [m]), with all their fields."""
        selection = checked_indexes(indexes, len(self.lengths))
        return Batch(
            self.lengths[selection],
            {kind: select_masks(kind_masks, selection) for kind, kind_masks in self.masks.items()},
            select_fields(self.home_ranks, selection),
            select_fields(self.own_positions, selection),
            select_fields(self.own_labels, selection),
        )

    def to_data(self) -> dict[str, Any]:
        """Plain data that `from_data` reads; equal batches give equal data.

        Uses the compact form if all sequences share their masks and none has its own positions or labels.
        """
        if not (
            self.own_positions or self.own_labels or any(len(kind.specs) > 1 for kind in self.masks.values())
        ):
            return self._compact_data()
        return {"sequences": [self._sequence_data(i) for i in range(len(self.lengths))]}

    def _compact_data(self) -> dict[str, Any]:
        mask = {kind: masks.to_data(kind_masks.specs[0]) for kind, kind_masks in self.masks.items()}
        data: dict[str, Any] = {"lengths": self.lengths.tolist(), "mask": without_default(mask)}
        if self.home_ranks:
            homes = (self.home_ranks.get(i) for i in range(len(self.lengths)))
            data["home_ranks"] = [None if home is None else list(home) for home in homes]
        return data

    def _sequence_data(self, i: int) -> dict[str, Any]:
        mask = {kind: masks.to_data(item.specs[item.index[i]]) for kind, item in self.masks.items()}
        data: dict[str, Any] = {"length": int(self.lengths[i]), "mask": without_default(mask)}
        if i in self.home_ranks:
            data["home_ranks"] = list(self.home_ranks[i])
        for key, columns in (("positions", self.own_positions), ("labels", self.own_labels)):
            if i in columns:
                data[key] = columns[i].tolist()
        return data

    def __repr__(self) -> str:
        return f"<Batch: {self.tokens} tokens in {len(self.lengths)} sequences>"

    def _repr_html_(self) -> str:
        """HTML for notebooks: number of tokens, sequence lengths, masks."""
        from apportion.ir import cards

        longest = int(self.lengths.max())
        rows = [
            ("tokens", f"{self.tokens:,} in {len(self.lengths):,} sequences"),
            (
                "lengths",
                f"{int(self.lengths.min()):,} to {longest:,}, median {float(np.median(self.lengths)):,.0f}",
            ),
        ]
        for kind, kind_masks in self.masks.items():
            names = sorted({type(spec).__name__ for spec in kind_masks.specs})
            rows.append((f"mask of {kind}", ", ".join(names)))
        return cards.card("Batch", rows, cards.bars("tokens of each sequence, and the mean", self.lengths))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Batch) and self.to_data() == other.to_data()

    def __hash__(self) -> int:
        return hash((self.lengths.tobytes(), self.kinds))

    # ---- the token axis

    @property
    def tokens(self) -> int:
        return int(self.starts[-1])

    @property
    def kinds(self) -> tuple[str, ...]:
        """The attention kinds, sorted: the order of headers, programs and parts."""
        return tuple(self.masks)

    @property
    def starts(self) -> Ints:
        """[n + 1] int64: the first global token of each sequence, and the total number of tokens."""
        return self._cached("starts", lambda: offsets(self.lengths))

    def bands(self, kind: str) -> Ints:
        """[m, 6] int64: the bands of a kind in global tokens, sorted by (q0, k0), read-only."""
        return self._cached(("bands", self._kind(kind)), lambda: self._lower(kind))

    def diagonals(self, kind: str) -> tuple[tuple[int, int], ...]:
        """The distinct (dmin, dmax) declared by the masks of a kind, sorted, whatever the lengths; empty if there are
        more than `MAX_DIAGONALS`."""
        key = "diagonals", self._kind(kind)
        if key not in self._cache:
            specs = self.masks[kind].specs
            result = sorted({diagonal for spec in specs for diagonal in spec.diagonals()})
            self._cache[key] = tuple(result) if len(result) <= MAX_DIAGONALS else ()
        return self._cache[key]  # type: ignore[no-any-return]

    def to_slices(self, kind: str) -> list[tuple[int, ...]]:
        """The mask of a kind as slices (q0, q1, k0, k1, type) in global tokens, as `from_slices` accepts them."""
        return [tuple(row) for row in algebra.to_slices(self.bands(kind)).tolist()]

    def area(self, kind: str) -> int:
        """The number of allowed (query, key) pairs of a kind."""
        return int(algebra.area(self.bands(kind)).sum())

    def positions(self) -> Ints:
        """[tokens] int64: the position id of each global token."""
        return expand_runs(*self._runs(), self.tokens)

    def position_breaks(self) -> Ints:
        """[r] int64, ascending: tokens at which a sequence starts or the position is not the previous one + 1."""
        return self._runs()[0]

    def branches(self) -> Branches:
        """The token order for recurrent layers. Raises ConfigError if a mask defines no order."""
        if "branches" not in self._cache:
            self._cache["branches"] = branches_of(*self._links(), self.tokens)
        return self._cache["branches"]  # type: ignore[no-any-return]

    @property
    def last_position(self) -> int:
        """The largest position id; takes memory independent of the number of tokens."""
        starts, positions = self._runs()
        return int((positions + np.diff(starts, append=self.tokens)).max()) - 1

    def position_at(self, tokens: ArrayLike) -> Ints:
        """int64, shaped like `tokens`: the position ids of global tokens."""
        tokens = np.asarray(tokens)
        tokens = tokens if tokens.size else tokens.astype(np.int64)
        tokens = integers("tokens", tokens.ravel(), 0, self.tokens - 1).reshape(tokens.shape)
        starts, positions = self._runs()
        run = np.searchsorted(starts, tokens, side="right") - 1
        result: Ints = positions[run] + tokens - starts[run]
        return result

    def check_order(self) -> None:
        """Raises ConfigError if one kind divides a sequence into documents or branches, and another's causal mask or
        window lets these see each other."""
        _check_structure(self, is_ordered)

    def labels(self, first: int = 0, stop: int | None = None) -> Ints:
        """[stop - first] int64: the label of each token in [first, stop), a global token or -1; by default of all
        tokens."""
        first = integer("first", first, 0, self.tokens)
        stop = self.tokens if stop is None else integer("stop", stop, first, self.tokens)
        labels = np.arange(first + 1, stop + 1)
        tokens, end_labels = self._end_labels()
        low, high = np.searchsorted(tokens, (first, stop))
        labels[tokens[low:high] - first] = end_labels[low:high]
        for i, sequence_labels in self.own_labels.items():
            start = int(self.starts[i])
            target = slice(max(start, first) - first, max(min(start + len(sequence_labels), stop) - first, 0))
            part = sequence_labels[max(first - start, 0) : max(stop - start, 0)]
            labels[target] = np.where(part < 0, -1, part + start)
        return labels

    def largest_excess(self, rows: Ints, shares: Floats) -> float:
        """Largest relative excess of a rank's rows over its share of all tokens. rows: int64 [ranks]; shares: float64
        [ranks], in tokens. If all sequences have `home_ranks`, all other ranks (attention servers) have share 0."""
        if len(self.home_ranks) == len(self.lengths):
            homes = sorted({rank for ranks in self.home_ranks.values() for rank in ranks})
            rows, shares = rows[homes], shares[homes] * (self.tokens / shares[homes].sum())
        return float((rows / shares).max()) - 1

    @property
    def labelled_tokens(self) -> int:
        """The number of tokens with a label; takes memory independent of the number of tokens."""
        tokens, end_labels = self._end_labels()
        sequence = np.searchsorted(self.starts, tokens, side="right") - 1
        missing = int(((end_labels < 0) & ~np.isin(sequence, list(self.own_labels))).sum())
        return self.tokens - missing - sum(int((labels < 0).sum()) for labels in self.own_labels.values())

    def _end_labels(self) -> tuple[Ints, Ints]:
        """(tokens, labels) of the tokens whose label, according to the masks, is not the next token; ascending."""
        tokens, labels = self._cached("end_labels", self._make_end_labels)
        return tokens, labels

    def _make_end_labels(self) -> Ints:
        parts = [
            lower_unlabelled(spec, self.lengths[members], self.starts[members])
            for spec, members in self._specs()
        ]
        tokens, labels = (np.concatenate(columns) for columns in zip(*parts, strict=True))
        return np.stack([tokens, labels])[:, np.argsort(tokens)]

    # ---- lowering

    def _cached(self, key: Any, make: Any) -> Ints:
        if key not in self._cache:
            self._cache[key] = make()
            self._cache[key].setflags(write=False)
        return self._cache[key]  # type: ignore[no-any-return]

    def _kind(self, kind: str) -> str:
        if not isinstance(kind, str) or kind not in self.masks:
            rule = "unknown attention kind of this batch"
            raise UnknownNameError("kind", kind, rule, suggestion(str(kind), self.kinds))
        return kind

    def _lower(self, kind: str) -> Ints:
        parts, count = [], 0
        for spec, members in self.masks[kind].groups():
            parts.append(spec.lower(self.lengths[members], self.starts[members]))
            count += len(parts[-1])
            if count > MAX_BANDS:
                raise ConfigError(
                    f"mask of {kind}", count, f"makes more than {MAX_BANDS} bands", "split the batch"
                )
        bands = parts[0] if len(parts) == 1 else np.concatenate(parts)
        if len(parts) == 1 and isinstance(self.masks[kind].specs[0], Diagonal):
            return bands  # one band per sequence, in order
        return bands[np.lexsort((bands[:, 2], bands[:, 0]))]

    def _specs(self) -> Iterable[tuple[Mask, Ints]]:
        """(spec, sequences) pairs: the spec that defines a sequence's positions and labels, a structured one if any."""
        if len(self.masks) == 1:
            return next(iter(self.masks.values())).groups()
        by_kind = [kind.groups() for kind in self.masks.values()]
        assigned = np.zeros(len(self.lengths), np.bool_)
        pairs: list[tuple[Mask, Ints]] = []
        for spec, members in (group for groups in by_kind for group in groups):
            if spec.structured:
                pairs.append((spec, members[~assigned[members]]))
                assigned[members] = True
        return [*pairs, (masks.causal(), np.flatnonzero(~assigned))]

    def _runs(self) -> tuple[Ints, Ints]:
        starts, positions = self._cached("runs", lambda: np.stack(self._make_runs()))
        return starts, positions

    def _make_runs(self) -> tuple[Ints, Ints]:
        parts = [
            lower_runs(spec, self.lengths[members], self.starts[members]) for spec, members in self._specs()
        ]
        starts, positions = (np.concatenate(column) for column in zip(*parts, strict=True))
        if self.own_positions:
            starts, positions = self._with_own_positions(starts, positions)
        order = np.argsort(starts, kind="stable")
        return starts[order], positions[order]

    def _links(self) -> tuple[Ints, Ints]:
        """(tokens, predecessors) of tokens that do not follow the previous one. Raises ConfigError."""
        groups = [(kind, *group) for kind, kind_masks in self.masks.items() for group in kind_masks.groups()]
        for kind, spec, _ in groups:
            if not is_ordered(spec):
                rule = "defines no token order for the model's recurrent layers"
                remedy = "use causal masks, windows, documents or trees, or a model without recurrent layers"
                raise ConfigError(f"mask of {kind}", type(spec).__name__, rule, remedy)
        links = self._lower_links(self._specs())
        structured = [(kind, spec, members) for kind, spec, members in groups if spec.structured]
        for kind, spec, members in structured if len(self.masks) > 1 else ():
            is_member = np.isin(np.searchsorted(self.starts, links[0], side="right") - 1, members)
            if not np.array_equal(links[:, is_member], self._lower_links([(spec, members)])):
                rule = "attention kinds disagree on the token order"
                remedy = "use the same tree in all kinds"
                raise ConfigError(f"mask of {kind}", type(spec).__name__, rule, remedy)
        return links[0], links[1]

    def _lower_links(self, groups: Iterable[tuple[Mask, Ints]]) -> Ints:
        """int64 [2, links]: tokens and predecessors, sorted by token."""
        parts = [lower_links(spec, self.lengths[members], self.starts[members]) for spec, members in groups]
        links = np.concatenate([np.stack(part) for part in parts], axis=1)
        return links[:, np.argsort(links[0], kind="stable")]

    def _with_own_positions(self, starts: Ints, positions: Ints) -> tuple[Ints, Ints]:
        sequences = np.array(sorted(self.own_positions))
        is_kept = ~np.isin(np.searchsorted(self.starts, starts, side="right") - 1, sequences)
        breaks = {i: np.append(0, np.flatnonzero(np.diff(self.own_positions[i]) != 1) + 1) for i in sequences}
        return (
            np.concatenate([starts[is_kept], *(self.starts[i] + breaks[i] for i in sequences)]),
            np.concatenate([positions[is_kept], *(self.own_positions[i][breaks[i]] for i in sequences)]),
        )


def _check_structure(batch: Batch, is_compared: Callable[[Mask], bool]) -> None:
    """Checks that the compared masks of a sequence agree on its positions and labels, unless it has its own."""
    kinds = list(batch.masks.values())
    if len(kinds) < 2 or not any(spec.structured for kind in kinds for spec in kind.specs):
        return
    has_own = np.zeros((2, len(batch.lengths)), np.int64)
    has_own[0, list(batch.own_positions)] = has_own[1, list(batch.own_labels)] = 1
    signatures = np.column_stack([batch.lengths, *has_own, *(kind.index for kind in kinds)])
    # one sequence per combination of specs
    for i in sorted(np.unique(signatures, axis=0, return_index=True)[1].tolist()):
        specs, length = [kind.specs[kind.index[i]] for kind in kinds], int(batch.lengths[i])
        compared = [*filter(is_compared, specs)]
        for label, columns, describe in (
            ("positions", batch.own_positions, _positions),
            ("labels", batch.own_labels, _labels),
        ):
            if i not in columns and len({describe(spec, length) for spec in compared}) > 1:
                remedy = f"use the same documents or tree in all kinds, or give the sequence its own {label}"
                raise ConfigError(
                    f"sequences[{i}].mask", batch.kinds, f"attention kinds disagree on {label}", remedy
                )


def _positions(spec: Mask, length: int) -> tuple[bytes, ...]:
    return tuple(column.tobytes() for column in spec.runs(length))


def _labels(spec: Mask, length: int) -> tuple[bytes, ...]:
    tokens, labels = spec.unlabelled(length)
    mismatch = labels != tokens + 1
    return tokens[mismatch].tobytes(), labels[mismatch].tobytes()

"""Sequences of a batch and masks of an attention kind: parsing and validation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from apportion.ir.arrays import Ints
from apportion.ir.errors import ConfigError
from apportion.ir.fields import integer, integers, known, name, sequence
from apportion.ir.isa import MAX_RANKS
from apportion.ir.masks import specs as masks
from apportion.ir.masks.bands import MAX_TOKENS
from apportion.ir.masks.spec import MAX_PARTS, Mask

T = TypeVar("T")

DEFAULT_KIND = "default"
MAX_SEQUENCES = 10_000_000
MAX_KINDS = 64

_SEQUENCE_FIELDS = ("length", "mask", "home_ranks", "positions", "labels")


@dataclass(frozen=True)
class Sequence:
    """One training sample.

    mask: a spec, or {kind: spec}. home_ranks: its allowed home ranks. positions, labels: one per token; a label is the
    local index of the token to predict, or -1. The mask provides the defaults.
    """

    length: int
    mask: Mask | Mapping[str, Mask] = field(default_factory=masks.causal)
    home_ranks: tuple[int, ...] | None = None
    positions: ArrayLike | None = None
    labels: ArrayLike | None = None


@dataclass(frozen=True, eq=False)
class Kind:
    """The masks of one attention kind: distinct specs, and the index of each sequence's spec, int64 [n]."""

    specs: tuple[Mask, ...]
    index: Ints

    def groups(self) -> Iterable[tuple[Mask, Ints]]:
        """Yields (spec, indexes of its sequences) for each spec."""
        if len(self.specs) == 1:
            yield self.specs[0], np.arange(len(self.index))
            return
        order = np.argsort(self.index, kind="stable")
        bounds = np.searchsorted(self.index[order], np.arange(len(self.specs) + 1))
        for spec, low, high in zip(self.specs, bounds[:-1], bounds[1:], strict=True):
            yield spec, order[low:high]


def check_count(count: int) -> None:
    if not 1 <= count <= MAX_SEQUENCES:
        raise ConfigError(
            "sequences", count, f"must be 1 to {MAX_SEQUENCES}", "give at least one, or split the batch"
        )


def check_lengths(lengths: Ints) -> None:
    check_count(len(lengths))
    if lengths.sum() > MAX_TOKENS:
        raise ConfigError(
            "lengths", int(lengths.sum()), f"must add up to at most {MAX_TOKENS}", "split the batch"
        )


def check_fit(kind: str, kind_masks: Kind, lengths: Ints) -> None:
    """Checks, before anything is built, that all specs together make at most `MAX_PARTS` parts, and that each fits its
    sequences (checked once for each spec and length)."""
    parts = 0
    for spec, members in kind_masks.groups():
        parts += spec.parts() * len(members) if spec.parts() > 1 else 0
        if parts > MAX_PARTS:
            path = "mask" if kind == DEFAULT_KIND else f"mask.{kind}"
            rule = f"must have at most {MAX_PARTS} documents, nodes, answers and spans in total"
            raise ConfigError(path, parts, rule, "split the batch, or use coarser parts")
        if type(spec).check is Mask.check:
            continue
        distinct, first = np.unique(lengths[members], return_index=True)
        for length, i in sorted(
            zip(distinct.tolist(), members[first].tolist(), strict=True), key=itemgetter(1)
        ):
            spec.check(length, f"sequences[{i}].mask" + ("" if kind == DEFAULT_KIND else f".{kind}"))


def masks_by_kind(path: str, mask: Any) -> dict[str, Mask]:
    if mask is None:
        return {DEFAULT_KIND: masks.causal()}
    if isinstance(mask, Mask):
        return {DEFAULT_KIND: mask}
    if not isinstance(mask, Mapping) or not 1 <= len(mask) <= MAX_KINDS:
        raise ConfigError(path, mask, "must be a mask or {kind: mask}", "write masks.causal()")
    for kind, spec in mask.items():
        if not isinstance(spec, Mask):
            raise ConfigError(f"{path}.{kind}", spec, "must be a mask", "write masks.causal()")
    return {name(path, kind): spec for kind, spec in mask.items()}


def kinds_of(by_kind: list[dict[str, Mask]]) -> dict[str, Kind]:
    check_count(len(by_kind))
    kinds = list(by_kind[0])
    for i, mask in enumerate(by_kind):
        if mask.keys() != by_kind[0].keys():
            rule = f"must name the attention kinds of the first sequence, {', '.join(kinds)}"
            raise ConfigError(
                f"sequences[{i}].mask", list(mask), rule, "give every sequence a mask for each kind"
            )
    return {kind: _kind_of([mask[kind] for mask in by_kind]) for kind in kinds}


def _kind_of(specs: list[Mask]) -> Kind:
    number = {spec: i for i, spec in enumerate(dict.fromkeys(specs))}
    return Kind(tuple(number), np.array([number[spec] for spec in specs]))


def read_homes(home_ranks: Any, count: int) -> dict[int, tuple[int, ...]]:
    if home_ranks is None:
        return {}
    entries = sequence("home_ranks", home_ranks)
    if len(entries) != count:
        raise ConfigError(
            "home_ranks", len(entries), f"must have one entry per sequence ({count})", "use null for any rank"
        )
    return {i: _home(f"home_ranks[{i}]", ranks) for i, ranks in enumerate(entries) if ranks is not None}


def _home(path: str, ranks: Any) -> tuple[int, ...]:
    home = tuple(integers(path, ranks, 0, MAX_RANKS - 1).tolist())
    if not home or len(set(home)) != len(home):
        raise ConfigError(
            path, home, "must name at least one rank, without duplicates", "write null where any rank will do"
        )
    return home


def checked_indexes(indexes: ArrayLike, count: int) -> Ints:
    """Validates distinct indexes of `count` sequences."""
    result = integers("indexes", indexes, 0, count - 1)
    if len(np.unique(result)) < len(result):
        values, times = np.unique(result, return_counts=True)
        raise ConfigError(
            "indexes", int(values[times.argmax()]), "occurs more than once", "name each sequence once"
        )
    return result


def select_masks(kind_masks: Kind, indexes: Ints) -> Kind:
    """Masks of selected sequences, without unused specs."""
    specs, index = np.unique(kind_masks.index[indexes], return_inverse=True)
    return Kind(tuple(kind_masks.specs[spec] for spec in specs), index)


def select_fields(values: Mapping[int, T], indexes: Ints) -> dict[int, T]:
    """A field of the selected sequences that have it, by their new indexes."""
    if not values:
        return {}
    return {position: values[i] for position, i in enumerate(indexes.tolist()) if i in values}


def own_columns(label: str, columns: list[Any], lengths: Ints, low: int) -> dict[int, Ints]:
    """Positions or labels of the sequences that provide them, by index."""
    result = {}
    for i, column in enumerate(columns):
        if column is not None:
            path, length = f"sequences[{i}].{label}", int(lengths[i])
            result[i] = integers(path, column, low, length - 1 if label == "labels" else MAX_TOKENS)
            if len(result[i]) != length:
                raise ConfigError(
                    path, len(result[i]), f"must have one per token ({length})", "correct the list"
                )
    return result


def read_sequences(items: Iterable[Any]) -> Iterable[Sequence]:
    for i, item in enumerate(items):
        path = f"sequences[{i}]"
        data = dict(known(path, item, _SEQUENCE_FIELDS, ("length",)))
        length = integer(f"{path}.length", data.pop("length"), 1, MAX_TOKENS)
        mask = read_mask(data.pop("mask", None), f"{path}.mask")
        yield Sequence(length, mask, **data)


def read_mask(data: Any, path: str) -> Mask | dict[str, Mask]:
    if data is None:
        return masks.causal()
    if isinstance(data, Mapping) and data and all(map(masks.is_data, data.values())):
        return {kind: masks.from_data(mask, f"{path}.{kind}") for kind, mask in data.items()}
    return masks.from_data(data, path)


def without_default(mask: dict[str, Any]) -> dict[str, Any]:
    """The mask itself if its only kind is the default one."""
    return mask[DEFAULT_KIND] if tuple(mask) == (DEFAULT_KIND,) else mask

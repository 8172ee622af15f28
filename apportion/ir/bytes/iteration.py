"""The plans of one training iteration: its microbatches and the deferred sequences.

    IterationPlan ── plans      one per microbatch, all of the same cluster, model and policy
                  ├─ indexes    which sequences of the iteration's batch each microbatch has
                  ├─ deferred   sequences of no microbatch; the caller passes them again in the next iteration
                  └─ id = H(magic · per microbatch (id · H(indexes)) · H(deferred))

All ranks have the same number of microbatches. A rank without tokens of a microbatch has no rows in that microbatch's
layouts, and its programs only serve other ranks. `schemas/FORMAT.md` describes the bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any

import msgspec
import numpy as np

from apportion.ir.arrays import Ints
from apportion.ir.bytes import slices, wire
from apportion.ir.bytes.codec import Plan, decode
from apportion.ir.bytes.iteration_slice import IterationSlice, encode_slice
from apportion.ir.bytes.sections import check_stored_id
from apportion.ir.bytes.sequences import FORMAT, MAX_MICROBATCHES, iteration_id, pack, unpack
from apportion.ir.bytes.slices import Slice
from apportion.ir.errors import ConfigError, DecodeError
from apportion.ir.fields import integers
from apportion.ir.plan.tables import Request

#: figures that `report` sums over the microbatches
SUMS = ("tokens", "area", "bytes", "slots", "max_degree", "rounds", "plan_bytes")
#: figures of which `report` takes the maximum
MAXIMA = ("imbalance", "imbalance_bound", "heaviest_piece_over_mean")


class IterationWire(wire.Version):
    """Wire form of an iteration plan; each of `plans` is an encoded plan; `indexes` and `deferred` are columns."""

    plans: Annotated[list[bytes], msgspec.Meta(max_length=MAX_MICROBATCHES)]
    indexes: Annotated[list[bytes], msgspec.Meta(max_length=MAX_MICROBATCHES)]
    deferred: bytes
    id: bytes


@dataclass(frozen=True, eq=False)
class IterationPlan:
    """The plans of an iteration's microbatches, in execution order.

    plans: 1 to 4096; their requests differ only in the batch. indexes: int64 arrays, the indexes of each microbatch's
    sequences in the iteration's batch. deferred: int64, ascending, sequences left to a later iteration. Each sequence
    of the batch is in one of these arrays. Equal iteration plans have equal ids. Raises ConfigError.
    """

    plans: tuple[Plan, ...]
    indexes: tuple[Ints, ...]
    deferred: Ints = field(default_factory=lambda: np.zeros(0, np.int64))

    def __post_init__(self) -> None:
        object.__setattr__(self, "plans", tuple(self.plans))
        _check_plans(self.plans, len(self.indexes))
        object.__setattr__(
            self, "indexes", tuple(_column(f"indexes[{i}]", column) for i, column in enumerate(self.indexes))
        )
        object.__setattr__(self, "deferred", _column("deferred", self.deferred))
        _check_sequences(self)

    def __repr__(self) -> str:
        summary = f"{len(self.plans)} microbatch{'es' * (len(self.plans) > 1)} on {self.ranks} ranks"
        return f"<IterationPlan: {summary}, {self.id.hex()[:12]}>"

    @property
    def ranks(self) -> int:
        return self.plans[0].header.ranks

    @cached_property
    def id(self) -> bytes:
        """The iteration plan's id: 32 bytes, BLAKE2b over the microbatches' ids and sequences and the deferred
        sequences."""
        return iteration_id([plan.id for plan in self.plans], self.indexes, self.deferred)

    def for_rank(self, rank: int) -> tuple[Slice, ...]:
        """The rank's slice of every microbatch. Raises ConfigError if there is no such rank."""
        return tuple(plan.for_rank(rank) for plan in self.plans)

    def slice_for(self, rank: int) -> IterationSlice:
        """The rank's slice of the iteration, with its proof. Raises ConfigError if there is no such rank."""
        return IterationSlice(self.id, self.for_rank(rank), self.indexes, self.deferred)

    @cached_property
    def report(self) -> dict[str, Any]:
        """Numbers of microbatches, sequences and deferred sequences; sums and maxima, over the microbatches, of figures
        in the plans' reports (`SUMS`, `MAXIMA`); tokens per microbatch; the ids of the plans in hex; and the sums of
        the plans' bounds, which hold for this packing. A gap is None if any microbatch has none.

        Sums of `bytes.max_rank`, `plan_bytes.largest_rank` and the like add up the worst rank of each microbatch: no
        rank has more over the iteration.
        """
        reports = [plan.report for plan in self.plans]
        merged_report: dict[str, Any] = {
            "microbatches": len(self.plans),
            "ranks": self.ranks,
            "sequences": int(sum(map(len, self.indexes))),
            "deferred": len(self.deferred),
            "tokens_of_microbatches": [plan.request.batch.tokens for plan in self.plans],
            "plans": [plan.id.hex() for plan in self.plans],
        }
        for names, merge in ((SUMS, sum), (MAXIMA, max)):
            for name in names:
                value = _merge_figures([report.get(name) for report in reports], merge)
                if value is not None:
                    merged_report[name] = value
        return merged_report | {"bounds": _sum_bounds([report.get("bounds") for report in reports])}

    def encode(self) -> bytes:
        """Encodes the iteration plan: the bytes depend only on its plans and indexes."""
        return wire.encode_struct(
            IterationWire(
                FORMAT,
                max(plan.header.version for plan in self.plans),
                [plan.encode() for plan in self.plans],
                [pack(column) for column in self.indexes],
                pack(self.deferred),
                self.id,
            )
        )

    @staticmethod
    def decode(data: bytes) -> IterationPlan:
        """Decodes an iteration plan. Raises DecodeError (VersionError for an unknown major version)."""
        envelope = wire.read_envelope(data, IterationWire, "iteration", FORMAT)
        if len(envelope.plans) != len(envelope.indexes):
            raise DecodeError(
                f"iteration: {len(envelope.plans)} plans, but {len(envelope.indexes)} columns of indexes"
            )
        columns = [unpack(column) for column in (*envelope.indexes, envelope.deferred)]
        plans = tuple(decode(plan) for plan in envelope.plans)
        actual_id = iteration_id([plan.id for plan in plans], columns[:-1], columns[-1])
        check_stored_id(envelope.id, actual_id, "iteration")
        try:
            return IterationPlan(plans, tuple(columns[:-1]), columns[-1])
        except ConfigError as error:
            raise DecodeError(f"iteration: {error}") from None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IterationPlan) and self.id == other.id

    def __hash__(self) -> int:
        return hash(self.id)


def encode_slices(plan: IterationPlan) -> tuple[bytes, ...]:
    """Every rank's encoded slice, `plan.slice_for(rank).encode()`, without decoding any."""
    columns = zip(*(slices.encode_slices(member, member.sealed()) for member in plan.plans), strict=True)
    return tuple(encode_slice(list(parts), plan.indexes, plan.deferred, plan.id) for parts in columns)


# ---------------------------------------------------------------------------------------------- columns


def _column(name: str, values: Any) -> Ints:
    """Validates a column of indexes: int64, read-only."""
    column = integers(f"iteration.{name}", values, 0, 2**32 - 1).copy()
    column.setflags(write=False)
    return column


# ---------------------------------------------------------------------------------------------- checks


def _check_plans(plans: tuple[Plan, ...], indexes: int) -> None:
    if not 1 <= len(plans) <= MAX_MICROBATCHES or len(plans) != indexes:
        rule = f"must be 1 to {MAX_MICROBATCHES} plans, with as many arrays of indexes ({indexes})"
        raise ConfigError("iteration.plans", len(plans), rule, "give the indexes of each microbatch")
    first = _shared_request(plans[0].request)
    for i, plan in enumerate(plans):
        for name, value in _shared_request(plan.request).items():
            if value != first[name]:
                rule = f"differs from the first microbatch in its {name}"
                remedy = "plan all microbatches of an iteration in the same way"
                raise ConfigError(f"iteration.plans[{i}].{name}", value, rule, remedy)
        if plan.header.kinds != plans[0].header.kinds:
            rule = "has different attention kinds from the first microbatch"
            raise ConfigError(
                f"iteration.plans[{i}]", plan.header.kinds, rule, "give all masks the same kinds"
            )


def _shared_request(request: Request) -> dict[str, Any]:
    """The fields that the requests of all microbatches share. The token cap is left out: if the policy sets none, each
    plan may record its own."""
    policy = replace(request.policy, token_cap=None)
    return {
        "cluster": request.cluster,
        "model": request.model,
        "policy": policy,
        "hardware": request.hardware,
    }


def _check_sequences(iteration: IterationPlan) -> None:
    """Checks that each microbatch has as many sequences as its plan, and that each sequence occurs exactly once."""
    for i, (plan, indexes) in enumerate(zip(iteration.plans, iteration.indexes, strict=True)):
        if len(indexes) != len(plan.request.batch.lengths):
            rule = (
                f"must have an index for each of the {len(plan.request.batch.lengths)} sequences of its plan"
            )
            raise ConfigError(f"iteration.indexes[{i}]", len(indexes), rule, "give the index of each")
    sorted_indexes = np.sort(np.concatenate([*iteration.indexes, iteration.deferred]))
    if not np.array_equal(sorted_indexes, np.arange(len(sorted_indexes))):
        missing = int(np.flatnonzero(sorted_indexes != np.arange(len(sorted_indexes)))[0])
        rule = f"must have every sequence of the batch once: {missing} is missing or duplicated"
        raise ConfigError(
            "iteration.indexes", sorted_indexes[:8].tolist(), rule, "number the sequences from 0"
        )
    if (np.diff(iteration.deferred) < 0).any():
        raise ConfigError("iteration.deferred", iteration.deferred[:8].tolist(), "must ascend", "sort it")


# ---------------------------------------------------------------------------------------------- report


def _merge_figures(values: list[Any], merge: Any) -> Any:
    """Merges one figure over the microbatches, maps key by key; None if the values differ in form or one is missing."""
    if all(isinstance(value, Mapping) for value in values):
        common = [key for key in values[0] if all(key in value for value in values)]
        parts = {key: _merge_figures([value[key] for value in values], merge) for key in common}
        return {key: part for key, part in parts.items() if part is not None}
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        return merge(values)
    return None


def _sum_bounds(values: list[Any]) -> dict[str, dict[str, Any]]:
    """Bounds of the iteration, {name: {"bound", "value", "gap"}}, summed: microbatches run one after another."""
    totals = _merge_figures(values, sum) or {}
    gaps = _merge_figures(values, max) or {}
    return {
        name: total | {"gap": total["value"] / total["bound"] if "gap" in gaps[name] else None}
        for name, total in totals.items()
        if isinstance(total, dict) and total.get("bound") and "value" in total
    }

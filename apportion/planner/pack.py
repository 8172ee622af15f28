"""Packs the sequences of an iteration into microbatches, each of at most the tokens that all ranks together can hold.

sequences     8  3  3  2  6  1  1        in the order of the data, at most 10 tokens per microbatch
sequential  | 8 |3  3  2 |6  1  1|       the same order
balanced    | 8  1 |  6  1  2 |3  3|     longest first, to the microbatch with the least work
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, Protocol

import numpy as np

from apportion.ir.arrays import Bools, Floats, Ints
from apportion.ir.errors import CapacityError, ConfigError
from apportion.ir.tensors import PHASES
from apportion.planner.options import Count
from apportion.planner.problem import MOST_TOKENS, Pass, Problem
from apportion.planner.shard.blocks import row_areas, row_weights
from apportion.planner.solvers.contracts import PartitionProblem
from apportion.planner.solvers.use import PartitionSolver

# A linear layer is one matrix product in forward, and two of the same size in backward.
LINEAR_FORWARDS = 3


@dataclass(frozen=True, eq=False)
class Packing:
    """microbatches: sequence indexes of each, int64, ascending; deferred: int64, ascending, for a later iteration."""

    microbatches: tuple[Ints, ...]
    deferred: Ints


class PackPass(Pass, Protocol):
    """Packs the sequences of an iteration into microbatches."""

    @abstractmethod
    def __call__(self, problem: Problem) -> Packing: ...


@dataclass(frozen=True)
class Sequential(PackPass):
    """Keeps the data order: a new microbatch starts when the next sequence does not fit or, given a number of
    microbatches, the data is cut into that many runs whose longest is as short as possible.

    microbatches: a number, or as few as the cap allows (one if there is no cap). tokens_per_rank: maximum tokens of a
    microbatch, divided by the number of ranks; `policy.token_cap` also applies.
    """

    microbatches: Count | Literal["auto"] = "auto"
    tokens_per_rank: Count | None = None

    def __call__(self, problem: Problem) -> Packing:
        """Raises CapacityError for a sequence longer than a microbatch, or if the sequences do not fit the
        microbatches."""
        batch, room = problem.batch, capacity(problem, self.tokens_per_rank)
        if self.microbatches == "auto":
            starts = _greedy_runs(batch.starts, room)
        else:
            _check_count(len(batch.lengths), self.microbatches)
            starts = _even_runs(batch.starts, self.microbatches)
            _check_room(int(np.diff(batch.starts[starts]).max()), batch.tokens, self.microbatches, room)
        return Packing(tuple(np.arange(*pair) for pair in pairwise(starts)), _no_sequences())


@dataclass(frozen=True)
class Balanced(PackPass):
    """Longest processing time first over the attention work of the sequences, under the cap.

    microbatches, tokens_per_rank: as in `Sequential`. solver: of kind partition.
    """

    microbatches: Count | Literal["auto"] = "auto"
    tokens_per_rank: Count | None = None
    solver: PartitionSolver = PartitionSolver("lpt")

    def __call__(self, problem: Problem) -> Packing:
        """Raises CapacityError for a sequence longer than a microbatch, or if the sequences do not fit the
        microbatches."""
        batch, room = problem.batch, capacity(problem, self.tokens_per_rank)
        pairs = row_weights(problem, batch.starts)
        bins = _assign_microbatches(pairs, batch.lengths, self.microbatches, room, self.solver)
        return Packing(_members(bins, np.arange(len(bins))), _no_sequences())


@dataclass(frozen=True)
class Wlb(PackPass):
    """WLB-LLM's variable-length packing (Wang et al., OSDI 2025, as described by DistCA, sections 3.2 and 7): balances
    the predicted time of attention *and* linear layers, so microbatches have unequal numbers of tokens, up to the cap.
    Times are from the cost model.

    microbatches, tokens_per_rank, solver: as in `Balanced`. defer: delay outliers until there is one for every
    microbatch (WLB-LLM's Algorithm 1). That changes the order of the training data, so DistCA's comparison (section
    6.1) omits it; the deferred sequences are returned, and the caller prepends them to the next iteration's batch.
    outlier_tokens: with `defer`, the length from which a sequence is an outlier; or several ascending lengths, each
    with its own queue.
    """

    microbatches: Count | Literal["auto"] = "auto"
    tokens_per_rank: Count | None = None
    defer: bool = False
    outlier_tokens: Count | tuple[Count, ...] | None = None
    solver: PartitionSolver = PartitionSolver("lpt")

    def __post_init__(self) -> None:
        object.__setattr__(self, "outlier_tokens", _levels(self.defer, self.outlier_tokens))

    def __call__(self, problem: Problem) -> Packing:
        """Raises CapacityError for a sequence longer than a microbatch, or if the sequences do not fit the
        microbatches, and ConfigError for `defer` without a number of microbatches."""
        if self.defer and self.microbatches == "auto":  # a job sets the number after the recipe was parsed
            rule = "must be a number with defer: outliers wait until every microbatch has one"
            raise ConfigError("recipe.pack.wlb.microbatches", self.microbatches, rule, "give the number")
        room, lengths = capacity(problem, self.tokens_per_rank), problem.batch.lengths
        is_deferred = self._deferred(lengths)
        kept = np.flatnonzero(~is_deferred)
        bins = _assign_microbatches(work(problem)[kept], lengths[kept], self.microbatches, room, self.solver)
        return Packing(_members(bins, kept), np.flatnonzero(is_deferred))

    def _deferred(self, lengths: Ints) -> Bools:
        """bool [sequences]: deferred outliers. A multiple of the number of microbatches leaves each queue, first in,
        first out."""
        is_deferred = np.zeros(len(lengths), np.bool_)
        if not isinstance(self.outlier_tokens, tuple) or self.microbatches == "auto":
            return is_deferred
        queue = np.searchsorted(self.outlier_tokens, lengths, side="right")
        for number in range(1, len(self.outlier_tokens) + 1):
            members = np.flatnonzero(queue == number)
            is_deferred[members[len(members) // self.microbatches * self.microbatches :]] = True
        return is_deferred


# ---------------------------------------------------------------------------------------------- capacity and work


def capacity(problem: Problem, tokens_per_rank: int | None) -> int:
    """The maximum tokens of a microbatch. Raises CapacityError for a longer sequence."""
    batch, ranks = problem.batch, problem.ranks
    per_rank = [cap for cap in (problem.policy.token_cap, tokens_per_rank) if cap is not None]
    limit = min([cap * ranks for cap in per_rank] + [MOST_TOKENS])
    longest = int(batch.lengths.argmax())
    size = int(batch.lengths[longest])
    if size > limit:
        raise CapacityError(
            f"sequence {longest} has {size} tokens, but a microbatch holds at most {limit} ({limit // ranks} on "
            f"each of {ranks} ranks): use at least {-(-size // ranks)} tokens per rank, "
            f"{-(-size // max(1, limit // ranks))} ranks, or cut the sequence"
        )
    return limit


def work(problem: Problem) -> Ints:
    """int64 [sequences]: predicted nanoseconds of attention and linear layers on one rank, forward and backward."""
    linear = LINEAR_FORWARDS * problem.cost.linear_us(problem.batch.lengths)
    time = sum(count * (linear + _attention_us(problem, kind)) for kind, count in problem.layers.items())
    nanoseconds: Ints = np.rint(np.asarray(time) * 1e3).astype(np.int64)
    return nanoseconds


def _attention_us(problem: Problem, kind: str) -> Floats:
    """float64 [sequences]: attention time of each as one task."""
    lengths, model = problem.batch.lengths, problem.model
    pairs = np.maximum(row_areas(problem.bands[kind], problem.batch.starts), 1)
    sizes = (lengths, lengths, pairs, model.q_heads, model.kv_heads)
    return sum((problem.cost.attention_us(phase, *sizes) for phase in PHASES), np.zeros(len(lengths)))


# ---------------------------------------------------------------------------------------------- in order


def _greedy_runs(starts: Ints, room: int) -> list[int]:
    """First sequence of each run of up to `room` tokens, and the end."""
    cuts, end = [0], len(starts) - 1
    while cuts[-1] < end:
        cuts.append(int(np.searchsorted(starts, starts[cuts[-1]] + room, "right")) - 1)
    return cuts


def _even_runs(starts: Ints, count: int) -> list[int]:
    """Cuts into `count` non-empty runs whose longest is as short as possible, by bisection over its length."""
    low, high = max(int(np.diff(starts).max()), -(-int(starts[-1]) // count)), int(starts[-1])
    while low < high:
        middle = (low + high) // 2
        if len(_greedy_runs(starts, middle)) - 1 <= count:
            high = middle
        else:
            low = middle + 1
    cuts, end = [0], len(starts) - 1
    for remaining in range(count - 1, -1, -1):
        end_limit = int(np.searchsorted(starts, starts[cuts[-1]] + low, "right")) - 1
        cuts.append(min(end_limit, end - remaining))
    return cuts


# ---------------------------------------------------------------------------------------------- by work


def _assign_microbatches(
    weights: Ints, lengths: Ints, requested: int | Literal["auto"], room: int, solver: PartitionSolver
) -> Ints:
    """int64 [sequences]: the microbatch of each, from the requested number of microbatches or the fewest found."""
    if requested != "auto":
        _check_count(len(lengths), requested)
        bins = _pack(weights, lengths, requested, room, solver)
        if bins is None:
            raise _no_packing_error(int(lengths.sum()), len(lengths), requested, room)
        return bins
    count = max(1, -(-int(lengths.sum()) // room))
    while (bins := _pack(weights, lengths, count, room, solver)) is None:
        count += 1
    return bins


def _pack(weights: Ints, lengths: Ints, count: int, room: int, solver: PartitionSolver) -> Ints | None:
    """Packs by work; if a sequence does not fit, by length. None if that also fails."""
    # sequences without work get a small weight, or all would go to the same microbatch
    bins = solver(PartitionProblem(np.maximum(weights, 1), lengths, np.full(count, room))).bin
    return bins if (bins >= 0).all() else _best_fit(lengths, count, room)


def _best_fit(lengths: Ints, count: int, room: int) -> Ints | None:
    """Best fit decreasing: longest first, to the fullest microbatch with room."""
    free, bins = np.full(count, room, np.int64), np.empty(len(lengths), np.int64)
    for item in np.lexsort((np.arange(len(lengths)), -lengths)).tolist():
        best = int(np.where(free >= lengths[item], free, room + 1).argmin())
        if free[best] < lengths[item]:
            return None
        bins[item], free[best] = best, free[best] - lengths[item]
    return _fill_empty(bins, lengths, count)


def _fill_empty(bins: Ints, lengths: Ints, count: int) -> Ints:
    """Moves the shortest sequence of the microbatch with the most sequences to each empty one."""
    for empty in np.flatnonzero(np.bincount(bins, minlength=count) == 0).tolist():
        members = np.flatnonzero(bins == np.bincount(bins, minlength=count).argmax())
        bins[members[lengths[members].argmin()]] = empty
    return bins


def _members(bins: Ints, sequences: Ints) -> tuple[Ints, ...]:
    """The sequences of each microbatch; microbatches are ordered by their first sequence."""
    number, first = np.unique(bins, return_index=True)
    return tuple(sequences[bins == number[index]] for index in np.argsort(first))


def _no_sequences() -> Ints:
    return np.zeros(0, np.int64)


# ---------------------------------------------------------------------------------------------- checks


def _levels(defer: bool, tokens: int | tuple[int, ...] | None) -> tuple[int, ...] | None:
    """The lengths at which queues of outliers begin, or None if nothing is deferred."""
    field = "recipe.pack.wlb"
    if not defer:
        if tokens is not None:
            raise ConfigError(f"{field}.outlier_tokens", tokens, "requires defer: true", "leave it out")
        return None
    levels = (tokens,) if isinstance(tokens, int) else tokens or ()
    if not levels or list(levels) != sorted(set(levels)):
        raise ConfigError(f"{field}.outlier_tokens", levels, "must be ascending lengths", "write 65536")
    return levels


def _check_count(sequences: int, microbatches: int) -> None:
    if sequences < microbatches:
        raise CapacityError(
            f"{sequences} sequences for {microbatches} microbatches, none of which may be empty: give more sequences "
            "(or defer none) or fewer microbatches"
        )


def _check_room(longest: int, tokens: int, microbatches: int, room: int) -> None:
    if longest > room:
        raise CapacityError(
            f"packing {tokens} tokens in order in {microbatches} microbatches makes one of {longest} or more, above "
            f"the limit of {room}: give more microbatches, more tokens per rank, or pack: balanced, which may reorder"
        )


def _no_packing_error(tokens: int, sequences: int, microbatches: int, room: int) -> CapacityError:
    return CapacityError(
        f"{sequences} sequences of {tokens} tokens: no packing into {microbatches} microbatches of at most {room} "
        f"tokens ({microbatches * room} in total) was found, by work or by length: give more microbatches or more "
        "tokens per rank"
    )

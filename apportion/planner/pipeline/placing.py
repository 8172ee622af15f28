"""Steps `shard` and `place`: from a problem to blocks with homes, over groups of ranks if heads are split."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from apportion.ir.arrays import Ints
from apportion.ir.errors import CapacityError, ConfigError
from apportion.planner.inner.groups import Groups, Ulysses, virtual_problem
from apportion.planner.inner.lone import LoneSequences
from apportion.planner.pipeline.checks import Checks
from apportion.planner.pipeline.steps import Passes
from apportion.planner.pipeline.watch import Stopwatch
from apportion.planner.problem import Departure, Placement, Problem, Shards


@dataclass(frozen=True)
class PlacedProblem:
    """A problem with a home for every block. inner: the problem with `groups` as ranks, without `lone` sequences.
    departures: by the passes so far, from the recipe's request."""

    problem: Problem
    passes: Passes
    groups: Groups
    inner: Problem
    shards: Shards
    placement: Placement
    lone: LoneSequences | None = None
    departures: tuple[Departure, ...] = ()

    def isolated_parts(self) -> list[tuple[int, PlacedProblem]]:
        """(first rank, placement) of parts without transfers between them; a single part with everything if there are
        none."""
        passes = self.passes
        if passes.pods is None or passes.inner is not None or passes.reshuffle:
            return [(0, self)]
        parts = []
        for pod in passes.pods.isolated_parts(self.problem, self.placement):
            part, single = pod.problem, Groups.single(pod.problem.ranks)
            parts.append((pod.first, PlacedProblem(part, passes, single, part, self.shards, pod.placement)))
        return parts or [(0, self)]


def place(problem: Problem, passes: Passes, watch: Stopwatch, threads: int = 1) -> PlacedProblem:
    """Runs the passes up to placement. Raises ConfigError, CapacityError."""
    passes = usable_passes(problem, passes)
    groups, inner, lone = group_ranks(problem, passes)
    checks = Checks(passes)
    if lone is not None and lone.is_all:
        with watch("place"):
            shards, placement = lone.placement(problem)
        return PlacedProblem(problem, passes, groups, inner, shards, placement)
    if passes.pods is not None:
        with watch("place"), in_groups(groups):
            members = int(groups.sizes.max())
            shards, placement = passes.pods(inner, members, passes.shard, passes.place, threads)
    else:
        with watch("shard"):
            shards = passes.shard(inner)
        with watch("place"), in_groups(groups):
            placement = passes.place(inner, shards)
    checks.shards(inner, shards)
    checks.placement(inner, shards, placement)
    if problem.chosen_keys and (placement.execution is not None or placement.groups is not None):
        rule = f"computes away from home or splits heads, but {', '.join(problem.chosen_keys)} choose keys at run time"
        raise ConfigError("recipe.place", type(passes.place).__name__.lower(), rule, "use lpt or blend")
    departures = (*groups.departures, *_without_lone(passes, groups, lone), *placement.departures)
    if placement.groups is not None:
        groups = unequal_groups(passes, placement.groups)
    return PlacedProblem(problem, passes, groups, inner, shards, placement, lone, departures)


def usable_passes(problem: Problem, passes: Passes) -> Passes:
    """The passes, without `inner` if no kind is left whose heads may be split: kinds that choose keys at run time need
    all heads together, and queries at home. Raises ConfigError."""
    if problem.chosen_keys and passes.reshuffle:
        rule = f"moves the queries of {', '.join(problem.chosen_keys)}, which must stay home to choose keys at run time"
        raise ConfigError("recipe.reshuffle", True, rule, "leave `reshuffle` out")
    if problem.chosen_keys and passes.inner is not None and not passes.inner.split_kinds(problem):
        return replace(passes, inner=None)
    return passes


def _without_lone(passes: Passes, groups: Groups, lone: LoneSequences | None) -> list[Departure]:
    """The departure if the recipe requests lone sequences but there are none."""
    inner = passes.inner
    if lone is not None or not groups.split or not isinstance(inner, Ulysses) or inner.lone is None:
        return []
    reason = "ranks would be uneven, or all sequences are too long"
    return [Departure("recipe.inner.ulysses.lone", inner.lone, None, reason)]


def group_ranks(problem: Problem, passes: Passes) -> tuple[Groups, Problem, LoneSequences | None]:
    """The groups of ranks that placement uses as ranks, the problem in terms of groups, and the lone sequences outside
    it. Raises ConfigError, CapacityError."""
    if passes.inner is None:
        return Groups.single(problem.ranks), problem, None
    groups = passes.inner.groups(problem)
    lone = passes.inner.find_lone(problem, groups)
    if passes.reshuffle and groups.split and not splits_all(passes, problem):
        rule = "would leave rows in the loader's layout for kinds whose heads are not split"
        raise ConfigError("recipe.reshuffle", True, rule, "leave `reshuffle` or `inner.ulysses.kinds` out")
    if lone is not None and passes.reshuffle:
        rule = "moves all rows, including lone sequences"
        raise ConfigError("recipe.reshuffle", True, rule, "leave `reshuffle` or `inner.ulysses.lone` out")
    if lone is not None and lone.is_all:
        return Groups.single(problem.ranks), problem, lone
    return groups, virtual_problem(problem, groups, lone), lone


def splits_all(passes: Passes, problem: Problem) -> bool:
    """True if either all attention kinds split their heads, or none does."""
    return passes.inner is None or passes.inner.split_kinds(problem) == set(problem.batch.kinds)


@contextmanager
def in_groups(groups: Groups) -> Iterator[None]:
    """Adds a note to a CapacityError if heads are split: the ranks that it names are then groups."""
    try:
        yield
    except CapacityError as error:
        if not groups.split:
            raise
        raise CapacityError(
            f"{error} (heads are split: each rank here is a group of {groups.sizes[0]}, tokens and caps are per group)"
        ) from error


def unequal_groups(passes: Passes, first: Ints) -> Groups:
    """The groups that a placement made; first: int64 [groups + 1]. Raises ConfigError."""
    if passes.inner is not None:
        rule = "the placement makes its own groups"
        raise ConfigError("recipe.inner", type(passes.inner).__name__.lower(), rule, "leave `inner` out")
    return Groups(first)

"""Has the hot loops compiled that planning, verifying, reading and simulating use, before anybody waits for them.

Small batches under every recipe and every family of masks are taken through all that is done with a plan: numba keeps
what it compiles on disk, so later processes of this installation, on this kind of CPU, only load it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import NamedTuple

from apportion.ir.bytes.iteration import encode_slices
from apportion.ir.bytes.iteration_slice import IterationSlice
from apportion.ir.bytes.job import Job
from apportion.ir.errors import MissingDependencyError
from apportion.ir.loops.jit import COMPILES, compiling
from apportion.ir.masks import specs as masks
from apportion.ir.plan.messages import find_messages
from apportion.ir.request.batch import Batch
from apportion.ir.request.cluster import Cluster
from apportion.ir.request.model import Model
from apportion.ir.request.policy import Policy, Recipe
from apportion.planner.iteration.jobs import plan_job
from apportion.planner.recipe import recipes
from apportion.planner.simulate import simulate

_MODEL = Model(8, 4, 64)
_LENGTHS = [5000, 900, 3000, 200, 1800, 700, 2400, 384]
_SHAPES = {
    "one rank": (Cluster(1, 1), 16384),
    "one node": (Cluster(1, 8), 2048),
    "nodes": (Cluster(2, 4), 2048),
    "long": (Cluster(2, 4), 65536),  # positions that take 32 bits
}


class Case(NamedTuple):
    """An iteration of one microbatch."""

    name: str
    job: Job
    batch: Batch


class Warmed(NamedTuple):
    """loops: that were compiled now; seconds: for that; cases: plans that were made; missing: recipes whose package is
    not here; jit: False where nothing is ever compiled here."""

    loops: int
    seconds: float
    cases: int
    missing: list[str]
    jit: bool


def warm(cases: Sequence[Case], next_is: Callable[[str], object] = str) -> Warmed:
    """Compiles what is not on disk yet. next_is: called after each case with the name of the next, "" at the end."""
    loops, seconds, made, missing = compiling.loops, compiling.seconds, 0, list[str]()
    compiling.told = True  # whoever calls this knows
    for case, following in zip_longest(cases, cases[1:]) if COMPILES else ():
        try:
            through(case)
            made += 1
        except MissingDependencyError:
            missing.append(case.name)
        next_is(following.name if following else "")
    return Warmed(compiling.loops - loops, compiling.seconds - seconds, made, missing, COMPILES)


def cases_of(chosen: Iterable[Recipe]) -> list[Case]:
    """What has all loops compiled that jobs of these recipes use."""
    shapes = [
        Case(shape, _job("fcp", cluster, tokens), _filling(cluster.ranks * tokens))
        for shape, (cluster, tokens) in _SHAPES.items()
    ]
    cut = [
        Case(name, _job("fcp"), Batch.from_lengths([2048, 2048, 4096], mask=mask))
        for name, mask in _masks().items()
    ]
    return [*shapes, *cut, *(Case(own.name, _job(own), Batch.from_lengths(_LENGTHS)) for own in chosen)]


def _job(recipe: str | Recipe, cluster: Cluster = _SHAPES["nodes"][0], tokens: int = 2048) -> Job:
    return Job(cluster, _MODEL, Policy(recipes.find_recipe(recipe)), tokens)


def _filling(tokens: int) -> Batch:
    """Documents that get shorter by halves, all tokens together."""
    halves = [tokens >> power for power in range(1, 6)]
    return Batch.from_lengths([*halves, tokens - sum(halves)])


def _masks() -> dict[str, masks.Mask | dict[str, masks.Mask]]:
    return {
        "full": masks.full(),
        "sliding_window": masks.sliding_window(512),
        "chunked": masks.chunked(1024),
        "kinds": {"full_attention": masks.causal(), "sliding_attention": masks.sliding_window(512)},
    }


def through(case: Case) -> None:
    """All that is done with a plan: made and checked, sent and read, executed, simulated."""
    planned = plan_job(case.job, [case.batch])
    bodies = encode_slices(planned)
    for piece in IterationSlice.decode(bodies[0]).slices:
        for programs in piece.programs.values():
            find_messages(programs, piece.header)
    simulate(planned.plans[0])

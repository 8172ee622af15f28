"""UPipe: computes a group's heads in stages, so that only the heads of one stage exist at once (UPipe, sections 3.3
and 4.1).

    16 query heads, 4 KV heads, 4 ranks, 4 query heads per stage         rank    0        1        2        3
    order gqa: every KV head is received once                 stage 0    q0  k0   q4  k1   q8  k2   q12 k3
    and stays for the stages of its query heads              stage 1    q1       q5       q9       q13
                                                             stage 2    q2       q6       q10      q14  ..
    order natural                                            stage 0    q0  k0   q1  k0   q2  k0   q3  k0
                                                             stage 1    q4  k1   q5  k1   q6  k1   q7  k1   ..

Stages refer to heads by number, so in either order no weights are permuted.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import gcd
from typing import ClassVar, Literal

import numpy as np

from apportion.ir.arrays import Ints, offsets
from apportion.ir.errors import ConfigError
from apportion.ir.request.model import Model
from apportion.planner.inner.groups import Groups, HeadSets, HeadStages, Ulysses
from apportion.planner.options import Count
from apportion.planner.problem import Problem

Heads = tuple[int, ...]


@dataclass(frozen=True)
class UPipe(Ulysses):
    """Groups of `degree` consecutive ranks (as in Ulysses) that compute `heads` query heads at a time.

    heads: the paper's U, a multiple of the degree that divides the query heads; "auto": the degree, the least memory.
    order: assignment of heads to stages. "gqa": as many KV heads as possible, which stay for all stages that need them;
    "natural": heads by number. keep: number of consecutive stages for which a rank keeps its KV heads; "auto": as long
    as no rank needs others. project: True if the program takes hidden states and computes the heads of each stage
    itself, forward and again backward; else q, k and v are home rows. ahead: 1 exchanges the rows of the next stage
    during each stage, with one more arena; 0 as in the paper. hold: True if tiles of other groups stay as long as the
    KV heads, and travel once; else every stage fetches its own.
    """

    name: ClassVar[str] = "upipe"

    heads: Count | Literal["auto"] = "auto"
    order: Literal["gqa", "natural"] = "gqa"
    keep: Count | Literal["auto"] = "auto"
    project: bool = False
    ahead: Literal[0, 1] = 0
    hold: bool = False

    def __post_init__(self) -> None:
        use = "use inner ulysses"
        for name, default, rule, remedy in (
            ("overlap", False, "rows of whole stages are exchanged", "use ahead: 1"),
            ("lone", None, "all sequences are computed in stages of heads", use),
            ("kinds", "all", "all kinds are computed in stages of heads", use),
        ):
            if getattr(self, name) != default:
                raise ConfigError(self._field(name), getattr(self, name), rule, remedy)

    def split_kinds(self, problem: Problem) -> frozenset[str]:
        """All kinds, or none. Raises ConfigError."""
        kinds = super().split_kinds(problem)
        if kinds and problem.chosen_keys:
            rule = "computes heads in stages, but kinds that choose keys at run time need all heads at once"
            raise ConfigError("recipe.inner", self.name, rule, "use inner ulysses")
        return kinds

    def head_sets(self, model: Model, groups: Groups) -> HeadSets:
        """The heads of each rank by stage; as in Ulysses if a single stage has all heads and nothing is projected.
        Raises ConfigError."""
        stages = self.stages(model, int(groups.sizes[0]))
        is_single = len(stages) == 1 and not self.project
        return super().head_sets(model, groups) if is_single else stages.totals(groups)

    def stages(self, model: Model, degree: int) -> HeadStages:
        """The heads of the ranks of a group in each stage. Raises ConfigError."""
        stage_heads = stage_lists(model, self._heads(model, degree), self.order)
        shares = [shares_of(heads, degree) for heads in stage_heads]
        queries_per_key = model.q_heads // model.kv_heads
        keys = [[keys_of(heads, queries_per_key) for heads in stage] for stage in shares]
        return HeadStages.of(shares, *_windows(keys, self.keep), self.project, self.ahead, self.hold)

    def _heads(self, model: Model, degree: int) -> int:
        heads = degree if self.heads == "auto" else self.heads
        if heads % degree or model.q_heads % heads:
            divisors = [n for n in range(degree, model.q_heads + 1, degree) if model.q_heads % n == 0]
            rule = f"must be a multiple of the degree ({degree}) and divide the {model.q_heads} query heads"
            raise ConfigError(self._field("heads"), heads, rule, f"use {', '.join(map(str, divisors))}")
        return heads


def stage_lists(model: Model, heads: int, order: str) -> list[Heads]:
    """The query heads of each stage, `heads` of them, in the order of the ranks.

    gqa (section 4.1; Figure 4 has heads = ranks): a stage has gcd(heads, KV heads) KV heads, the maximum for equal
    stages, and the same number of query heads of each; stages with the same KV heads are consecutive.
    """
    ratio, firsts = model.q_heads // model.kv_heads, range(0, model.q_heads, heads)
    if order == "natural":
        return [tuple(range(first, first + heads)) for first in firsts]
    key_count = gcd(heads, model.kv_heads)
    queries = heads // key_count
    return [
        tuple(key * ratio + first + i for key in range(start, start + key_count) for i in range(queries))
        for start in range(0, model.kv_heads, key_count)
        for first in range(0, ratio, queries)
    ]


def shares_of(heads: Heads, degree: int) -> list[Heads]:
    """Splits a stage's heads into equal parts, in order: one for each rank of a group."""
    size = len(heads) // degree
    return [heads[index * size : (index + 1) * size] for index in range(degree)]


def keys_of(heads: Heads, queries_per_key: int) -> Heads:
    """The KV heads used by some query heads, ascending."""
    return tuple(sorted({head // queries_per_key for head in heads}))


def _windows(keys: list[list[Heads]], keep: int | Literal["auto"]) -> tuple[Ints, list[list[Heads]]]:
    """int64 [stages]: the window of each stage, and the KV heads of each rank of a group in each window.

    keys: for each stage, the KV heads that each rank needs.
    """
    if keep == "auto":
        is_change = [previous != current for previous, current in pairwise(keys)]
        window = offsets(is_change)
    else:
        window = np.arange(len(keys)) // keep
    window_heads = [
        [tuple(sorted(set().union(*heads))) for heads in zip(*_stages_of(keys, window, index), strict=True)]
        for index in range(int(window[-1]) + 1)
    ]
    return window, window_heads


def _stages_of(keys: list[list[Heads]], window: Ints, index: int) -> list[list[Heads]]:
    return [keys[stage] for stage in np.flatnonzero(window == index).tolist()]

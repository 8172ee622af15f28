"""The 31 real mask instances: each plan verifies and matches plain attention.

Instances up to 16K tokens are compared in full; larger ones in windows of query rows around slice edges. Their
gradients are complete because the gradient of the output is zero elsewhere.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from apportion import Batch, Cluster, Model, Plan, plan as make_plan
from apportion.backends import numpy as executor
from apportion.backends.interp import GradTask, Task
from apportion.backends.numpy import Partial
from apportion.planner.recipe.recipes import find_recipe, with_block
from tests.support import oracle

DATA = Path(__file__).parent.parent / "data" / "mask_instances.jsonl.gz"
MODEL = Model(q_heads=1, kv_heads=1, head_dim=4, v_head_dim=4, dtype="fp64", layers=1)
CLUSTER = Cluster(nodes=2, ranks_per_node=4)
WHOLE = 16_384  # tokens up to which all rows are compared
CELLS = 2**24  # limit of (query, key) cells of a window
WORK = 2**42  # limit of cells × tokens of a window
EXACT = 1e-10
ATTEND, ATTEND_GRAD = executor.attend, executor.attend_grad
Array = NDArray[Any]


@dataclass(frozen=True)
class Instance:
    name: str
    tokens: int
    pairs: int
    slices: list[list[int]]

    @cached_property
    def batch(self) -> Batch:
        return Batch.from_slices(self.tokens, [tuple(item) for item in self.slices])

    @cached_property
    def bands(self) -> np.ndarray:
        (kind,) = self.batch.kinds
        return np.asarray(self.batch.bands(kind))

    def windows(self) -> list[tuple[int, int]]:
        """Rows to compare: all, or two windows around slice edges of up to 4K rows, as CELLS and WORK allow."""
        if self.tokens <= WHOLE:
            return [(0, self.tokens)]
        edges = {q0 for q0, *_ in self.slices} | {q1 for _, q1, *_ in self.slices}
        inner = sorted(edges - {0, self.tokens}) or [self.tokens // 2, self.tokens]
        chosen = [inner[len(inner) // 3], inner[(2 * len(inner)) // 3]]
        return _disjoint([self._around(edge) for edge in chosen])

    def _around(self, edge: int) -> tuple[int, int]:
        rows, cells = 4096, min(CELLS, WORK // self.tokens)
        while rows > 8 and rows * self._keys(edge - rows // 2, edge + rows // 2) > cells:
            rows //= 2
        return max(0, edge - rows // 2), min(self.tokens, edge + rows // 2)

    def _keys(self, begin: int, end: int) -> int:
        """An upper bound on the number of keys that a row of [begin, end) sees."""
        q0, q1, k0, k1, dmin, dmax = self.bands.T.astype(float)
        overlaps = (q0 < end) & (q1 > begin)
        return int(np.minimum(k1 - k0, dmax - dmin + 1 + end - begin)[overlaps].sum())


def _disjoint(windows: list[tuple[int, int]]) -> list[tuple[int, int]]:
    first, second = windows
    return windows if first[1] <= second[0] else [first]


def read() -> list[Instance]:
    with gzip.open(DATA, "rt") as lines:
        rows = [json.loads(line) for line in lines]
    return [Instance(row["name"], row["tokens"], row["pairs"], row["slices"]) for row in rows]


INSTANCES = read()
MARKED = [pytest.param(item, marks=pytest.mark.slow) if item.tokens > 2**16 else item for item in INSTANCES]
every_instance = pytest.mark.parametrize("instance", MARKED, ids=[item.name for item in INSTANCES])


def plan_of(instance: Instance) -> Plan:
    """A plan of `fcp`; a million tokens use blocks of 16K, for 2K tasks instead of 131K."""
    fcp = find_recipe("fcp")
    recipe = with_block(fcp, 16_384) if instance.tokens > 2**19 else fcp
    return make_plan(instance.batch, CLUSTER, MODEL, recipe=recipe)


@every_instance
def test_an_instance_equals_plain_attention(instance: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "attend", attend)
    monkeypatch.setattr(executor, "attend_grad", attend_grad)
    plan = plan_of(instance)  # verified, as plans are by default
    (kind,) = plan.header.kinds
    assert plan.report["area"] == {kind: instance.pairs}
    check(plan, kind, instance)


def check(plan: Plan, kind: str, instance: Instance) -> None:
    p = oracle.Problem.random(instance.tokens, instance.tokens, 1, 1)
    compared = np.zeros(instance.tokens, bool)
    for begin, end in instance.windows():
        compared[begin:end] = True
    p = replace(p, q=p.q * compared[:, None, None], do=p.do * compared[:, None, None])
    result = executor.run(plan, kind, p.q, p.k, p.v, p.do)
    rows = oracle.Rows(p, instance.bands)
    dk, dv = np.zeros_like(p.k), np.zeros_like(p.v)
    for begin, end in instance.windows():
        o, lse = rows.forward(begin, end)
        dq = rows.backward(begin, end, dk, dv)
        for actual, expected in [(result.o, o), (result.lse, lse), (result.dq, dq)]:
            np.testing.assert_allclose(actual[begin:end], expected, rtol=EXACT, atol=EXACT)
    np.testing.assert_allclose(result.dk, dk, rtol=EXACT, atol=EXACT)
    np.testing.assert_allclose(result.dv, dv, rtol=EXACT, atol=EXACT)


# --- kernels that skip query rows outside the windows, whose q and dO are 0


def _runs(q: np.ndarray) -> list[tuple[int, int]]:
    """Runs of rows that are not all zero."""
    compared = np.flatnonzero(np.diff(q.any(axis=(1, 2)), prepend=False, append=False))
    return list(zip(compared[::2].tolist(), compared[1::2].tolist(), strict=True))


def attend(q: Array, k: Array, v: Array, task: Task, layer: Any) -> Partial:
    out = Partial(np.zeros((*q.shape[:2], v.shape[2])), np.zeros(q.shape[:2]))
    for a, b in _runs(q):
        out.o[a:b], out.lse[a:b] = ATTEND(q[a:b], k, v, without_first_rows(task, a), layer)
    return out


def attend_grad(
    q: Array, kv: tuple[Array, ...], do: Array, sums: tuple[Array, ...], task: GradTask, layer: Any
) -> tuple[Array, ...]:
    dq, dk, dv = (np.zeros_like(array) for array in (q, *kv))
    for a, b in _runs(q):
        compared = tuple(row[a:b] for row in sums)
        dq[a:b], *rest = ATTEND_GRAD(q[a:b], kv, do[a:b], compared, without_first_rows(task, a), layer)
        dk += rest[0]
        dv += rest[1]
    return dq, dk, dv


def without_first_rows(task: Any, rows: int) -> Any:
    """The task without its first query rows."""
    return task._replace(dmin=task.dmin - rows, dmax=task.dmax - rows)

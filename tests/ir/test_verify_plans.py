"""The verifier on whole families of plans: it accepts planned ones and refuses mutants that compute something else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import apportion as ap
from apportion.backends import numpy as executor
from apportion.backends.numpy import LocalLayer
from apportion.ir.bytes.codec import Plan
from apportion.ir.masks.bands import dense, overlaps
from apportion.ir.plan.tables import ProgramSet, Table
from apportion.ir.verify import attended, check
from apportion.planner.recipe.recipes import find_recipe, with_block
from tests.support.parse import parse

PLANS = Path(__file__).parent.parent / "plans"
MODEL = ap.Model(q_heads=4, kv_heads=2, head_dim=8, dtype="fp64", hidden=32, ffn=64, layers=1)


# ---- a mutated plan is refused, or it computes the same as the original


def mutate(plan: Plan, draw: np.random.Generator) -> Plan:
    """The plan with one number of one table changed."""
    key = list(plan.programs)[draw.integers(len(plan.programs))]
    tables = plan.programs[key].tables
    name = draw.choice([name for name, table in tables.items() if len(table)])
    column = draw.choice(list(tables[name].columns))
    values = np.array(tables[name][column], np.int64)
    row, other = draw.integers(len(values), size=2)
    old, stranger = values[row], draw.choice([0, 1, 2, 3, 7, -1, 2**31, 2**47, 2**62])
    values[row] = draw.choice([old - 1, old + 1, values[other], stranger])
    table = Table.of(tables[name].ptr, {**tables[name].columns, column: values})
    programs = {**plan.programs, key: ProgramSet({**tables, name: table})}
    return replace(plan, programs=programs, sections=None)


def outputs_of(plan: Plan) -> list[np.ndarray]:
    head, tokens, draw = plan.header, plan.request.batch.tokens, np.random.default_rng(0)
    q, do = (draw.normal(size=(tokens, head.q_heads, width)) for width in (head.head_dim, head.v_head_dim))
    k, v = (draw.normal(size=(tokens, head.kv_heads, width)) for width in (head.head_dim, head.v_head_dim))
    sinks = draw.normal(size=head.q_heads)
    results = [executor.run(plan, kind, q, k, v, do, LocalLayer(sinks)) for kind in head.kinds]
    return [array for result in results for array in result if array is not None]


@pytest.mark.parametrize("name", ["q_moves", "relay", "reshuffle", "clear", "fcp"])
def test_a_mutation_is_refused_or_harmless(name: str) -> None:
    if name == "fcp":
        batch, recipe = ap.Batch.from_lengths([40, 17]), with_block(find_recipe("fcp"), 8)
        whole = ap.plan(batch, ap.Cluster(1, 3), MODEL, recipe, verify=False)
    else:
        whole = parse((PLANS / f"{name}.txt").read_text())
    good, draw = outputs_of(whole), np.random.default_rng(len(name))
    refused = 0
    for _ in range(150):
        plan = mutate(whole, draw)
        if check(plan):
            refused += 1
        else:
            assert all(
                np.allclose(actual, expected, rtol=0, atol=1e-9)
                for actual, expected in zip(outputs_of(plan), good, strict=True)
            )
    assert refused > 100


# ---- parts with their own oracles


def test_pairs_of_a_band_by_counting() -> None:
    draw = np.random.default_rng(0)
    bands, counted = np.zeros((6, 400), np.int64), []
    for band in bands.T:
        q0, k0 = (int(x) for x in draw.integers(0, 5, 2))
        q1, k1 = q0 + int(draw.integers(0, 8)), k0 + int(draw.integers(0, 8))
        dmin, dmax = sorted(int(x) for x in draw.integers(-12, 13, 2))
        band[:] = q0, q1, k0, k1, dmin, dmax
        counted.append(sum(dmin <= q - k <= dmax for q in range(q0, q1) for k in range(k0, k1)))
    areas, inside = attended.areas_inside(bands, np.array([[0, 20, 0, 20, -20, 20]]).T)
    assert areas.tolist() == inside.tolist() == counted


def test_the_sweep_finds_the_overlaps_of_the_band_algebra() -> None:
    draw = np.random.default_rng(1)
    for _ in range(60):
        corners = draw.integers(0, 30, (6, 2))
        sizes = draw.integers(1, 8, (6, 2))
        dmin = corners[:, 0] - corners[:, 1] + draw.integers(-4, 2, 6)
        columns = [corners[:, 0], corners[:, 0] + sizes[:, 0], corners[:, 1], corners[:, 1] + sizes[:, 1]]
        bands = np.column_stack([*columns, dmin, dmin + draw.integers(0, 6, 6)]).astype(np.int64)
        found = attended.overlaps(np.ascontiguousarray(bands.T))
        pairs_found = sorted(map(tuple, found[:, :2].tolist()))
        assert pairs_found == sorted(map(tuple, overlaps(bands).tolist()))
        for i, j, shared in found.tolist():
            assert shared == (dense(bands[i], 40, 40) & dense(bands[j], 40, 40)).sum()

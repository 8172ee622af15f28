"""Head stages: outputs and gradients against dense attention, memory, communication, and the paper's tables."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from apportion.backends import numpy as executor
from apportion.backends.interp import Operand
from apportion.backends.numpy import LocalLayer, LocalView, Rank
from apportion.ir import verify
from apportion.ir.bytes.codec import Plan
from apportion.ir.errors import ConfigError
from apportion.ir.isa import TABLES, Op
from apportion.ir.masks import bands, specs as masks
from apportion.ir.plan.tables import Table
from apportion.ir.request.batch import Batch
from apportion.ir.request.cluster import Cluster
from apportion.ir.request.model import Model
from apportion.ir.tensors import Space, Tensor
from apportion.planner.api import plan as make_plan
from apportion.planner.inner.upipe import UPipe, stage_lists
from tests.support import matrix, oracle, upipe_memory as memory
from tests.support.sparse import sparse_product
from tests.support.strategies import BLOCKS, MATCHINGS

Array = NDArray[Any]
Heads = range | tuple[int, ...]
EXACT = 1e-10
LENGTHS = (13, 1, 9, 6)
WHOLE = {"place": {"whole": {}}, "schedule": {"gather": {}}}
RING = {"place": {"zigzag": {"chunk": 1}}, "schedule": {"ring": {}}}

#: (ranks, query heads, KV heads, heads of a stage): more KV heads than ranks, as many, fewer, one, and unevenly shared
SHAPES = [
    (1, 8, 2, 2),
    (2, 8, 8, 4),
    (2, 8, 2, 2),
    (2, 12, 3, 6),
    (3, 12, 4, 6),
    (4, 16, 4, 4),
    (4, 16, 4, 8),
    (4, 16, 2, 4),
    (4, 16, 1, 8),
    (5, 10, 5, 5),
    (6, 12, 2, 6),
    (7, 14, 7, 7),
    (8, 16, 2, 8),
]


def planned(
    batch: Batch, shape: tuple, nodes: int = 1, steps: dict | None = None, inner: str = "upipe", **params: Any
) -> Plan:
    """shape: ranks of all nodes, query and KV heads, heads of a stage."""
    ranks, q_heads, kv_heads, heads = shape
    if inner == "upipe":
        params["heads"] = heads
    model = Model(q_heads, kv_heads, 4, 6, dtype="fp64", hidden=5, layers=1)
    data = {"inner": {inner: params}, "shard": {"sequences": {}}, **(steps or WHOLE)}
    return make_plan(batch, Cluster(nodes, ranks // nodes), model, {"name": inner, "steps": data})


class Weights:
    """A projection whose result depends on the position, and the gradients of its weights."""

    def __init__(self, model: Model) -> None:
        rng, kv = np.random.default_rng(3), model.kv_heads
        shapes = [(model.q_heads, model.head_dim), (kv, model.head_dim), (kv, model.value_dim)]
        self.weights = [rng.standard_normal((heads, model.hidden, width)) / 4 for heads, width in shapes]
        self.grads = [np.zeros_like(weights) for weights in self.weights]

    def project(
        self, hidden: Array, position_ids: Array, q_heads: Heads, kv_heads: Heads
    ) -> tuple[Array, ...]:
        x = hidden * (1 + position_ids / 8)[:, None]
        each = zip(self.weights, (q_heads, kv_heads, kv_heads), strict=True)
        return tuple(np.einsum("ne,hed->nhd", x, w[list(heads)]) for w, heads in each)

    def gradient(
        self, hidden: Array, position_ids: Array, q_heads: Heads, kv_heads: Heads, grads: tuple[Array, ...]
    ) -> Array:
        turn, dx = (1 + position_ids / 8)[:, None], np.zeros_like(hidden)
        each = zip(self.weights, self.grads, (q_heads, kv_heads, kv_heads), grads, strict=True)
        for w, total, heads, grad in each:
            dx += np.einsum("nhd,hed->ne", grad, w[list(heads)])
            np.add.at(total, list(heads), np.einsum("ne,nhd->hed", hidden * turn, grad))
        return dx * turn


def allowed(batch: Batch) -> np.ndarray:
    return bands.dense(batch.bands("default"), batch.tokens, batch.tokens)


def compare(plan: Plan) -> None:
    """With given q, k and v."""
    m = plan.request.model
    matrix.compare(plan, "default", (m.q_heads, m.kv_heads, m.head_dim, m.value_dim, True, None), 1)


def compare_block(plan: Plan) -> None:
    """With given hidden states; compares gradients of weights too."""
    m, batch, weights = plan.request.model, plan.request.batch, Weights(plan.request.model)
    rng = np.random.default_rng(0)
    x, sinks = rng.standard_normal((batch.tokens, m.hidden)), rng.standard_normal(m.q_heads)
    do = rng.standard_normal((batch.tokens, m.q_heads, m.value_dim))
    o, lse, saved = executor.forward(plan, "default", [x], LocalLayer(sinks, project=weights))
    dx, dsinks = executor.backward(plan, "default", saved, do)
    found = {"o": o, "lse": lse, "dx": dx, "dsinks": dsinks, "weights": _flat(weights)}
    plain = Weights(m)
    every = x, batch.positions(), range(m.q_heads), range(m.kv_heads)
    answer = oracle.dense(oracle.Problem(*plain.project(*every), do, sinks), allowed(batch))
    dx = plain.gradient(*every, (answer.dq, answer.dk, answer.dv))
    expected = {name: getattr(answer, name) for name in ("o", "lse", "dsinks")}
    expected |= {"dx": dx, "weights": _flat(plain)}
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=EXACT, atol=EXACT, err_msg=name)


def _flat(weights: Weights) -> Array:
    return np.concatenate([grad.ravel() for grad in weights.grads])


# ------------------------------------------------------------------------------------------------ numbers


ORDERS = ("gqa", "natural")


@pytest.mark.parametrize(
    ("shape", "order", "keep", "ahead"),
    sparse_product(23, SHAPES, ORDERS, ("auto", 1, 2, 9), (0, 1)),
    ids=str,
)
def test_every_shape_equals_dense_attention(shape: tuple, order: str, keep: Any, ahead: int) -> None:
    batch = Batch.from_lengths(LENGTHS, masks.causal())
    compare(planned(batch, shape, order=order, keep=keep, ahead=ahead))
    compare_block(planned(batch, shape, order=order, keep=keep, ahead=ahead, project=True))


@pytest.mark.parametrize(("ranks", "project"), sparse_product(5, range(1, 9), (False, True)))
def test_loader_order_and_few_tokens_equal_dense_attention(ranks: int, project: bool) -> None:
    run = compare_block if project else compare
    for lengths in ([1], [1, 1, 1], [40, 2, 1]):
        batch = Batch.from_lengths(lengths, masks.causal())
        shape = (ranks, 2 * ranks, 2, ranks) if ranks % 2 == 0 else (ranks, 2 * ranks, ranks, ranks)
        run(planned(batch, shape, project=project, steps=WHOLE | {"reshuffle": True}))
        single = {"degree": 1, "project": project}
        run(planned(batch, (ranks, 4, 2, 2), 1, BLOCKS | MATCHINGS | {"reshuffle": True}, **single))


@pytest.mark.parametrize("shape", [(4, 16, 4, 16), (2, 8, 2, 8), (3, 12, 1, 12)], ids=str)
def test_a_single_stage_equals_ulysses(shape: tuple) -> None:
    batch = Batch.from_lengths(LENGTHS, masks.causal())
    upipe, ulysses = planned(batch, shape), planned(batch, shape, inner="ulysses", degree=shape[0])
    assert upipe.header.head_sets == ulysses.header.head_sets
    for key, program in ulysses.programs.items():
        assert all(program[name].equal(upipe.programs[key][name]) for name in TABLES)
    compare_block(planned(batch, shape, project=True))


# ------------------------------------------------------------------------------------------------ heads of each stage


def test_stages_equal_figure_4() -> None:
    """Four devices, sixteen query heads of four KV heads: Q0 Q4 Q8 Q12 first, then the next of each group."""
    stages = stage_lists(Model(16, 4), 4, "gqa")
    assert stages == [(0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15)]
    assert stage_lists(Model(16, 4), 4, "natural")[1] == (4, 5, 6, 7)


def test_stages_may_have_any_multiple_of_the_ranks_that_divides_the_heads() -> None:
    for q_heads, kv_heads in [(32, 8), (64, 8), (32, 32), (48, 6), (24, 1), (40, 10)]:
        model = Model(q_heads, kv_heads)
        for heads in [n for n in range(1, q_heads + 1) if q_heads % n == 0]:
            for order in ("gqa", "natural"):
                stages = stage_lists(model, heads, order)
                assert {len(stage) for stage in stages} == {heads}
                assert sorted(head for stage in stages for head in stage) == list(range(q_heads))
            keys = [{head * kv_heads // q_heads for head in one} for one in stage_lists(model, heads, "gqa")]
            assert set(map(len, keys)) == {np.gcd(heads, kv_heads)}


def heads_sent(plan: Plan, rank: int) -> tuple[Fraction, Fraction]:
    """Query heads, and K and V heads, that a rank sends in the forward, in units of its home rows."""
    program = plan.programs["default", "forward"].rank(rank)
    operands, transfers = program["operands"], program["transfers"]
    rows = int(plan.layout(plan.header.home_layout).rows_per_rank[rank])
    sizes = [0, *map(len, plan.header.head_sets)]
    sent = defaultdict(Fraction)
    for operand in transfers["operand"][transfers["send"] == 1].tolist():
        of = {name: int(operands[name][operand]) for name in ("tensor", "rows", "heads")}
        sent[Tensor(of["tensor"])] += Fraction(of["rows"] * sizes[of["heads"]], rows)
    return sent[Tensor.Q], 2 * sent[Tensor.KV]


@pytest.mark.parametrize("project", [False, True])
@pytest.mark.parametrize(("ranks", "q_heads", "kv_heads"), [(4, 16, 4), (2, 8, 2), (4, 32, 8), (8, 32, 8)])
def test_gqa_order_sends_the_heads_stated_in_the_paper(
    ranks: int, q_heads: int, kv_heads: int, project: bool
) -> None:
    shape, batch = (ranks, q_heads, kv_heads, ranks), Batch.from_lengths([16 * ranks])
    for order, keep, ratio in (("gqa", "auto", q_heads // kv_heads), ("natural", 1, None)):
        plan = planned(batch, shape, order=order, keep=keep, project=project)
        assert sum(heads_sent(plan, 0)) == memory.communicated_heads(q_heads, ranks, ratio)


@pytest.mark.parametrize(("route", "keep"), sparse_product(4, ("star", "node", "tree"), ("auto", 2, 9)))
def test_held_tiles_equal_dense_attention_on_any_route(route: str, keep: str | int) -> None:
    batch, steps = Batch.from_lengths([29, 13], masks.causal()), BLOCKS | MATCHINGS | {"route": {route: {}}}
    for order, ahead in (("gqa", 0), ("natural", 1)):
        params = {"degree": 2, "keep": keep, "order": order, "ahead": ahead, "hold": True}
        compare(planned(batch, (8, 16, 4, 4), 4, steps, **params))


def test_held_tiles_travel_once_for_the_stages_of_a_window() -> None:
    """Four query heads per KV head, two stages per window: half the tiles, and as many bytes as with Ulysses."""
    batch = Batch.from_lengths([64, 32])
    ring = planned(batch, (8, 16, 4, 8), 2, RING, inner="ulysses", degree=4)
    once, always = (planned(batch, (8, 16, 4, 8), 2, RING, degree=4, hold=hold) for hold in (True, False))
    for name in ("fetch", "return"):
        of_ring, of_once, of_always = (tile_bytes(plan, name) for plan in (ring, once, always))
        assert of_once == of_ring
        assert of_always == 2 * of_once


def tile_bytes(plan: Plan, name: str) -> int:
    return sum(item["bytes"] for item in plan.report["exchanges"] if item["name"] == name)


def test_a_head_is_projected_once_per_window() -> None:
    """KV heads that ranks share are projected once per window, query heads once in total."""
    batch = Batch.from_lengths([32])
    plan = planned(batch, (4, 16, 2, 4), project=True)
    program = plan.programs["default", "forward"].rank(0)
    operands, made = program["operands"], defaultdict(int)
    ops = program["instructions"]["op"]
    assert (ops == Op.PROJECT).sum() == 4
    for column in ("b", "c"):
        for operand in program["rowops"][column].tolist():
            tensor, heads = int(operands["tensor"][operand]), int(operands["heads"][operand])
            if tensor in (Tensor.Q, Tensor.KV):
                made[tensor] += len(plan.header.head_sets[heads - 1])
    assert made == {Tensor.Q: 16, Tensor.KV: 2}


def test_ahead_launches_a_stage_before_the_previous_one_is_computed() -> None:
    for ahead in (0, 1):
        plan = planned(Batch.from_lengths([32]), (2, 8, 2, 2), ahead=ahead)
        ops = plan.programs["default", "forward"].rank(0)["instructions"]["op"].tolist()
        assert ops[: ops.index(Op.ATTEND)].count(Op.LAUNCH) == 1 + ahead


# ------------------------------------------------------------------------------------------------ memory


def measured(plan: Plan, project: bool, monkeypatch: pytest.MonkeyPatch) -> dict[tuple, memory.Arena]:
    """Highest work row and head column written, by (rank, tensor, phase)."""
    found: dict[tuple, memory.Arena] = defaultdict(lambda: memory.Arena(0, 0))
    rank_of: dict[int, Rank] = {}
    view, write, phase = Rank.view, LocalView.write, []

    def record_view(self: Rank, operand: Operand) -> LocalView:
        seen = view(self, operand)
        rank_of[id(seen)] = self
        return seen

    def record_write(self: LocalView, values: Any) -> None:
        operand = self.operand
        if operand.space == Space.WORK:
            key = (rank_of[id(self)].rank, operand.tensor, phase[-1])
            stop = operand.columns.stop if isinstance(operand.columns, slice) else operand.columns[-1] + 1
            rows, heads = found[key]
            found[key] = memory.Arena(max(rows, operand.row + operand.rows), max(heads, stop))
        write(self, values)

    monkeypatch.setattr(Rank, "view", record_view)
    monkeypatch.setattr(LocalView, "write", record_write)
    m, tokens = plan.request.model, plan.request.batch.tokens
    p = oracle.Problem.random(1, tokens, m.q_heads, m.kv_heads, m.head_dim, m.value_dim)
    given = [np.ones((tokens, m.hidden))] if project else [p.q, p.k, p.v]
    layer = LocalLayer(project=Weights(m) if project else None)
    phase.append("forward")
    *_, saved = executor.forward(plan, "default", given, layer)
    phase.append("backward")
    executor.backward(plan, "default", saved, p.do)
    monkeypatch.undo()
    return dict(found)


@pytest.mark.parametrize(
    ("shape", "project", "order", "keep", "ahead"),
    sparse_product(11, SHAPES, (False, True), ORDERS, ("auto", 2), (0, 1)),
    ids=str,
)
def test_the_memory_model_equals_the_rows_the_executor_touches(
    shape: tuple, project: bool, order: str, keep: int | str, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks, _, _, heads = shape
    params = {"order": order, "keep": keep, "ahead": ahead, "project": project}
    plan = planned(Batch.from_lengths([6 * ranks, 4]), shape, **params)
    compare_memory(plan, UPipe(heads=heads, **params), ranks, measured(plan, project, monkeypatch))


def compare_memory(plan: Plan, upipe: UPipe, degree: int, found: dict) -> None:
    """Written and allocated rows equal the memory model; so do columns if all ranks have the same number of KV heads,
    otherwise arenas are as wide as the widest."""
    model, home = plan.request.model, plan.layout(plan.header.home_layout).rows_per_rank
    same_heads = len(np.unique(upipe.stages(model, degree).key_heads)) == 1
    for rank in range(degree):
        for phase in ("forward", "backward"):
            member = memory.Member(int(home.sum()), int(home[rank]))
            expected = memory.peak_rows(model, degree, upipe, member, phase)
            seen = {
                tensor: arena for (at, tensor, when), arena in found.items() if (at, when) == (rank, phase)
            }
            assert seen.keys() == expected.keys()
            assert all(arena.rows == expected[tensor].rows for tensor, arena in seen.items())
            assert seen == expected or not same_heads
            assert allocated(plan, phase, rank) == expected


def allocated(plan: Plan, phase: str, rank: int) -> dict[Tensor, memory.Arena]:
    arenas = plan.programs["default", phase].rank(rank)["arenas"]
    columns = (arenas[name].tolist() for name in ("tensor", "rows", "heads"))
    return {Tensor(tensor): memory.Arena(rows, heads) for tensor, rows, heads in zip(*columns, strict=True)}


def test_stages_hold_the_tiles_of_a_ring_once() -> None:
    batch = Batch.from_lengths([64, 32])
    ring = planned(batch, (8, 16, 4, 4), 4, RING, inner="ulysses", degree=2)
    plan = planned(batch, (8, 16, 4, 4), 4, RING, degree=2, project=True)
    home = plan.layout(plan.header.home_layout).rows_per_rank
    group_rows = int(home[:2].sum())
    for phase in ("forward", "backward"):
        once = allocated(ring, phase, 0)
        tiles = [once[tensor].rows - group_rows for tensor in (Tensor.KV, Tensor.DKV) if tensor in once]
        member = memory.Member(group_rows, int(home[0]), *tiles)
        expected = memory.peak_rows(plan.request.model, 2, UPipe(heads=4, project=True), member, phase)
        assert allocated(plan, phase, 0) == expected


def test_peak_bytes_are_compared_with_the_memory_cap() -> None:
    model = Model(16, 4, 8, dtype="bf16", hidden=64)
    arenas = memory.peak_rows(model, 4, UPipe(heads=4, project=True), memory.Member(100, 25), "backward")
    assert arenas[Tensor.Q] == arenas[Tensor.KV] == (175, 1)
    assert {arenas[one] for one in (Tensor.DO, Tensor.DELTA, Tensor.DQ, Tensor.DKV)} == {(100, 1)}
    assert memory.peak_bytes(model, arenas) == 175 * (16 + 32) + 100 * (16 + 8 + 32 + 64)


def test_stages_need_the_same_memory_for_any_number_of_heads() -> None:
    """Section 3.4: at U = C the intermediate memory does not depend on the number of heads."""
    upipe = UPipe(heads=8, project=True)
    sizes = set()
    for q_heads in (16, 32, 64):
        model = Model(q_heads, 8, hidden=128 * q_heads)
        arenas = memory.peak_rows(model, 8, upipe, memory.Member(8192, 1024), "forward")
        sizes.add(memory.peak_bytes(model, arenas))
    assert len(sizes) == 1


# ------------------------------------------------------------------------------------------------ the paper's numbers


def test_table_1() -> None:
    printed = {"embedding": 2, "attention": 16, "feed_forward": 25, "cross_entropy": 240}
    assert {name: int(value) for name, value in memory.printed_phases().items()} == printed


@pytest.mark.parametrize("ratio", [1, 2, 4, 8])
@pytest.mark.parametrize("chunks", [1, 2, 4, 8])
def test_table_2(ratio: int, chunks: int) -> None:
    gamma, layers, part = 1 + Fraction(2, ratio), 3, Fraction(1, chunks)
    assert memory.gamma(ratio) == gamma
    printed = memory.printed_forward
    assert printed("ulysses", ratio, layers=layers) == (3, 4 + gamma, 4 + gamma, 5)
    assert printed("ulysses_offload", ratio) == (1, 2 + gamma, 2 + gamma, 3)
    fpdt = part, part + (gamma + 1) * part, (2 * gamma + 1) * part, 2 * part
    assert printed("fpdt", ratio, chunks) == fpdt
    assert printed("upipe", ratio, chunks) == (1, 2 + (gamma + 1) * part, 2 + gamma * part, 1 + 2 * part)


@pytest.mark.parametrize("ratio", [1, 2, 4, 8])
@pytest.mark.parametrize("chunks", [1, 2, 4, 8])
def test_table_6(ratio: int, chunks: int) -> None:
    gamma, beta, part = 1 + Fraction(2, ratio), 4 + Fraction(4, ratio), Fraction(1, chunks)
    assert memory.beta(ratio) == beta
    printed = memory.printed_backward
    assert printed("ulysses", ratio, layers=3) == (4, 5, 4 + beta, 4 + gamma)
    assert printed("ulysses_offload", ratio) == (2, 3, beta + 2, gamma + 2)
    assert printed("fpdt", ratio, chunks) == (part, 3 * part, (beta + 2) * part, (gamma + 2) * part)
    upipe = 2, 2 + 2 * part, 2 + (beta + 1) * part, 2 + 2 * (gamma + 1) * part
    assert printed("upipe", ratio, chunks) == upipe


def test_llama_3_8b_in_numbers() -> None:
    """H = 32, 8 KV heads, C = 8, so 4 stages: 2.625 S/C rows against 4.5 without stages."""
    assert memory.printed_forward("upipe", 4, chunks=4).first == Fraction(21, 8)
    assert memory.printed_forward("ulysses_offload", 4).first == Fraction(7, 2)
    assert memory.printed_backward("upipe", 4, chunks=4).kernel == Fraction(7, 2)
    assert memory.printed_backward("ulysses_offload", 4).kernel == 7


def test_section_3_4() -> None:
    """Qwen3-32B, H = 64 on 8 ranks: 96 S d_head against 12 S d_head, 87.5 % less."""
    tokens, width = 1024, 128
    ulysses, upipe = (memory.intermediate_bytes(tokens, 8, heads, width) for heads in (64, 8))
    assert (ulysses, upipe) == (96 * tokens * width, 12 * tokens * width)
    assert 1 - upipe / ulysses == Fraction(875, 1000)


# ------------------------------------------------------------------------------------------------ refusals and proofs


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"heads": 3}, "recipe.inner.upipe.heads"),
        ({"heads": 12}, "recipe.inner.upipe.heads"),
        ({"degree": 3}, "recipe.inner.upipe.degree"),
    ],
    ids=str,
)
def test_refusals_name_the_parameter(params: dict, field: str) -> None:
    recipe = {"name": "u", "steps": {"inner": {"upipe": params}, "shard": {"sequences": {}}, **WHOLE}}
    with pytest.raises(ConfigError) as refused:
        make_plan(Batch.from_lengths([32]), Cluster(1, 4), Model(16, 4), recipe)
    assert field in str(refused.value)


def test_refusals_name_valid_values() -> None:
    with pytest.raises(ConfigError, match="use 4, 8, 16"):
        UPipe(heads=6).stages(Model(16, 4), 4)
    with pytest.raises(ConfigError, match="at least 1"):
        memory.printed_forward("upipe", 4, chunks=0)
    with pytest.raises(ConfigError, match="method"):
        memory.printed_backward("ring", 4)


@pytest.mark.parametrize("change", ["keys", "twice", "missing"])
def test_the_verifier_refuses_wrong_projections(change: str) -> None:
    plan = planned(Batch.from_lengths([32]), (2, 8, 2, 2), project=True)
    assert verify.check(plan) == ()
    key = ("default", "forward" if change == "keys" else "backward")
    tables = dict(plan.programs[key].tables)
    rows = tables["rowops"]
    columns = {name: np.array(column) for name, column in rows.columns.items()}
    operands = tables["operands"]
    if change == "keys":  # KV heads of a later window are projected instead
        sets, tensor = np.array(operands["heads"]), np.asarray(operands["tensor"])
        sets[tensor == Tensor.KV] = sets[tensor == Tensor.KV][::-1].copy()
        tables["operands"] = Table.of(operands.ptr, {**operands.columns, "heads": sets})
    elif change == "missing":  # gradients of queries are never projected back
        columns["b"][columns["d"] > 0] = 0
        tables["rowops"] = Table.of(rows.ptr, columns)
    else:  # the gradients of one rank's queries are projected twice
        first, steps = int(np.flatnonzero(columns["d"] > 0)[0]), tables["instructions"]
        twice = {name: np.insert(column, first, column[first]) for name, column in columns.items()}
        tables["rowops"] = Table.of(rows.ptr + (np.arange(len(rows.ptr)) > 0), twice)
        projects = steps["op"] == Op.PROJECT_GRAD
        count = steps["count"] + (np.cumsum(projects) == 1) * projects
        tables["instructions"] = Table.of(steps.ptr, {**steps.columns, "count": count})
    broken = replace(plan, programs={**plan.programs, key: replace(plan.programs[key], tables=tables)})
    found = {violation.rule for violation in verify.check(broken)} - {"digests"}
    assert found & {"delivery", "dataflow", "heads", "operands", "transfers"}

"""Gradients that are rounded to the model's dtype in transit: the option's encoding in plans, and its effects."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest

import apportion as ap
from apportion import ConfigError, DecodeError, Plan
from apportion.backends import numpy as executor
from apportion.backends.numpy import rounded
from apportion.ir.bytes import codec, sections, slices
from apportion.ir.isa import Op
from apportion.ir.masks import bands
from apportion.ir.plan import plain, totals
from apportion.ir.plan.messages import find_messages
from apportion.ir.tensors import GRADIENTS, PHASES, Tensor
from apportion.ir.verify import check
from tests.support import oracle
from tests.support.parse import parse

MODEL = ap.Model(4, 2, 8, 12, dtype="bf16", hidden=16, ffn=16, layers=1)
NARROW = replace(MODEL, sent_gradients="model")
BATCH = ap.Batch.from_lengths([700, 60, 30], mask=ap.masks.causal())
CLUSTER = ap.Cluster(2, 2)
#: recipes in which gradients of keys travel, directly or relayed, and recipes in which gradients of queries travel
RECIPES = ("fcp", "ring", "ulysses", "dcp")


def plan_of(recipe: str, model: ap.Model = NARROW) -> Plan:
    return ap.plan(BATCH, CLUSTER, model, recipe=recipe)


# ---- encoding


def test_the_default_is_not_encoded() -> None:
    assert "sent_gradients" not in MODEL.to_data()
    assert NARROW.to_data() == MODEL.to_data() | {"sent_gradients": "model"}
    assert ap.Model.from_data(NARROW.to_data()) == NARROW
    assert ap.Model.from_data(MODEL.to_data() | {"sent_gradients": "wide"}) == MODEL
    plan = plan_of("fcp", MODEL)
    assert "sent_gradients" not in plain.header_data(plan.header)
    assert b"sent_gradients" not in plan.encode()
    assert plan_of("fcp").id != plan.id


@pytest.mark.parametrize(
    ("value", "message"), [("wide", "header"), ("fp8", "sent_gradients = 'fp8'; known are wide, model")]
)
def test_a_header_with_the_default_or_an_unknown_value_is_refused(value: str, message: str) -> None:
    plan = plan_of("fcp", MODEL)
    data = dict(sorted((plain.header_data(plan.header) | {"sent_gradients": value}).items()))
    with pytest.raises(DecodeError, match=message):
        sections.read_header(msgspec.msgpack.encode(data), plan.header.version)


@pytest.mark.parametrize("recipe", RECIPES)
def test_sent_gradients_survives_bytes_text_and_slices(recipe: str) -> None:
    plan = plan_of(recipe)
    assert plan.header.sent_gradients == "model"
    assert codec.decode(plan.encode()) == plan == parse(plan.text())
    assert '"sent_gradients": "model"' in plan.text()
    assert slices.Slice.decode(plan.for_rank(1).encode()).header.narrows(Tensor.DKV)
    assert check(plan) == ()


def test_a_text_without_the_header_field_uses_the_models_value() -> None:
    lines = [line for line in plan_of("fcp").text().splitlines() if not line.startswith("id ")]
    (header,) = (line for line in lines if line.startswith("header"))
    without = header.replace('"sent_gradients": "model", ', "")
    assert without != header
    plan = parse("\n".join(lines).replace(header, without))
    assert plan.header.sent_gradients == "model"


@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
def test_wide_models_have_nothing_to_round(dtype: str) -> None:
    with pytest.raises(ConfigError, match="is for bf16 and fp16") as caught:
        ap.Model(dtype=dtype, sent_gradients="model")
    assert (caught.value.field, caught.value.value) == ("model.sent_gradients", "model")
    assert "leave it out" in str(caught.value)
    assert ap.Model(dtype=dtype, sent_gradients="wide") == ap.Model(dtype=dtype)


# ---- transfers


def test_only_partial_gradients_are_rounded() -> None:
    assert {Tensor.DX, Tensor.DQ, Tensor.DKV} == GRADIENTS
    for tensor in Tensor:
        assert NARROW.row_bytes(tensor) == MODEL.row_bytes(tensor) == MODEL.sent_bytes(tensor)
        shrinks = 2 if tensor in GRADIENTS else 1
        assert NARROW.sent_bytes(tensor) * shrinks == MODEL.sent_bytes(tensor)
        assert NARROW.sent_bytes(tensor, 1) * shrinks == MODEL.sent_bytes(tensor, 1)
        assert NARROW.sent_result_bytes(tensor) == MODEL.sent_result_bytes(tensor)


@pytest.mark.parametrize("recipe", RECIPES)
def test_reports_programs_and_the_simulator_count_the_same_bytes(recipe: str) -> None:
    plan = plan_of(recipe)
    moved = totals.communication_volumes(plan.programs, plan.header.head_sets, NARROW, CLUSTER)
    runs = ap.simulate(plan).runs
    for key, volume in moved.items():
        assert runs[key].sent_bytes.tolist() == volume.sent.tolist()
        assert volume.sent.sum() == sum(_tile_bytes(plan, key))
    assert plan.report["bytes"]["total"] == sum(int(volume.sent.sum()) for volume in moved.values())


def _tile_bytes(plan: Plan, key: tuple[str, str]) -> list[int]:
    """The bytes of each sent tile, computed from the tables."""
    rows, sets = plan.programs[key], plan.header.head_sets
    widths = {Tensor.Q: 16, Tensor.KV: 40, Tensor.O: 12 * 4 + 4, Tensor.DQ: 16, Tensor.DKV: 40, Tensor.DO: 24}
    sizes = []
    for rank in range(plan.header.ranks):
        program = rows.rank(rank)
        operands, transfers = program["operands"], program["transfers"]
        launches = np.flatnonzero(program["instructions"]["op"] == Op.LAUNCH)
        table = program["instructions"]
        mode = np.repeat(table["mode"][launches], table["count"][launches])
        for at in np.flatnonzero(transfers["send"]).tolist():
            item = int(transfers["operand"][at])
            tensor, heads = Tensor(operands["tensor"][item]), int(operands["heads"][item])
            count = len(sets[heads - 1]) if heads else plan.header.heads_of(tensor)
            width = widths.get(tensor, 8)
            if tensor == Tensor.O and mode[at] & 2:
                width = 12 * 2 + 4
            sizes.append(int(operands["rows"][item]) * count * width)
    return sizes


def test_bounds_count_rounded_bytes() -> None:
    wide, narrow = (plan_of("fcp", model).report["bounds"]["kv_bytes"] for model in (MODEL, NARROW))
    per_token = [2 * item.row_bytes(Tensor.KV) + item.sent_bytes(Tensor.DKV) for item in (MODEL, NARROW)]
    assert wide["bound"] / per_token[0] == narrow["bound"] / per_token[1] > 0
    assert narrow["value"] >= narrow["bound"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_messages_with_rounded_tiles_are_staged(recipe: str) -> None:
    plan, wide = plan_of(recipe), plan_of(recipe, MODEL)
    for phase in PHASES:
        programs = plan.programs["default", phase]
        found = find_messages(programs, plan.header)
        operands, transfers = programs["operands"], programs["transfers"]
        tensor = operands["tensor"][operands.ptr[transfers.rank_of_row()] + transfers["operand"]]
        narrow = np.isin(tensor, [int(item) for item in GRADIENTS])
        assert found.staged[found.of[narrow]].all()
        assert narrow.any() == (phase == "backward")
    before, after = (find_messages(item.programs["default", "forward"], item.header) for item in (wide, plan))
    if recipe != "dcp":  # its schedule depends on bytes
        np.testing.assert_array_equal(before.staged, after.staged)


# ---- the verifier


def test_a_header_that_contradicts_the_request_is_refused() -> None:
    plan = plan_of("fcp")
    wrong = codec.seal(replace(plan, header=replace(plan.header, sent_gradients="wide")))
    found = [violation.message for violation in check(wrong)]
    assert "the plan has sent_gradients = wide, but the request has model" in found
    with pytest.raises(DecodeError, match="sent_gradients = 'wide', but the requested model has 'model'"):
        codec.decode(wrong.encode())


def test_a_report_that_counts_wide_bytes_is_refused() -> None:
    plan, wide = plan_of("fcp"), plan_of("fcp", MODEL)
    found = check(codec.seal(replace(plan, report=wide.report)))
    assert any(violation.message.startswith("the report has bytes.total") for violation in found)


# ---- numbers


def test_rounding_is_to_the_nearest_and_ties_go_to_even() -> None:
    rng = np.random.default_rng(0)
    values = rng.standard_normal(2000) * 10.0 ** rng.integers(-20, 20, 2000)
    found = rounded(values, "bf16")
    bits = values.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    low, high = ((bits + np.uint32(step << 16)).view(np.float32).astype(np.float64) for step in (0, 1))
    nearest = np.where(np.abs(values - low) <= np.abs(high - values), low, high)
    np.testing.assert_array_equal(found, nearest)
    ties = np.array([1 + 2**-8, 1 + 3 * 2**-8, -0.0, np.inf, -np.inf])
    assert rounded(ties, "bf16").tolist() == [1.0, 1 + 2**-6, 0.0, np.inf, -np.inf]
    halves = np.array([1 + 2**-11, 1 + 3 * 2**-11, 1e5, -7.0])
    assert rounded(halves, "fp16").tolist() == [1.0, 1 + 2**-9, np.inf, -7.0]


@pytest.mark.parametrize("recipe", ["fcp", "ring"])
def test_the_executor_rounds_gradients_in_transit(recipe: str) -> None:
    problem = oracle.Problem.random(3, BATCH.tokens, 4, 2, 8, 12)
    allowed = bands.dense(BATCH.bands("default"), BATCH.tokens, BATCH.tokens)
    expected = oracle.dense(problem, allowed)
    found = executor.run(plan_of(recipe), "default", problem.q, problem.k, problem.v, problem.do)
    for name in ("o", "lse", "dq"):  # forward is exact; gradients of queries do not travel
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), atol=1e-12)
    for name in ("dk", "dv"):
        exact, actual = getattr(expected, name), getattr(found, name)
        error = np.linalg.norm(actual - exact) / np.linalg.norm(exact)
        assert 1e-5 < error < 2**-8

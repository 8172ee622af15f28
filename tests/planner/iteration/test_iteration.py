"""Iteration plans: equal numbers of microbatches on all ranks, self-verifying bytes, and hostile bytes that are
refused."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from hashlib import blake2b
from typing import Any

import jsonschema
import msgpack
import numpy as np
import pytest
from hypothesis import given, strategies as st
from referencing import Registry, Resource

import apportion as ap
from apportion.ir.bytes.codec import Plan, seal
from apportion.ir.bytes.iteration import IterationPlan
from apportion.ir.bytes.sequences import MAX_MICROBATCHES
from apportion.ir.bytes.slices import Slice
from apportion.ir.errors import DecodeError, VersionError
from apportion.ir.request.sequences import Sequence
from apportion.planner.iteration.iterate import plan_iteration
from tests.checks import fuzz_plans
from tests.support.formats import SCHEMAS, decoded

MODEL = ap.Model(q_heads=4, kv_heads=2, head_dim=8, dtype="fp32", hidden=32, ffn=64, layers=1)
CLUSTER = ap.Cluster(1, 4)
LENGTHS = [80, 33, 31, 20, 64, 1, 1, 2]
FCP = {"shard": {"blocks": {"block": 16}}, "place": {"lpt": {}}, "schedule": {"matchings": {"coalesce": 2}}}
TINY = Plan.decode((SCHEMAS / "golden/tiny.plan").read_bytes())
GOLDEN = (SCHEMAS / "golden/tiny.iteration").read_bytes()


def policy(pack: dict[str, Any] | None = None, cap: int | None = None) -> ap.Policy:
    steps = FCP if pack is None else {"pack": pack, **FCP}
    return ap.Policy(ap.Recipe("mine", steps), token_cap=cap)


def iterate(pack: dict[str, Any] | None = None, cap: int | None = None, **options: Any) -> IterationPlan:
    batch = ap.Batch.from_lengths(LENGTHS)
    return plan_iteration(batch, CLUSTER, MODEL, policy=policy(pack, cap), **options)


@pytest.fixture(scope="module")
def iteration() -> IterationPlan:
    return iterate({"wlb": {"microbatches": 3}}, 40)


# ---------------------------------------------------------------------------------------------- planning


def test_the_pack_step_decides_the_microbatches(iteration: IterationPlan) -> None:
    assert [own.tolist() for own in iterate(cap=25).indexes] == [[0], [1, 2, 3], [4, 5, 6, 7]]
    assert len(iterate().plans) == 1
    assert len(iteration.plans) == 3
    tokens = [sum(LENGTHS[i] for i in own) for own in iteration.indexes]
    assert [plan.request.batch.tokens for plan in iteration.plans] == tokens
    assert [len(plan.request.batch.lengths) for plan in iteration.plans] == list(map(len, iteration.indexes))


def test_a_plan_of_one_microbatch_does_not_pack() -> None:
    whole = ap.plan(ap.Batch.from_lengths(LENGTHS), CLUSTER, MODEL, policy=policy({"sequential": {}}))
    assert whole.request.batch.tokens == sum(LENGTHS)


def test_every_rank_has_every_microbatch() -> None:
    """The last microbatch has one token: three of four ranks hold none of it, and their slices record that."""
    iteration = plan_iteration(ap.Batch.from_lengths([60, 40, 1]), CLUSTER, MODEL, policy=policy(cap=25))
    rows, instructions = np.zeros((4, 2), np.int64), np.zeros((4, 2), np.int64)
    for rank in range(4):
        slices = iteration.for_rank(rank)
        assert [piece.id for piece in slices] == [plan.id for plan in iteration.plans]
        for i, piece in enumerate(slices):
            assert Slice.decode(piece.encode()) == piece
            rows[rank, i] = piece.layout("attention").rows_per_rank[0]
            instructions[rank, i] = sum(len(p["instructions"]) for p in piece.programs.values())
    assert rows.sum(0).tolist() == [100, 1]
    assert (rows[:, 1] == 0).sum() == 3
    assert (instructions[rows == 0] == 0).all()
    assert (instructions[rows > 0] > 0).all()


def test_equal_arguments_give_equal_bytes(iteration: IterationPlan) -> None:
    repeated = iterate({"wlb": {"microbatches": 3}}, 40, verify=False)
    assert repeated == iteration
    assert repeated.encode() == iteration.encode()
    assert hash(repeated) == hash(iteration)
    other = iterate({"sequential": {"microbatches": 3}}, 40)
    assert other.id != iteration.id


def test_progress_is_reported() -> None:
    calls: list[tuple[int, int]] = []
    iterate(cap=25, progress=lambda done, total: calls.append((done, total)))
    assert calls == [(0, 3), (1, 3), (2, 3), (3, 3)]


def test_deferred_sequences_are_returned() -> None:
    pack = {"wlb": {"microbatches": 2, "defer": True, "outlier_tokens": 64}}
    assert iterate(pack).deferred.tolist() == []
    batch = ap.Batch.from_lengths([5, 80, 5, 64, 64])
    found = plan_iteration(batch, CLUSTER, MODEL, policy=policy(pack))
    assert found.deferred.tolist() == [4]
    assert IterationPlan.decode(found.encode()).deferred.tolist() == [4]
    assert found.report["deferred"] == 1


def test_a_recipe_may_be_a_name_but_not_given_with_a_policy() -> None:
    batch = ap.Batch.from_lengths(LENGTHS)
    assert plan_iteration(batch, CLUSTER, MODEL, "wlb", 7).plans[0].header.seed == 7
    with pytest.raises(ap.ConfigError, match="conflicts with the policy's own value"):
        plan_iteration(batch, CLUSTER, MODEL, "fcp", policy=policy())
    with pytest.raises(ap.UnknownNameError, match="pack"):
        iterate({"tetris": {}})
    with pytest.raises(ap.ConfigError, match="microbatch"):
        iterate({"wlb": {"microbatch": 3}})
    with pytest.raises(ap.ConfigError, match="batch"):
        plan_iteration([80, 20], CLUSTER, MODEL)


def test_uncapped_strategies_can_plan_an_iteration() -> None:
    """Each plan records its own cap, and the caps differ."""
    recipe = ap.Recipe("rings", {"pack": {"sequential": {"microbatches": 2}}, "shard": {"sequences": {}},
                                 "place": {"zigzag": {}}, "schedule": {"ring": {}}})  # fmt: skip
    found = plan_iteration(ap.Batch.from_lengths([800, 33, 7]), CLUSTER, MODEL, recipe)
    assert len({plan.request.policy.token_cap for plan in found.plans}) == 2
    assert IterationPlan.decode(found.encode()) == found


def test_the_report_adds_up(iteration: IterationPlan) -> None:
    reports = [plan.report for plan in iteration.plans]
    found = iteration.report
    assert found["tokens"] == sum(LENGTHS)
    assert found["bytes"]["total"] == sum(report["bytes"]["total"] for report in reports)
    assert found["area"] == {"default": sum(n * (n + 1) // 2 for n in LENGTHS)}
    assert found["imbalance"]["tokens"] == max(report["imbalance"]["tokens"] for report in reports)
    assert found["plans"] == [plan.id.hex() for plan in iteration.plans]
    assert (found["microbatches"], found["ranks"], found["sequences"]) == (3, 4, 8)
    makespan = found["bounds"]["makespan"]
    assert makespan["bound"] == sum(report["bounds"]["makespan"]["bound"] for report in reports)
    assert makespan["gap"] == pytest.approx(makespan["value"] / makespan["bound"])
    assert json.dumps(found)


def test_incomplete_or_malformed_reports_do_not_raise() -> None:
    count, bounds = len(TINY.request.batch.lengths), {"slots": 3, "kv_bytes": {"bound": None}}
    odd = {"tokens": "many", "bytes": {"total": 3, "x": None}, "bounds": bounds}
    plans = tuple(seal(replace(TINY, report=report)) for report in ({}, odd, odd))
    indexes = tuple(np.arange(count) + i * count for i in range(3))
    assert IterationPlan(plans, indexes).report["bounds"] == {}
    found = IterationPlan(plans[1:], indexes[:2]).report
    assert found["bytes"] == {"total": 6}
    assert "tokens" not in found


# ---------------------------------------------------------------------------------------------- Batch.take


def test_taken_sequences_keep_all_their_attributes() -> None:
    causal, full, shared = ap.masks.causal(), ap.masks.full(), ap.masks.shared_question(2, [1, 1])
    sequences = [
        Sequence(5, {"a": causal, "b": causal}, home_ranks=(2, 0)),
        Sequence(3, {"a": full, "b": causal}, positions=[7, 8, 9]),
        Sequence(6, {"a": causal, "b": causal}, labels=[1, 2, 3, 4, 5, -1]),
        Sequence(4, {"a": shared, "b": causal}),
    ]
    whole = ap.Batch.from_sequences(sequences)
    taken = whole.take([3, 1, 0])
    assert taken == ap.Batch.from_sequences([sequences[i] for i in (3, 1, 0)])
    assert taken.positions().tolist() == [0, 1, 2, 2, 7, 8, 9, 0, 1, 2, 3, 4]
    assert taken.home_ranks == {2: (2, 0)}
    assert whole.take(np.arange(4)) == whole
    assert whole.take([0, 2]).take([1]).labels().tolist() == whole.take([2]).labels().tolist()
    assert len(whole.take([0, 2]).masks["a"].specs) == 1


@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_taken_parts_have_the_areas_of_the_whole(lengths: list[int], rng: random.Random) -> None:
    batch = ap.Batch.from_lengths(lengths, ap.masks.sliding_window(4))
    order = rng.sample(range(len(lengths)), len(lengths))
    cut = rng.randrange(1, len(lengths) + 1)
    parts = [batch.take(part) for part in (order[:cut], order[cut:]) if part]
    assert sum(part.area("default") for part in parts) == batch.area("default")
    assert parts[0].lengths.tolist() == [lengths[i] for i in order[:cut]]


@pytest.mark.parametrize("indexes", [[], [0, 0], [2], [-1], [0.5], "01", None])
def test_invalid_indexes_of_take_are_refused(indexes: Any) -> None:
    with pytest.raises(ap.ConfigError):
        ap.Batch.from_lengths([4, 5]).take(indexes)


# ---------------------------------------------------------------------------------------------- construction


@pytest.mark.parametrize(
    ("indexes", "deferred", "message"),
    [
        ([], [], "as many arrays"),
        ([[0]], [], "as many arrays"),
        ([[0], [1, 2]], [], "an index for each of the 1 sequences"),
        ([[0], [0]], [], "0 is missing|1 is missing"),
        ([[0], [2]], [], "1 is missing"),
        ([[0], [1]], [3], "2 is missing"),
        ([[0], [1]], [3, 2], "must ascend"),
        ([[0], [-1]], [], "must be in"),
        ([[0], [1.5]], [], "must be an integer"),
    ],
)
def test_indexes_must_name_every_sequence_once(indexes: Any, deferred: list[int], message: str) -> None:
    with pytest.raises(ap.ConfigError, match=message):
        IterationPlan((TINY, TINY), tuple(indexes), np.array(deferred, np.int64))


def test_plans_of_an_iteration_must_share_their_request() -> None:
    policy = replace(TINY.request.policy, seed=9)
    for field, value in {"cluster": ap.Cluster(2, 1), "policy": policy, "hardware": "ab"}.items():
        other = seal(replace(TINY, request=replace(TINY.request, **{field: value})))
        with pytest.raises(ap.ConfigError, match=rf"plans\[1\].{field}"):
            IterationPlan((TINY, other), (np.array([0]), np.array([1])))
    with pytest.raises(ap.ConfigError, match="1 to 4096"):
        IterationPlan((), ())


def test_a_rank_beyond_the_last_is_refused(iteration: IterationPlan) -> None:
    assert iteration.ranks == 4
    with pytest.raises(ap.ConfigError, match="rank"):
        iteration.for_rank(4)


# ---------------------------------------------------------------------------------------------- bytes


def test_bytes_round_trip(iteration: IterationPlan) -> None:
    data = iteration.encode()
    back = IterationPlan.decode(data)
    assert back == iteration
    assert back.encode() == data
    assert [own.tolist() for own in back.indexes] == [own.tolist() for own in iteration.indexes]
    assert back.plans == iteration.plans
    assert back.report == iteration.report


def test_the_golden_iteration_stays_readable() -> None:
    found = IterationPlan.decode(GOLDEN)
    assert found.encode() == GOLDEN
    assert found.id.hex() == "628e88247739128950b6b956d060bcc1896ae193b35de1cc5106c87e227de399"
    assert found.plans[0] == TINY
    assert ([own.tolist() for own in found.indexes], found.deferred.tolist()) == ([[0], [1]], [2])


def id_from_prose(wire: dict[str, Any]) -> bytes:
    """The id, computed as FORMAT.md states, without any code of the package."""

    def h(data: bytes) -> bytes:
        return blake2b(data, digest_size=32).digest()

    ids = [msgpack.unpackb(plan)["id"] for plan in wire["plans"]]
    leaves = [part for plan, own in zip(ids, wire["indexes"], strict=False) for part in (plan, h(own))]
    return h(b"".join([b"apportion.iteration\0", *leaves, h(wire["deferred"])]))


def test_the_id_is_computed_as_the_prose_states(iteration: IterationPlan) -> None:
    wire = msgpack.unpackb(iteration.encode())
    assert list(wire) == ["format", "version", "plans", "indexes", "deferred", "id"]
    assert wire["id"] == iteration.id == id_from_prose(wire)
    text = (SCHEMAS / "FORMAT.md").read_text()
    assert all(f"| `{name}` |" in text for name in wire)
    assert f"1 to {MAX_MICROBATCHES} plans" in text


def test_iterations_fit_the_schema(iteration: IterationPlan) -> None:
    schema = json.loads((SCHEMAS / "iteration.schema.json").read_text())
    documents = [json.loads(path.read_text()) for path in SCHEMAS.glob("*.schema.json")]
    registry: Registry[Any] = Registry().with_resources(
        [(each["$id"], Resource.from_contents(each)) for each in documents]
    )
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema, registry=registry)
    faults = {"plans": [], "deferred": [1, 1], "id": "00", "format": "apportion.plan", "more": 1}
    for data in (GOLDEN, iteration.encode()):
        plain = msgpack.unpackb(data)
        columns = [np.frombuffer(own, "<u4").tolist() for own in (*plain["indexes"], plain["deferred"])]
        plans = [decoded(plan) for plan in plain["plans"]]
        plain |= {"plans": plans, "indexes": columns[:-1], "deferred": columns[-1], "id": plain["id"].hex()}
        validator.validate(plain)
        for name, fault in faults.items():
            assert not validator.is_valid(plain | {name: fault})


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "version": lambda wire: wire.update(version=[4, 0]),
    "format": lambda wire: wire.update(format="apportion.plan"),
    "no plans": lambda wire: wire.update(plans=[], indexes=[]),
    "a plan short": lambda wire: wire["plans"].pop(),
    "a column short": lambda wire: wire["indexes"].pop(),
    "half an index": lambda wire: wire["indexes"].__setitem__(0, b"\0\0"),
    "twice": lambda wire: wire["indexes"].__setitem__(1, wire["indexes"][0]),
    "beyond": lambda wire: wire.update(deferred=b"\xff\xff\xff\xff"),
    "descending": lambda wire: wire.update(deferred=np.array([3, 2], "<u4").tobytes()),
    "a damaged plan": lambda wire: wire["plans"].__setitem__(0, wire["plans"][0][:-1] + b"\0"),
    "unknown key": lambda wire: wire.update(more=1),
    "too many": lambda wire: wire.update(plans=[b""] * (MAX_MICROBATCHES + 1)),
    "no text": lambda wire: wire.update(plans="x"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_iterations_with_a_correct_id_are_refused(change: str) -> None:
    wire = msgpack.unpackb(GOLDEN)
    CHANGES[change](wire)
    if change in ("a plan short", "a column short", "half an index", "twice", "beyond", "descending"):
        wire["id"] = id_from_prose(wire)
    with pytest.raises(VersionError if change == "version" else DecodeError):
        IterationPlan.decode(msgpack.packb(wire))


def test_a_newer_minor_version_may_have_unknown_fields() -> None:
    wire = msgpack.unpackb(GOLDEN)
    data = msgpack.packb({**wire, "version": [3, 9], "more": [1, {}]})
    assert IterationPlan.decode(data).id == wire["id"]


def test_non_minimal_encodings_are_refused() -> None:
    assert GOLDEN[0] == 0x86
    with pytest.raises(DecodeError):
        IterationPlan.decode(b"\xde\x00\x06" + GOLDEN[1:])


@pytest.mark.parametrize(("old", "new"), [(b"\xa5plans\x92", b"\xa5plans\xdd\xff\xff\xff\xff"),
                                          (b"\xa8deferred\xc4\x04", b"\xa8deferred\xc6\xff\xff\xff\xff")])  # fmt: skip
def test_lengths_beyond_the_input_are_refused_before_anything_is_allocated(old: bytes, new: bytes) -> None:
    assert old in GOLDEN
    with pytest.raises(DecodeError):
        IterationPlan.decode(GOLDEN.replace(old, new))


def test_mutated_bytes_raise_only_typed_errors() -> None:
    rng, other = random.Random(11), (SCHEMAS / "golden/fcp.plan").read_bytes()
    for _ in range(1500):
        changed = rng.choice(fuzz_plans.RAW)(rng, GOLDEN, rng.choice((GOLDEN, other)))
        if changed != GOLDEN:
            with pytest.raises(DecodeError):
                IterationPlan.decode(changed)


def test_mutated_values_raise_only_typed_errors() -> None:
    """Changes a value and recomputes the id: the bytes are refused, or decode to an iteration with this id."""
    rng, refused = random.Random(12), 0
    for _ in range(1500):
        wire = fuzz_plans.change_inside(rng, msgpack.unpackb(GOLDEN))
        try:
            wire["id"] = id_from_prose(wire)
            packed = msgpack.packb(wire)
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError, RecursionError):
            continue  # the mutant is not of the types whose id can be computed
        try:
            assert IterationPlan.decode(packed).id == wire["id"]
        except DecodeError:
            refused += 1
    assert refused > 300

"""Jobs, requests, and the slices that a rank receives for an iteration."""

from __future__ import annotations

import json
import random
from dataclasses import fields

import msgspec
import numpy as np
import pytest

from apportion import Batch, Cluster, Hardware, Model, Policy, Sequence, masks, plan, plan_iteration
from apportion.ir.bytes.iteration import IterationPlan, encode_slices
from apportion.ir.bytes.iteration_slice import MOST_IMPLIED, IterationSlice
from apportion.ir.bytes.job import Job, decode_request, encode_request
from apportion.ir.errors import CapacityError, ConfigError, DecodeError, VersionError
from apportion.ir.request.sampling import Sampling, batches_of
from apportion.planner.recipe.recipes import find_recipe
from tests.support.formats import validator

CLUSTER, MODEL = Cluster(1, 4), Model(q_heads=4, kv_heads=2, head_dim=16, layers=2)
LENGTHS = [300, 120, 77, 500, 10, 64, 200]


def job(recipe: str = "fcp", **more: object) -> Job:
    return Job(CLUSTER, MODEL, Policy(find_recipe(recipe)), 256, **more)


def batches() -> tuple[Batch, ...]:
    return Batch.from_lengths(LENGTHS[:4]), Batch.from_lengths(LENGTHS[4:], masks.sliding_window(8))


def consecutive() -> IterationPlan:
    plans = tuple(plan(batch, CLUSTER, MODEL) for batch in batches())
    return IterationPlan(plans, (np.arange(4), np.arange(4, 7)))


@pytest.fixture(scope="module", params=["consecutive", "packed"])
def iteration(request: pytest.FixtureRequest) -> IterationPlan:
    if request.param == "consecutive":
        return consecutive()
    recipe = {"name": "w", "steps": {"pack": {"wlb": {"microbatches": 2, "tokens_per_rank": 256}}}}
    recipe["steps"] |= find_recipe("fcp").to_data()["steps"]
    return plan_iteration(Batch.from_lengths(LENGTHS), CLUSTER, MODEL, recipe)


def test_every_rank_can_prove_what_it_received(iteration: IterationPlan) -> None:
    for rank in range(4):
        piece = iteration.slice_for(rank)
        decoded = IterationSlice.decode(piece.encode())
        assert (decoded.id, decoded.rank, decoded.ranks) == (iteration.id, rank, 4)
        assert decoded.slices == iteration.for_rank(rank)
        assert all(np.array_equal(a, b) for a, b in zip(decoded.indexes, iteration.indexes, strict=True))
        assert decoded.encode() == piece.encode()


def test_all_slices_are_encoded_together(iteration: IterationPlan) -> None:
    assert encode_slices(iteration) == tuple(iteration.slice_for(rank).encode() for rank in range(4))


def test_a_changed_byte_is_detected(iteration: IterationPlan) -> None:
    data, rng = iteration.slice_for(1).encode(), random.Random(0)
    for _ in range(400):
        at, value = rng.randrange(len(data)), rng.randrange(256)
        if data[at] != value:
            with pytest.raises(DecodeError):
                IterationSlice.decode(data[:at] + bytes([value]) + data[at + 1 :])
    for size in rng.sample(range(len(data)), 50):
        with pytest.raises(DecodeError):
            IterationSlice.decode(data[:size])


def test_implied_indexes_of_a_slice_are_limited() -> None:
    data = msgspec.msgpack.decode(consecutive().slice_for(0).encode())
    data["counts"] = [4, MOST_IMPLIED]
    with pytest.raises(DecodeError, match="without indexes"):
        IterationSlice.decode(msgspec.msgpack.encode(data))
    data["version"] = [99, 0]
    with pytest.raises(VersionError):
        IterationSlice.decode(msgspec.msgpack.encode(data))


def test_an_iteration_slice_has_slices_of_one_rank() -> None:
    iteration = consecutive()
    mixed = (iteration.plans[0].for_rank(0), iteration.plans[1].for_rank(1))
    with pytest.raises(ConfigError, match="one rank"):
        IterationSlice(iteration.id, mixed, iteration.indexes)


def test_requests_round_trip() -> None:
    original = job(microbatches=2, hardware="a100")
    decoded, decoded_batches = decode_request(encode_request(original, batches()))
    assert decoded.to_data() == original.to_data()
    assert encode_request(decoded, decoded_batches) == encode_request(original, batches())
    assert decoded.request_key(decoded_batches) == original.request_key(batches())


def test_everything_that_a_plan_depends_on_changes_the_key() -> None:
    one, two = batches()
    base = job(microbatches=2)
    keys = {base.request_key(group) for group in ([one], [two], [one, two], [two, one])}
    keys |= {other.request_key([one]) for other in (job("zeppelin"), job(hardware="a100"))}
    assert len(keys) == 6
    more = Job(CLUSTER, MODEL, base.policy, 512)
    # the number of tokens comes only from the batch
    assert more.request_key([one]) == base.request_key([one])
    assert job("wlb").request_key([one]) != job("wlb", microbatches=2).request_key([one])


def test_damaged_requests_are_refused() -> None:
    data, rng = encode_request(job(microbatches=2), batches()), random.Random(1)
    refused = 0
    for _ in range(300):
        at = rng.randrange(len(data))
        try:
            decode_request(data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :])
        except DecodeError:
            refused += 1
    assert refused > 200  # other changed bytes give another valid request


def test_a_request_that_does_not_fit_its_job_is_refused() -> None:
    one, two = batches()
    with pytest.raises(ConfigError, match="1 to 1"):
        job().check([one, two])
    with pytest.raises(ConfigError, match="packs all"):
        job("wlb", microbatches=2).check([one, two])
    with pytest.raises(CapacityError, match="1100 tokens"):
        job().check([Batch.from_lengths([1100])])


def test_jobs_from_data_cannot_name_hardware_files() -> None:
    data = job().to_data() | {"hardware": "/etc/passwd"}
    with pytest.raises(ConfigError, match="built-in"):
        Job.from_data(data)
    assert Job.from_data(job().to_data() | {"hardware": "h100"}).hardware is not None


def test_an_epoch_has_every_sample_once() -> None:
    sampling = Sampling(LENGTHS, 600, microbatches=2, seed=3)
    epochs = [sampling.epoch(number) for number in (0, 1)]
    for epoch in epochs:
        drawn = np.concatenate([group for groups in epoch for group in groups])
        assert sorted(drawn.tolist()) == list(range(len(LENGTHS)))
        assert all(np.asarray(LENGTHS)[group].sum() <= 600 for groups in epoch for group in groups)
    assert str(epochs[0]) != str(epochs[1])
    assert str(epochs[0]) == str(sampling.epoch(0))
    numpy_numbers = Sampling(LENGTHS, np.int16(600), np.uint8(2), np.uint64(3))
    assert str(epochs[0]) == str(numpy_numbers.epoch(0))
    assert {type(value) for value in (numpy_numbers.tokens, numpy_numbers.seed)} == {int}
    with pytest.raises(CapacityError, match="sample 3"):
        Sampling(LENGTHS, 499)


def test_samples_keep_their_masks() -> None:
    groups, own = [np.array([2, 0]), np.array([1])], [masks.full(), None, masks.sliding_window(4)]
    first, second = batches_of(groups, [5, 6, 7], own, packs=False)
    assert first == Batch.from_sequences([Sequence(7, masks.sliding_window(4)), Sequence(5, masks.full())])
    assert second == Batch.from_lengths([6])
    (together,) = batches_of(groups, [5, 6, 7], masks.full(), packs=True)
    assert together == Batch.from_lengths([7, 5, 6], masks.full())
    with pytest.raises(ConfigError, match="masks"):
        batches_of(groups, [5, 6, 7], own[:2], packs=False)


def test_the_job_schema_matches_the_code() -> None:
    schema = validator("job")
    for item in (job(hardware="a100"), job()):
        schema.validate(json.loads(json.dumps(item.to_data())))
    assert set(schema.schema["properties"]) == {item.name for item in fields(Job)}
    assert schema.schema["properties"]["hardware"]["anyOf"][1]["enum"] == list(Hardware.builtin())
    for wrong in ({"tokens_per_rank": 0}, {"microbatches": 0}, {"cluster": None}, {"hardware": "abacus"}):
        assert not schema.is_valid(job().to_data() | wrong)

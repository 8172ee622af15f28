"""Jobs: the plans of an iteration, a pure function of the request."""

from __future__ import annotations

from dataclasses import replace

import pytest

from apportion.ir.bytes.job import Job, decode_request, encode_request
from apportion.ir.errors import CapacityError, ConfigError
from apportion.ir.masks import specs as masks
from apportion.ir.request.batch import Batch
from apportion.ir.request.model import Model
from apportion.ir.request.policy import Policy, Recipe
from apportion.planner import api
from apportion.planner.iteration.iterate import plan_iteration
from apportion.planner.iteration.jobs import plan_job
from apportion.planner.recipe.recipes import find_recipe
from tests.support.programs import run_python
from tests.support.sparse import sparse_product
from tests.support.strategies import STRATEGIES, WIDE, cluster

MODEL = Model(q_heads=4, kv_heads=2, head_dim=16, layers={"global": 1, "local": 3})
KINDS = {"global": masks.causal(), "local": masks.sliding_window(7)}
LENGTHS = ([33, 20, 7, 1], [50, 9, 3])


def batches(packs: bool = False) -> tuple[Batch, ...]:
    groups = ([*LENGTHS[0], *LENGTHS[1]],) if packs else LENGTHS
    return tuple(Batch.from_lengths(lengths, mask=KINDS) for lengths in groups)


def job(recipe: Recipe | str, ranks: int = 4, **more: object) -> Job:
    policy = Policy(find_recipe(recipe))
    return Job(cluster(ranks), MODEL, policy, 64, 2, **more)


@pytest.mark.parametrize(("name", "ranks"), sparse_product(7, [*STRATEGIES, *WIDE], (2, 4, 6)))
def test_a_decoded_request_gives_the_same_bytes(name: str, ranks: int) -> None:
    request = job(Recipe(name, {**STRATEGIES, **WIDE}[name]), ranks)
    data = encode_request(request, batches(request.packs))
    assert plan_job(*decode_request(data)).encode() == plan_job(request, batches(request.packs)).encode()


def test_a_batch_is_planned_as_one_microbatch_like_a_single_plan() -> None:
    planned = plan_job(job("fcp"), batches())
    assert planned.plans == tuple(api.plan(each, cluster(4), MODEL, "fcp") for each in batches())
    assert [own.tolist() for own in planned.indexes] == [[0, 1, 2, 3], [4, 5, 6]]


def test_a_packing_recipe_uses_the_parameters_of_the_job() -> None:
    request = job("wlb")
    (batch,) = batches(packs=True)
    planned = plan_job(request, (batch,))
    step = {"wlb": {"microbatches": 2, "tokens_per_rank": 64}}
    recipe = Recipe("wlb", find_recipe("wlb").to_data()["steps"] | {"pack": step})
    assert planned.encode() == plan_iteration(batch, cluster(4), MODEL, recipe).encode()
    assert len(planned.plans) == 2


def test_few_sequences_make_as_many_microbatches() -> None:
    request = replace(job("wlb"), microbatches=5)
    batch = Batch.from_lengths([30, 20, 10], mask=KINDS)
    assert len(plan_job(request, (batch,)).plans) == 3


def test_deferring_is_refused() -> None:
    steps = find_recipe("wlb").to_data()["steps"] | {"pack": {"wlb": {"defer": True}}}
    with pytest.raises(ConfigError, match=r"recipe\.pack\.defer"):
        plan_job(job(Recipe("w", steps)), batches(packs=True))


def test_the_wrong_number_of_batches_is_refused() -> None:
    with pytest.raises(ConfigError, match="batches"):
        plan_job(job("wlb"), batches())
    with pytest.raises(CapacityError, match=r"batches\[0\]"):
        plan_job(job("fcp"), (Batch.from_lengths([300], mask=KINDS),))


def packed_id() -> str:
    return plan_job(job("wlb"), batches(packs=True)).id.hex()


def test_an_iteration_is_the_same_under_another_hash_seed() -> None:
    code = "from tests.planner.iteration.test_jobs import packed_id; print(packed_id())"
    assert run_python("-c", code, env={"PYTHONHASHSEED": "77"}).split() == [packed_id()]

"""NeMo Automodel's sharder with plans, through its own class and dispatch; installed without dependencies of models."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest

from apportion.ir.errors import ConfigError

pytest.importorskip("nemo_automodel")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("nemo_automodel.components.distributed.context_parallel", exc_type=ImportError)
    from apportion.trainer.automodel import planned
    from tests.adapters import jobs_automodel
    from tests.adapters.jobs_hf import new_model


def test_sharder_operations_match_the_plan(pool: Any) -> None:
    results = pool.run(jobs_automodel.sharder_operations, 4)
    fullest = max(one["rows"][0] for one in results)
    for one in results:
        assert one["full"]
        assert one["shard"]
        assert one["gradients"]
        assert one["tokens"]
        assert one["labels"]
        assert one["plan"]
        assert one["ignored"] <= {-100}
        assert one["keys"] == [
            "apportion",
            "apportion_last_position",
            "input_ids",
            "labels",
            "note",
            "position_ids",
        ]
        assert one["rows"][1] == fullest
        assert one["padding"] == [[-1.0, -1.0]] * (fullest - one["rows"][0])
    assert {one["rows"][0] for one in results} != {fullest}


@pytest.mark.parametrize("tp", [1, 2])
def test_a_planned_step_has_the_loss_of_one_process(pool: Any, tp: int) -> None:
    for error, loss in pool.run(jobs_automodel.train_step, 4, 4 // tp, True, True, tp):
        assert not error
        assert loss == pytest.approx(jobs_automodel.plain((61, 40, 9)), rel=1e-5)


NO_SHARDER = "requested no sharder, so the plan would be ignored; set it to the plan's number of ranks"
PLAN_OF_ALL = (
    r"cp_size = 2: the loader plans for ranks \[0, 1, 2, 3\], but the cp mesh has ranks \[(0, 1|2, 3)\]"
)
SAME_SAMPLES = (
    r"replicas = 1: the loader gives 1 groups of ranks their own samples, but the mesh has 2; .*dp group"
)
A_RANKS_LABELS = r"labels = .*the microbatch has 107 on all ranks; pass planned\.gather_tokens"
TP_APART = r"tensor-parallel ranks.* have read different batches"


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ((1, True), NO_SHARDER),
        ((1, True, False), NO_SHARDER),
        ((2, True), PLAN_OF_ALL),
        ((2, True, True, 1, False, True), SAME_SAMPLES),
        ((4, False), A_RANKS_LABELS),
        ((2, True, True, 2, True), TP_APART),
    ],
)
def test_steps_that_would_train_on_other_tokens_or_divisors_are_refused(
    pool: Any, step: tuple[Any, ...], message: str
) -> None:
    for error, _ in pool.run(jobs_automodel.train_step, 4, *step):
        assert re.search(message, error), error


def test_a_model_that_is_not_enabled_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM.*not enabled.*hf\.enable"):
        planned(new_model("llama"))

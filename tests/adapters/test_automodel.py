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


def test_a_planned_step_has_the_loss_of_one_process(pool: Any) -> None:
    for error, loss in pool.run(jobs_automodel.train_step, 4, 4, True):
        assert not error
        assert loss == pytest.approx(jobs_automodel.plain((61, 40, 9)), rel=1e-5)


@pytest.mark.parametrize(
    ("cp", "whole", "message"),
    [
        (
            1,
            True,
            "requested no sharder, so the plan would be ignored; set it to the plan's number of ranks",
        ),
        (4, False, r"labels = .*the microbatch has 107 on all ranks; pass planned\.gather_tokens"),
    ],
)
def test_steps_without_a_plan_and_with_a_ranks_labels_are_refused(
    pool: Any, cp: int, whole: bool, message: str
) -> None:
    for error, _ in pool.run(jobs_automodel.train_step, 4, cp, whole):
        assert re.search(message, error), error


def test_a_model_that_is_not_enabled_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM.*not enabled.*hf\.enable"):
        planned(new_model("llama"))

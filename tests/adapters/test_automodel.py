"""NeMo Automodel's sharder, by its own class and dispatch; installed without the dependencies of its models."""

from __future__ import annotations

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
    from tests.adapters.jobs_hf import made


def test_sharder_operations_match_the_plan(pool: Any) -> None:
    found = pool.run(jobs_automodel.verbs, 4)
    fullest = max(one["rows"][0] for one in found)
    for one in found:
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
    assert {one["rows"][0] for one in found} != {fullest}


def test_a_model_that_is_not_enabled_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM.*not enabled.*hf\.enable"):
        planned(made("llama"))

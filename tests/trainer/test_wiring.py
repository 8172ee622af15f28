"""Checks in the first steps stop custom loops that would train a wrong model, but not correct loops."""

from __future__ import annotations

import re

import pytest

from tests.ranks import jobs_wiring
from tests.ranks.rank_pool import Pool
from tests.support.sparse import sparse


@pytest.mark.parametrize(
    "mistake",
    sparse(
        [
            *("", "chunks", "ddp summed", "ddp averaged over", "ddp by hand", "fsdp summed"),
            *("fsdp averaged over", "fsdp by hand", "fsdp summed clipped by norm"),
            *("fsdp summed clipped by value", "fsdp summed in backward", "experts", "evaluated"),
        ],
        3,
    ),
)
def test_correct_loops_train(pool: Pool, mistake: str) -> None:
    assert pool.errors(jobs_wiring.trained, 2, mistake) == ["", ""]


SUMS = "sums gradients"
EARLIER = "ExecutionError: attention of some layers used the plan of an earlier batch"
CLIPPED = "ExecutionError: ranks multiplied the gradients of their shards by different.*full_tensor"


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("forgotten", r"ExecutionError: gradients differ between ranks.*ap\.sum_gradients\(model\)"),
        pytest.param("compiled", r"ExecutionError: gradients differ between ranks", marks=pytest.mark.slow),
        ("second", r"ExecutionError: gradients differ between ranks"),
        ("ddp", r"ConfigError: model = 'DistributedDataParallel': averages gradients.*averaged_over=2"),
        ("fsdp", r"ConfigError: model = 'FSDP2': averages gradients.*ap\.sum_gradients"),
        ("fsdp layers", r"ConfigError: model = 'FSDP2': averages gradients"),
        ("seeds", r"ExecutionError: parameters differ between ranks, 7 of 9"),
        ("sinks", r"ExecutionError: parameters differ between ranks, 1 of 9, first of shape \(2,\)"),
        ("here", r"ConfigError: valid_tokens.*labels of all ranks.*pass batch\.valid_tokens"),
        ("copied", r"ConfigError: valid_tokens.*labels of all ranks"),
        ("tokens", r"ConfigError: labels = .*pass batch\.labels"),
        ("next tokens", r"ConfigError: labels = .*pass batch\.labels"),
        ("next labels", r"ConfigError: labels = 'batch\.labels\[1:\]': .*shifted again"),
        ("halves", r"UserWarning: the loss is divided by 2, .*remove that"),
        ("kinds", r"UserWarning: no layer has called attention of the kinds \['wide'\]: give each its kind="),
        ("clipped", r"ConfigError: model = 'Net': has gradients that were clipped.*clip or unscale after it"),
        ("fsdp summed clipped by shards", CLIPPED),
        ("frozen", r"ExecutionError: parameters differ between ranks, 1 of 9, first of shape \(800, 16\)"),
        ("weights", r"ConfigError: weights = None: samples have loss_weights.*batch\.total_weight"),
        ("sdpa", r"ExecutionError: attention \(ScaledDotProduct.*rows of this rank, without the plan"),
        ("softmax", r"ExecutionError: attention \(Softmax.*rows of this rank, without the plan"),
        ("twice", r"ConfigError: model = 'Net': has gradients that are sums already"),
        ("every second", r"ConfigError: model = 'Net': has gradients that are sums already"),
        ("early", r"ExecutionError: an optimizer stepped after microbatch 0 of iteration 0"),
        ("skipped", r"UserWarning: microbatches \[0\] of iteration 0 had no loss before the step"),
        (
            "both averaged over",
            rf"ConfigError: model = 'Net': {SUMS}.*leave out sum_gradients, or averaged_over",
        ),
        ("ddp both averaged over", rf"ConfigError: model = 'Distributed.*{SUMS}, but the loss is also mult"),
        ("fsdp both averaged over", rf"ConfigError: model = 'FSDP2': {SUMS}, but the loss is also mult"),
        ("deaf", r"ExecutionError: attention used the plan 0 times"),
        ("kept", EARLIER),
        ("kept rows", EARLIER),
    ],
)
def test_wrong_loops_fail_at_once(pool: Pool, mistake: str, message: str) -> None:
    for result in pool.errors(jobs_wiring.trained, 2, mistake):
        assert re.match(message, result), result


@pytest.mark.parametrize("is_kept", [False, True])
def test_models_without_plans_train_after_a_planned_one(pool: Pool, is_kept: bool) -> None:
    assert pool.errors(jobs_wiring.trained_before, 2, is_kept) == ["", ""]


def test_a_module_in_another_wrapper_sums_gradients_once(pool: Pool) -> None:
    assert pool.run(jobs_wiring.wrapped_again, 2) == [[2.0, 2.0, 2.0]] * 2


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("", ""),
        ("own group", "gradients differ"),
        ("fsdp of a group", "gradients differ"),
        ("seeds", "parameters differ"),
    ],
)
def test_groups_that_train_different_models_fail(pool: Pool, mistake: str, message: str) -> None:
    for result in pool.errors(jobs_wiring.replicated, 2, mistake):
        assert re.match(f"ExecutionError: {message} between ranks" if message else "$", result), result


def test_shards_over_a_part_of_the_ranks_need_the_gradients_of_all() -> None:
    ranks = Pool(size=4)  # all processes of a pool must make its meshes, or later groups wait for the others
    try:
        for kind, message in (
            ("all", "$"),
            ("two by hand", "$"),
            ("two", "ExecutionError: gradients differ"),
        ):
            for result in ranks.errors(jobs_wiring.sharded, 4, kind):
                assert re.match(message, result), result
    finally:
        ranks.close()

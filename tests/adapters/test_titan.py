"""TorchTitan's trainer with plans on 2 and 4 ranks matches its own attention on the same documents in one process."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.rank_pool import Pool, RankError

pytest.importorskip("torchtitan")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns when torchtitan imports it
    from tests.adapters import jobs_titan
    from tests.adapters.jobs_titan import Case

CLOSE = 5e-7


@pytest.fixture(scope="module")
def one() -> Iterator[Any]:
    ranks = Pool(timeout_s=600, size=1)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def two() -> Iterator[Any]:
    ranks = Pool(timeout_s=600, size=2)
    yield ranks
    ranks.close()


def own(pool: Any, case: Any) -> Any:
    """Records of Titan's own trainer in one process, which holds the whole batch."""
    return pool.run(jobs_titan.train, 1, True, replace(case, tp=1, pp=1, ping_pong=False, ticks=0))[0][0]


def planned(pool: Any, ranks: int, case: Any) -> Any:
    """Records of steps, equal on all ranks, and each rank's number of rounds."""
    found = pool.run(jobs_titan.train, ranks, False, case)
    assert all(records == found[0][0] for records, _ in found)
    return found[0][0], [rounds for _, rounds in found]


def test_the_installed_titan_version_is_the_tested_one() -> None:
    assert version("torchtitan") == "0.3.0"


@pytest.mark.parametrize(
    ("ranks", "case"),
    [
        (2, Case(microbatches=2, checkpoint="selective")),
        (2, Case(model="lora", microbatches=2)),
        (2, Case(model="gpt_oss", checkpoint="full", chunked=False)),
        (4, Case(model="gpt_oss", checkpoint="selective")),
        (4, Case(tp=2)),
        (2, Case(microbatches=2, ping_pong=True)),
        (2, Case(microbatches=4, ping_pong=True, checkpoint="full")),
    ],
)
def test_losses_equal_own_attention(one: Any, two: Any, pool: Any, ranks: int, case: Any) -> None:
    steps, _ = planned(two if ranks == 2 else pool, ranks, case)
    for found, expected in zip(steps, own(one, case), strict=True):
        assert found == pytest.approx(expected, abs=CLOSE, rel=2e-6 if found[0] == "validation" else 1e-6)
    assert len(steps) == case.steps


@pytest.mark.parametrize(
    "case",
    [
        Case(pp=2, microbatches=3, ticks=1),
        Case(pp=2, microbatches=2, ticks=2, layers=4, chunked=False, steps=2),
    ],
)
def test_a_pipeline_of_ticks_trains_like_one_process(one: Any, pool: Any, case: Any) -> None:
    """On two stages of two replicas each. The gradient norm covers all stages; only the last stage has losses."""
    found = pool.run(jobs_titan.train, 4, False, case)
    expected = own(one, case)
    for rank, (records, _) in enumerate(found):
        assert [norm for _, norm in records] == pytest.approx([norm for _, norm in expected], rel=1e-6)
        if rank >= 2:
            assert [loss for loss, _ in records] == pytest.approx([loss for loss, _ in expected], abs=CLOSE)


def test_the_varlen_backend_without_a_gpu_equals_flex(one: Any, two: Any) -> None:
    """Titan's varlen attention declares its window itself; results must match flex."""
    case = Case(model="gpt_oss", chunked=False)
    steps, _ = planned(two, 2, replace(case, backend="varlen"))
    assert [loss for loss, _ in steps] == pytest.approx([loss for loss, _ in own(one, case)], abs=CLOSE)


def test_bf16(one: Any, two: Any) -> None:
    case = Case(dtype="bfloat16")
    steps, _ = planned(two, 2, case)
    assert [loss for loss, _ in steps] == pytest.approx([loss for loss, _ in own(one, case)], abs=5e-3)


def test_selective_checkpointing_keeps_attention_and_full_does_not(two: Any) -> None:
    counts = {name: planned(two, 2, Case(checkpoint=name, steps=1)) for name in jobs_titan.CHECKPOINTS}
    losses = {name: steps for name, (steps, _) in counts.items()}
    rounds = {name: sum(of_ranks) for name, (_, of_ranks) in counts.items()}
    assert losses["none"] == losses["full"] == losses["selective"]
    assert rounds["none"] == rounds["selective"] < rounds["full"]


def test_validation_between_steps(one: Any, two: Any) -> None:
    case = Case(validate=True, steps=3)
    steps, _ = planned(two, 2, case)
    expected = own(one, case)
    assert [name for name, _ in steps if name == "validation"] == ["validation"] * 2
    for found, known in zip(steps, expected, strict=True):
        assert found[-1] == pytest.approx(known[-1], abs=3e-6)


def test_a_killed_run_resumes_within_a_pass(two: Any, tmp_path: Path) -> None:
    case = Case(microbatches=2, steps=5)
    whole, _ = planned(two, 2, case)
    saved = replace(case, folder=str(tmp_path))
    with pytest.raises(RankError, match="died"):
        planned(two, 2, replace(saved, last_step=2))
    rest, _ = planned(two, 2, saved)
    assert rest == whole[2:]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallelism": {"context_parallel_degree": 2}}, "context_parallel_degree = 2"),
        (
            {"training": {"global_batch_size": 4}},
            "microbatches of global_batch_size = 2: a step is an iteration",
        ),
        ({"training": {"local_batch_size": 2, "global_batch_size": 4}}, "local_batch_size = 2"),
        ({"training": {"seq_len": 32}}, "sequence length = 32"),
        ({"dataloader": {"dataset": "documents.missing"}}, "must name a function"),
    ],
)
def test_unsupported_configs_are_refused_before_training(two: Any, changes: Any, message: Any) -> None:
    for error in two.run(jobs_titan.refusal, 2, Case(changes=changes)):
        assert message in error


def test_tensor_parallel_ranks_that_read_different_tokens_are_refused(two: Any) -> None:
    case = Case(tp=2, changes={"dataloader": {"dataset": "documents.differing_documents"}})
    with pytest.raises(
        RankError, match=r"ExecutionError: tensor-parallel ranks, or stages .* different batches"
    ):
        two.run(jobs_titan.train, 2, False, case)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("deepseek", "attention = 'torchtitan.models.deepseek_v3.model': must be grouped-query attention"),
        ("ahead", "mtp_layers = 1: a rank's next rows are not the next tokens"),
    ],
)
def test_unsupported_models_are_refused(two: Any, model: Any, message: Any) -> None:
    for error in two.run(jobs_titan.refusal, 2, Case(model=model)):
        assert message in error


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (Case(model="OwnFlex"), "layers.0.attention.inner_attention = 'OwnFlex': does not support plans"),
        (Case(model="OwnMasks"), "OwnMasks.get_attention_masks = "),
        (Case(model="windows"), "windows of layers = [7, 8]"),
        (Case(model="OwnBlock", microbatches=2, ping_pong=True), "OwnBlock.forward = "),
        (Case(model="OwnBlock", microbatches=2, pp=2, ticks=1), "OwnBlock.forward = "),
        (Case(model="OwnModel", microbatches=2, pp=2, ticks=1), "OwnModel.forward = "),
    ],
)
def test_own_code_that_plans_would_leave_out_is_refused(two: Any, case: Any, message: Any) -> None:
    for error in two.run(jobs_titan.refusal, 2, case):
        assert message in error


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (Case(checkpoint="full"), "activation_checkpoint = "),
        (Case(layers=3), "layers = 3"),
        (Case(model="gpt_oss"), "has no dense feed-forward network"),
    ],
)
def test_configs_that_ticks_cannot_run_are_refused(two: Any, case: Any, message: Any) -> None:
    for error in two.run(jobs_titan.refusal, 2, replace(case, pp=2, microbatches=2, ticks=1)):
        assert message in error


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("own", "layers.1.attention.inner_attention = 'ScaledDotProductAttention': does not support plans"),
        ("bypass", "attention used the plan 1 times in at least 2 layers"),
    ],
)
def test_layers_that_would_not_use_the_plan_are_refused(two: Any, fault: str, message: str) -> None:
    for error in two.run(jobs_titan.refusal, 2, Case(fault=fault)):
        assert message in error

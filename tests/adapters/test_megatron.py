"""Megatron-Core's GPTModel and schedules with plans on 2 and 4 ranks match its own attention in one process."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from apportion.ir.errors import ConfigError, ExecutionError
from tests.ranks.rank_pool import Pool, RankError

pytest.importorskip("megatron.core")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core import parallel_state
    from megatron.core.ssm.mamba_block import MambaStack, MambaStackSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec

    from apportion.trainer.megatron import CheckedSteps, _check, _padding, planned_spec
    from tests.adapters import jobs_megatron
    from tests.adapters.jobs_megatron import Case, OwnGPTModel

LOSS, GRADIENT = 1e-6, 4e-6  # absolute: some roundings of losses of 3; CPUs differ in the order of sums
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
CORE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Any]:
    """One pool per number of ranks, since Megatron uses the whole world."""
    pools = {size: Pool(timeout_s=600, size=size) for size in (1, 2, 4)}
    yield pools
    for pool in pools.values():
        pool.close()


def own(ranks: Any, case: Any) -> Any:
    case = replace(case, tp=1, pp=1, options={}, ping_pong=False, ticks=False)
    return ranks[1].run(jobs_megatron.train, 1, True, case)[0]


def test_the_installed_megatron_version_is_the_tested_one() -> None:
    assert version("megatron-core") == "0.16.1"


@pytest.mark.parametrize(
    ("size", "case"),
    [
        (2, Case(microbatches=2, options=FULL)),
        (2, Case(positions="learned_absolute", spec="block")),
        (2, Case(model="gpt_oss", options=CORE)),
        (4, Case(model="gpt_oss", microbatches=2)),
        (4, Case(model="gpt_oss", tp=2)),
        (4, Case(model="gated_delta_net", spec="block", microbatches=2, options=FULL)),
        (4, Case(model="gated_delta_net", spec="block", tp=2)),
        (4, Case(pp=2, microbatches=2)),
        (2, Case(model="gpt_oss", microbatches=2, options=FULL, ping_pong=True)),
        (4, Case(tp=2, microbatches=4, ping_pong=True)),
        (4, Case(pp=2, microbatches=3, ticks=True)),
    ],
)
def test_losses_and_gradients_equal_own_attention(ranks: Any, size: Any, case: Any) -> None:
    expected, gradients = own(ranks, case)
    results = ranks[size].run(jobs_megatron.train, size, False, case)
    for losses, _ in results:
        assert losses == pytest.approx(expected, abs=LOSS) or losses == [None] * case.steps
    assert any(losses[0] is not None for losses, _ in results)
    if case.tp == case.pp == 1:
        for name, gradient in gradients.items():
            np.testing.assert_allclose(results[0][1][name], gradient, atol=GRADIENT, err_msg=name)


EXPERTS = {"num_moe_experts": 4, "moe_token_dispatcher_type": "allgather", "moe_ffn_hidden_size": 64}
BIASED = {
    "moe_router_load_balancing_type": "none",
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
    "moe_router_bias_update_rate": 0.05,
}
BALANCED = {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 2.0}


@pytest.mark.parametrize("router", [BALANCED, {"moe_z_loss_coeff": 1.0}], ids=["balanced", "z"])
def test_router_losses_equal_one_rank(ranks: Any, router: Any) -> None:
    case = Case(microbatches=2, spec="block", options={**EXPERTS, **router})
    ((expected, gradients),) = ranks[1].run(jobs_megatron.train, 1, False, case)
    padded = replace(case, rows=64)  # padding does not count as tokens
    losses, results = ranks[2].run(jobs_megatron.train, 2, False, padded)[0]
    assert losses == pytest.approx(expected, abs=1e-6)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(results[name], gradient, atol=1e-5 * np.abs(gradient).max(), err_msg=name)


def test_router_bias_equals_one_rank(ranks: Any) -> None:
    case = Case(microbatches=2, spec="block", options={**EXPERTS, **BIASED})
    ((expected, gradients),) = ranks[1].run(jobs_megatron.train, 1, False, case)
    losses, results = ranks[2].run(jobs_megatron.train, 2, False, case)[0]
    assert losses == pytest.approx(expected, abs=1e-6)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(results[name], gradient, atol=GRADIENT, err_msg=name)


def test_bf16(ranks: Any) -> None:
    case = Case(dtype=torch.bfloat16)
    losses, _ = ranks[2].run(jobs_megatron.train, 2, False, case)[0]
    assert losses == pytest.approx(own(ranks, case)[0], abs=1e-2)


def test_a_killed_run_resumes_within_a_pass(ranks: Any, tmp_path: Path) -> None:
    case = Case(microbatches=2, steps=5)
    whole, _ = ranks[2].run(jobs_megatron.train, 2, False, case)[0]
    saved = replace(case, folder=str(tmp_path))
    first, _ = ranks[2].run(jobs_megatron.train, 2, False, replace(saved, steps=2))[0]
    ranks[2].close()  # kills its processes; other pools continue
    rest, _ = ranks[2].run(jobs_megatron.train, 2, False, saved)[0]
    assert first + rest == whole


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (Case(options={"attention_dropout": 0.1}), "attention_dropout = 0.1"),
        (Case(options={"calculate_per_token_loss": False}), "calculate_per_token_loss = False"),
        (Case(divides=False), "finalize_model_grads_func = None"),
        (Case(positions="mrope", options={"mrope_section": [1, 1, 2]}), "position_embedding_type = 'mrope'"),
        (Case(positions="learned_absolute", longest=32), "sequence length = "),
        (Case(spec="own"), "core_attention = 'DotProductAttention': does not support plans"),
        (Case(options={"window_size": (6, 3)}), "window_size = (6, 3)"),
        (Case(spec="recurrent"), "layers.1 = 'TransformerLayer': has no core_attention"),
        (Case(bypasses=True), "attention used the plan 1 times in at least 2 layers"),
        (Case(options={"mtp_num_layers": 1}), "mtp_num_layers = 1"),
        (
            Case(microbatches=2, options=CORE, ping_pong=True),
            "recompute_granularity = 'selective': layers run in",
        ),
        (Case(microbatches=2, options={"num_moe_experts": 4}, ping_pong=True), "num_moe_experts = 4"),
        (
            Case(model="gated_delta_net", spec="block", microbatches=2, ping_pong=True),
            "experimental_attention_variant = 'gated_delta_net': recurrent layers do not take turns",
        ),
        (
            Case(options={"num_moe_experts": 4, "moe_expert_capacity_factor": 1.0}),
            "moe_expert_capacity_factor",
        ),
        (Case(options={"num_moe_experts": 4, "moe_router_load_balancing_type": "sinkhorn"}), "'sinkhorn'"),
        (Case(options={"num_moe_experts": 4, "moe_aux_loss_coeff": 0.01}), "global_aux_loss"),
        (Case(options={**EXPERTS, **BIASED, **BALANCED}), "moe_router_enable_expert_bias = True"),
        (
            Case(spec="block", options={**EXPERTS, **BIASED}, rows=64),
            "cannot exclude padding from its token counts",
        ),
        (
            Case(spec="block", options={**EXPERTS, "expert_model_parallel_size": 2}),
            "needs the same number of rows on all",
        ),
        (
            Case(spec="block", tp=2, options={**EXPERTS, "expert_tensor_parallel_size": 1}),
            "expert_tensor_parallel_size = 1: Megatron would not sum experts' gradients",
        ),
        (Case(model="gpt_oss", masked=True), "give a mask of each kind"),
        (Case(unscaled=True), "model = 'Unscaled': does not divide gradients"),
        (Case(spec="own core"), "OwnCore.forward = "),
        (Case(spec="own layer", microbatches=2, ping_pong=True), "OwnLayer._forward_attention = "),
        (Case(kind=OwnGPTModel, pp=2, microbatches=2, ticks=True), "OwnGPTModel._preprocess = "),
    ],
)
def test_unsupported_configs_are_refused(ranks: Any, case: Any, message: Any) -> None:
    for error in ranks[2].run(jobs_megatron.refusal, 2, case):
        assert message in error


def test_a_step_of_weighted_samples_must_be_one_iteration(ranks: Any) -> None:
    """A step of half an iteration would divide by the loss weights of the whole iteration."""
    case = Case(microbatches=2, weighted=True)
    (whole, *_), (half, *_), (two, *_) = (
        ranks[2].run(jobs_megatron.weighted_steps, 2, case, number) for number in (2, 1, 4)
    )
    assert len(whole) == 2
    assert half.startswith("microbatches of a step = 1: must be one iteration of the loader")
    assert two.startswith("microbatches of a step = 4: must be one iteration of the loader")


@pytest.mark.parametrize("case", [Case(tp=2, apart=True), Case(pp=2, microbatches=2, apart=True)])
def test_parts_of_a_model_that_read_different_batches_are_refused(ranks: Any, case: Any) -> None:
    with pytest.raises(
        RankError, match=r"ExecutionError: tensor-parallel ranks, or stages .* different batches"
    ):
        ranks[2].run(jobs_megatron.train, 2, False, case)


def test_chunks_of_a_stage_that_read_different_batches_are_refused_at_once() -> None:
    """Other stages would wait for hidden states of their rows."""
    tokens, handle = (torch.arange(3), torch.arange(4)), SimpleNamespace(name="plan")
    first, second = (SimpleNamespace(handle=handle, tokens=one, labels=one, fields={}) for one in tokens)
    steps: Any = CheckedSteps(print)
    for chunk in (0, 1):
        steps.note(chunk, [first])
    steps.note(0, [second])
    with pytest.raises(ExecutionError, match="chunks of this stage have read different batches: give each"):
        steps.note(1, [first])


def test_later_stages_get_their_rows_of_the_padding_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron splits it over tensor-parallel ranks on the first stage only."""
    config = SimpleNamespace(sequence_parallel=True, tensor_model_parallel_size=2, num_moe_experts=4)
    config.moe_router_enable_expert_bias, config.moe_token_dispatcher_type = False, "alltoall"
    rows: Any = SimpleNamespace(sample_ids=torch.tensor([0, 0, 1, -1]))
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_rank", lambda: 1)
    masks = [_padding(rows, SimpleNamespace(config=config, pre_process=first)) for first in (True, False)]
    assert [mask.tolist() for mask in masks] == [[[False, False, False, True]], [[False, True]]]


def test_a_models_config_is_checked_like_the_loaders() -> None:
    config = SimpleNamespace(context_parallel_size=1, attention_dropout=0.0, calculate_per_token_loss=False)
    with pytest.raises(ConfigError, match=r"^calculate_per_token_loss = False: ranks have unequal tokens"):
        _check(SimpleNamespace(config=config, position_embedding_type="rope"))


def test_stacks_of_mamba_layers_are_refused() -> None:
    spec = ModuleSpec(module=MambaStack, submodules=MambaStackSubmodules())
    with pytest.raises(ConfigError, match=r"^spec = 'MambaStack': has no self_attention; Mamba mixers"):
        planned_spec(spec)

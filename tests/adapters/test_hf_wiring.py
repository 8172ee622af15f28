"""Refuses models of transformers whose attention would not use the plan, and arguments that conflict with it."""

from __future__ import annotations

import copy
import re
from collections import OrderedDict
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint

import apportion as ap
from apportion.ir.errors import ConfigError, ExecutionError
from apportion.trainer import hf
from apportion.trainer.step import wiring
from tests.adapters import jobs_hf as jobs


@pytest.fixture(autouse=True)
def watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives each test a fresh watch, as in its own process."""
    monkeypatch.setattr(wiring, "watch", wiring.Watch())
    for when in ("pre", "post"):
        hooks = f"_global_optimizer_{when}_hooks"
        monkeypatch.setattr(import_module("torch.optim.optimizer"), hooks, OrderedDict())


@pytest.fixture
def model() -> Any:
    return hf.enable(jobs.new_model("llama"))


@pytest.fixture
def batch(model: Any) -> Any:
    return next(iter(jobs.loader(model, 1)))


def test_a_loader_for_a_model_that_is_not_enabled_is_refused(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    for other in (jobs.new_model("llama"), loaded):
        with pytest.raises(ConfigError, match=r"LlamaForCausalLM.*not enabled.*layers \[0, 1\].*hf\.enable"):
            jobs.loader(other, 1)


@pytest.mark.parametrize("name", jobs.MODELS)
@pytest.mark.parametrize("head", [True, False])
def test_attention_of_a_model_that_is_not_enabled_refuses_a_plan(name: str, head: bool) -> None:
    plain = jobs.new_model(name)
    inputs = hf.inputs(next(iter(jobs.loader(hf.enable(jobs.new_model(name)), 1))))
    with pytest.raises(ConfigError, match=r"rows of a plan reached attention.*hf\.enable\(model\)"):
        (plain if head else plain.model)(**inputs)


def test_an_enabled_model_refuses_inputs_without_the_handle(model: Any, batch: Any) -> None:
    inputs = {name: value for name, value in hf.inputs(batch).items() if name != hf.NAME}
    with pytest.raises(ConfigError, match="pass on 'apportion'"):
        model(**inputs)


class ArgumentDroppingWrapper(nn.Module):
    """Passes on only some of its arguments."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Any, position_ids: Any, labels: Any, **_: Any) -> Any:
        return self.model(input_ids=input_ids, position_ids=position_ids, labels=labels)


def test_optimizer_steps_fail_until_attention_has_used_the_plan(model: Any, batch: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = [value.clone() for value in model.parameters()]
    optimizer.step()  # no batch was given yet
    ArgumentDroppingWrapper(model)(**hf.inputs(batch)).loss.backward()
    with pytest.raises(ExecutionError, match=r"no attention has used its plan.*'apportion' of hf.inputs"):
        optimizer.step()
    for value, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(value, old)


def test_a_student_that_trains_without_plans_is_named(model: Any, batch: Any) -> None:
    student = hf.enable(jobs.new_model("llama"))
    optimizer = torch.optim.SGD(student.parameters(), lr=1.0)
    plain = {"input_ids": batch.tokens[None], "labels": batch.tokens[None]}
    student(**plain).loss.backward()
    optimizer.step()  # no batch was yielded yet
    inputs = hf.inputs(batch)
    with torch.no_grad():
        model(**inputs)  # a teacher model
    without_plan = {
        name: value for name, value in inputs.items() if name not in (hf.NAME, hf.LAST, "past_key_values")
    }
    student(**without_plan).loss.backward()
    with pytest.raises(
        ExecutionError, match="LlamaForCausalLM ran without a plan while the loader yielded batches"
    ):
        optimizer.step()
    inputs = hf.inputs(batch)
    student(**inputs).loss.backward()
    student(**plain).loss.backward()  # in addition to the planned pass
    optimizer.step()


def test_batches_may_be_fetched_before_optimizer_steps(model: Any, batch: Any) -> None:
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.0) for _ in range(2)]
    later = [hf.inputs(one) for one in list(jobs.loader(model, 1)) * 2]
    model(**hf.inputs(batch)).loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    assert later


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_mask": torch.ones(1, 397)}, "attention_mask.*conflicts with the plan"),
        ({"attention_mask": torch.zeros(1, 1, 397, 397)}, "attention_mask.*conflicts with the plan"),
        ({"past_key_values": transformers.DynamicCache()}, "past_key_values.*conflicts with the plan"),
        ({"cu_seq_lens_q": torch.tensor([0, 397])}, "cu_seq_lens_q.*conflicts with the plan"),
        ({"position_ids": None}, r"position_ids.*counts a rank's rows from 0.*batch\.position_ids"),
        ({"position_ids": torch.arange(397)[None]}, "position_ids.*position ids of the plan's rows"),
        ({"position_ids": torch.arange(20)[None]}, "position_ids.shape.*397 rows"),
        ({"shift_labels": None}, r"shift_labels.*shifted.*hf\.inputs"),
        ({"num_items_in_batch": None}, "num_items_in_batch.*mean is over all ranks"),
        ({"num_items_in_batch": 1}, "num_items_in_batch.*differs from the batch's"),
        ({"shift_labels": torch.zeros(1, 397, dtype=torch.int64)}, "shift_labels.*differs from the batch's"),
        ({"labels": torch.full((1, 397), -100)}, "labels.*differs from the batch's"),  # would be ignored
        ({"logits_to_keep": 1}, "logits_to_keep.*omit rows from the loss"),
    ],
)
def test_arguments_that_do_not_fit_a_plan_are_refused(
    model: Any, batch: Any, changes: dict[str, Any], message: str
) -> None:
    inputs = hf.inputs(batch)
    assert inputs["input_ids"].shape == (1, 397)
    with pytest.raises(ConfigError, match=message):
        model(**{**inputs, **changes})
    expected = model(**inputs).loss
    assert torch.equal(model(**{**inputs, "use_cache": True}).loss, expected)


def test_arguments_are_checked_if_the_head_calls_only_the_decoder() -> None:
    sizes = {**jobs.SIZES, "num_key_value_heads": 4, "ffn_dim": 96, "word_embed_proj_dim": 64}
    model = hf.enable(transformers.OPTForCausalLM(transformers.OPTConfig(**sizes)))
    inputs = hf.inputs(next(iter(jobs.loader(model, 1))))
    with pytest.raises(ConfigError, match=r"position_ids.*counts a rank's rows from 0"):
        model(**{**inputs, "position_ids": None})
    model.model.decoder.layerdrop = 1.0
    with pytest.raises(ExecutionError, match=r"layers \[0, 1\] of OPTDecoder did not use the plan"):
        model(**inputs)


def test_layers_that_did_not_use_the_plan_are_named(model: Any, batch: Any) -> None:
    inputs = hf.inputs(batch)
    expected = model(**inputs).loss
    model.model.layers[1].self_attn.load_state_dict(
        jobs.new_model("llama").model.layers[1].self_attn.state_dict()
    )
    replaced = jobs.new_model("llama").model.layers[1].self_attn
    replaced.load_state_dict(model.model.layers[1].self_attn.state_dict())
    model.model.layers[1].self_attn = replaced
    with pytest.raises(ExecutionError, match=r"layers \[1\] of LlamaModel did not use the plan"):
        model(**inputs)
    with pytest.raises(ConfigError, match=r"not enabled: attention of layers \[1\]"):
        jobs.loader(model, 1)
    assert torch.equal(hf.enable(model)(**inputs).loss, expected)
    model.model.layers = model.model.layers[:1]
    with pytest.raises(ExecutionError, match=r"layers \[1\] of LlamaModel did not use the plan"):
        model(**inputs)


def test_a_replaced_loss_is_checked_when_the_model_is_enabled_again(model: Any, batch: Any) -> None:
    inputs, own = hf.inputs(batch), model.loss_function
    model.loss_function = lambda logits, **kwargs: logits.square().mean()
    with pytest.raises(ConfigError, match=r"loss_function.*replaced.*hf\.enable\(model\) again"):
        model(**inputs)
    with pytest.raises(ConfigError, match="its loss is not the sum of the rows' losses"):
        hf.enable(model)
    model.loss_function = lambda *args, **kwargs: 2 * own(*args, **kwargs)
    doubled = hf.enable(model)(**inputs).loss
    model.loss_function = own
    assert torch.equal(doubled, 2 * hf.enable(model)(**inputs).loss)


def test_the_loader_checks_a_model_changed_after_enable(model: Any) -> None:
    hook = model.get_input_embeddings().register_forward_hook(
        lambda *inputs: inputs[-1] * inputs[-1].shape[1]
    )
    with pytest.raises(ConfigError, match=r"model\.embed_tokens computes a row from other rows"):
        jobs.loader(model, 1)
    hook.remove()
    jobs.loader(model, 1)
    model.lm_head = nn.Sequential(nn.Identity(), Centred(), model.lm_head)
    with pytest.raises(ConfigError, match=r"lm_head\.1 computes a row from other rows"):
        jobs.loader(model, 1)


def test_a_model_that_was_changed_is_checked_before_each_pass(model: Any) -> None:
    batches = jobs.loader(model, 1)
    model.lm_head = nn.Sequential(Centred(), model.lm_head)
    inputs = hf.inputs(next(iter(batches)))
    with pytest.raises(ConfigError, match=r"lm_head\.0 computes a row from other rows"):
        model(**inputs)
    model.lm_head = model.lm_head[1]
    model(**hf.inputs(next(iter(batches)))).loss.backward()
    own = model.forward

    def penalised(*args: Any, **kwargs: Any) -> Any:
        output = own(*args, **kwargs)
        output.loss = output.loss + output.logits.logsumexp(-1).square().mean()
        return output

    model.forward = penalised
    inputs = hf.inputs(next(iter(batches)))
    with pytest.raises(ConfigError, match="its loss is not the sum of the rows' losses"):
        model(**inputs)


def test_batches_are_kept_as_long_as_their_arguments(model: Any) -> None:
    """Trainer fetches all microbatches of a step before it runs them."""
    inputs = [hf.inputs(one) for one in jobs.loader(model, 1, microbatches=2, tokens=200)]
    assert len(inputs) > 1
    with pytest.raises(ConfigError, match=r"num_items_in_batch.*differs from the batch's"):
        model(**{**inputs[0], "num_items_in_batch": 1})


class Centred(nn.Module):
    """Subtracts the mean over rows."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows - rows.mean(1, keepdim=True)


def test_a_loader_has_no_samples_by_number(model: Any) -> None:
    """A plain Trainer takes a loader for a dataset."""
    with pytest.raises(ConfigError, match=r"planned batches, not samples.*PlannedTrainer.*PlannedBatches"):
        jobs.loader(model, 1)[0]


def test_token_ids_beyond_the_vocabulary_are_refused(model: Any) -> None:
    model.resize_token_embeddings(16)
    with pytest.raises(ConfigError, match=r"sample \d: input_ids = \d+: the model has 16 embeddings"):
        next(iter(jobs.loader(model, 1)))


def test_enabling_is_idempotent_and_survives_copies(model: Any, batch: Any) -> None:
    inputs = hf.inputs(batch)
    expected = model(**inputs).loss
    hooks = len(model.model._forward_pre_hooks)
    hf.enable(model)
    assert len(model.model._forward_pre_hooks) == hooks
    model.set_attn_implementation("eager")  # used without a plan
    copied = copy.deepcopy(model)
    assert jobs.loader(copied, 1).job == jobs.loader(torch.compile(copied, backend="eager"), 1).job
    assert torch.equal(copied(**inputs).loss, expected)


def test_attention_calls_are_counted_including_recomputation(model: Any) -> None:
    """Counts layers again when backward recomputes them."""
    batch = next(iter(jobs.loader(model, 1)))
    assert batch.handle.calls == 0
    loss = checkpoint(lambda: model(**hf.inputs(batch)).loss, use_reentrant=False)
    assert batch.handle.calls == 2
    loss.backward()
    assert batch.handle.calls == 4


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("summed", "^$"),
        ("ddp summed", "^$"),
        ("fsdp summed", "^$"),
        ("forgotten", r"gradients differ between ranks.*ap\.sum_gradients\(model\)"),
        ("compiled", r"gradients differ between ranks"),
        ("ddp", r"DistributedDataParallel.*averages gradients"),
        ("fsdp", r"FSDP2.*averages gradients"),
        ("ddp_compiled", r"DistributedDataParallel.*averages gradients"),
        ("fsdp_compiled", r"FSDP2.*averages gradients"),
        ("rows", r"input_ids.*only this rank's rows.*call model\(\*\*hf\.inputs\(batch\)\)"),
        ("copies", r"input_ids.*only this rank's rows"),
        ("frozen", r"parameters differ between ranks, 1 of \d+, first of shape \(128, 64\)"),
    ],
)
def test_loops_that_omit_a_required_call_are_stopped(pool: Any, mistake: str, message: str) -> None:
    for error in pool.run(jobs.loop_error, 2, mistake):
        assert re.search(message, error), error


def test_samples_shaped_like_a_ranks_rows_are_scored_without_the_plan(pool: Any) -> None:
    """A rank has two samples of equal length, so its rows have the shape of a batch of these samples."""
    assert pool.run(jobs.scoring_error, 2, 40, 2) == pool.run(jobs.scoring_error, 2, 40, 1) == ["", ""]


def test_a_module_that_wraps_an_enabled_model_is_checked_too(pool: Any) -> None:
    assert pool.run(jobs.wrapped_model_error, 2, "rows") == ["", ""]
    for error in pool.run(jobs.wrapped_model_error, 2, "mixed"):
        rule = "'WrappedModel': .* computes or receives rows that depend on other rows"
        assert re.search(rule, error), error


def test_masks_without_the_chunks_of_layers_are_refused() -> None:
    sizes = {**jobs.SIZES, "attention_chunk_size": 16, "no_rope_layers": [1, 1], "moe_layers": []}
    config = transformers.Llama4TextConfig(**sizes, intermediate_size_mlp=96, pad_token_id=None)
    model = hf.enable(transformers.Llama4ForCausalLM(config))
    for masks, lengths in ((None, [40]), (ap.masks.causal(), [16, 9]), (ap.masks.documents([16, 9]), [25])):
        model(**hf.inputs(next(iter(jobs.loader(model, 1, lengths=lengths, masks=masks)))))
    for mask, length in (
        (ap.masks.causal(), 17),
        (ap.masks.chunked(8), 9),
        (ap.masks.documents([9, 31]), 40),
    ):
        inputs = hf.inputs(next(iter(jobs.loader(model, 1, lengths=[length], masks=mask))))
        with pytest.raises(
            ConfigError, match=r"see chunks of 16 tokens; pass masks=.*ap\.masks\.chunked\(16\)"
        ):
            model(**inputs)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("alora_invocation_tokens", [5], r"alora_invocation_tokens = \[5\]: .* may be on another rank"),
        ("is_prompt_learning", True, r"peft_config = .*virtual tokens in front of each rank's rows"),
    ],
)
def test_adapters_that_look_at_other_rows_are_refused(
    model: Any, field: str, value: Any, message: str
) -> None:
    model.peft_config = {"default": SimpleNamespace(**{field: value})}  # as PEFT sets it
    with pytest.raises(ConfigError, match=message):
        jobs.loader(model, 1)

"""Models whose layers read other rows of a call are refused by name, or use a value shared by all ranks."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from apportion.ir.errors import ConfigError
from apportion.trainer import hf
from tests.adapters import jobs_hf as jobs

LOSS, GRADIENT = 1e-6, 2e-6  # tolerances: absolute; relative to the largest gradient
ONE_LONG, SEVERAL = (100,), (100, 20, 90, 30, 70, 10)


@pytest.mark.parametrize("recipe", ["contiguous", "fcp"])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("rope", jobs.ROPES)
def test_rotary_embeddings_use_the_longest_position_of_all_ranks(
    pool: Any, rope: str, ranks: int, recipe: str
) -> None:
    options = (("lengths", ONE_LONG), ("recipe", recipe), ("drop_last", False))
    _assert_agreement(pool, ranks, options, jobs.ROPES[rope])


@pytest.mark.parametrize("rope", jobs.ROPES)
def test_rotary_state_kept_between_calls_is_equal_on_all_ranks(pool: Any, rope: str) -> None:
    """With microbatches of 100, 90 and 70 positions, and recomputation."""
    options = (("lengths", SEVERAL), ("tokens", 60), ("recipe", "contiguous"), ("drop_last", False))
    _assert_agreement(pool, 2, options, jobs.ROPES[rope], checkpointed=True)


@pytest.mark.parametrize("name", jobs.FURTHER)
def test_models_accepted_by_the_guard_train_like_one_process(pool: Any, name: str) -> None:
    _assert_agreement(pool, 2, (), None, name=name)


def _assert_agreement(
    pool: Any, ranks: int, options: Any, changes: Any, checkpointed: Any = False, name: Any = "llama"
) -> None:
    args = name, "plain", checkpointed, False, options, changes
    for loss, gradient, _ in pool.run(jobs.agreement, ranks, *args):
        assert loss <= LOSS
        assert gradient <= GRADIENT


@pytest.mark.parametrize("rope", jobs.ROPES)
def test_a_rotary_embedding_of_only_local_rows_is_refused(rope: str) -> None:
    """Regression test: the guard detects this without knowing the kind of rotary embedding."""
    model = jobs.new_model("llama", **jobs.ROPES[rope])
    model.model.rotary_emb.register_forward_pre_hook(_with_local_rows_only, prepend=True)
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM.*model\.rotary_emb computes a row from other"):
        hf.enable(model)


def _with_local_rows_only(rotary: Any, args: Any) -> None:
    rotary._last = None


# --- layers that read other rows


class Mean(nn.Module):
    def forward(self, x: Any) -> Any:
        return x + 0.1 * x.mean(1, keepdim=True)


class GatedMean(nn.Module):
    """Begins as the identity."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(64, 64)
        nn.init.zeros_(self.out.weight)

    def forward(self, x: Any) -> Any:
        return x + self.out(x.mean(1, keepdim=True))


class RowCounter(nn.Module):
    """Counts rows instead of reading position ids."""

    def forward(self, x: Any) -> Any:
        return x + 0.01 * torch.arange(x.shape[1], dtype=x.dtype)[:, None]


class Shift(nn.Module):
    def forward(self, x: Any) -> Any:
        return x + 0.1 * nn.functional.pad(x, (0, 0, 1, -1))


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.taps = nn.Conv1d(64, 64, 3, padding=2, groups=64)

    def forward(self, x: Any) -> Any:
        return x + self.taps(x.mT)[..., :-2].mT


class Normalised(nn.Module):
    """Batch normalisation with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(64)

    def forward(self, x: Any) -> Any:
        return self.norm(x.mT).mT


class LimitedExperts(nn.Module):
    """Experts of limited capacity, which skip the last rows."""

    def forward(self, x: Any) -> Any:
        chosen = x[..., 0] > 0
        kept = chosen.cumsum(1) <= max(1, x.shape[1] // 4)
        return torch.where((chosen & kept)[..., None], 2 * x, x)


LAYERS = {
    Mean: "extra",
    GatedMean: "extra",
    RowCounter: "extra",
    Shift: "extra",
    Convolution: "extra",
    Normalised: "extra.norm",
    LimitedExperts: "extra",
}


def _model_with(layer: Any, **changes: Any) -> Any:
    """A model with this layer after its first feed-forward network."""
    model = jobs.new_model("llama", **changes)
    block = model.model.layers[0]
    block.extra = layer()
    block.register_forward_hook(lambda module, args, output: module.extra(output))
    return model


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_that_reads_other_rows_is_refused_by_name(layer: Any) -> None:
    named = rf"model\.layers\.0\.{LAYERS[layer]} computes a row from other rows"
    with pytest.raises(ConfigError, match=named):
        hf.enable(_model_with(layer))


def test_the_guard_can_be_switched_off() -> None:
    model = hf.enable(_model_with(Mean), check=False)
    assert jobs.loader(model, 1) is not None


class Threshold(nn.Module):
    """Row-wise until positions reach a length that the config names."""

    def forward(self, x: Any, positions: Any) -> Any:
        return x * (1.5 if positions.max() >= 4096 else 1.0)


def test_positions_beyond_lengths_in_the_config_are_tested() -> None:
    model = jobs.new_model("llama", max_position_embeddings=1024)
    extra = Threshold()

    def scaled(module: Any, args: Any, kwargs: Any) -> Any:
        return (extra(args[0] if args else kwargs.pop("hidden_states"), kwargs["position_ids"]),), kwargs

    model.model.layers[0].register_forward_pre_hook(scaled, with_kwargs=True)
    hf.enable(model)  # longer than any length in the config
    model.config.original_context = 4096
    with pytest.raises(ConfigError, match=r"model\.layers\.0\.post_attention_layernorm computes"):
        hf.enable(model)


def test_dropout_does_not_count_as_reading_other_rows() -> None:
    hf.enable(_model_with(lambda: nn.Dropout(0.5)))


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_rounding_in_bfloat16_does_not_count_as_reading_other_rows(name: str) -> None:
    hf.enable(jobs.new_model(name).bfloat16())


def test_the_guard_does_not_change_the_model() -> None:
    model = _model_with(Normalised, **jobs.ROPES["dynamic"]).eval()
    rng_state, state = torch.get_rng_state(), {name: one.clone() for name, one in model.named_buffers()}
    with pytest.raises(ConfigError):
        hf.enable(model)
    rotary = model.model.rotary_emb
    assert rotary.max_seq_len_cached == 64
    assert not any(module.training for module in model.modules())
    assert torch.equal(torch.get_rng_state(), rng_state)
    assert all(torch.equal(one, state[name]) for name, one in model.named_buffers())
    assert all(value.grad is None for value in model.parameters())


def test_a_model_without_weights_is_checked_when_its_loader_is_made(caplog: Any) -> None:
    with torch.device("meta"):
        model = jobs.new_model("llama")
    with caplog.at_level(logging.WARNING):
        hf.enable(model)
    assert "its layers are not checked" in caplog.text
    whole = _model_with(Mean)
    model.to_empty(device="cpu")
    model.load_state_dict(whole.state_dict(), strict=False)
    model.model.rotary_emb = whole.model.rotary_emb
    for block in model.model.layers[:1]:
        block.register_forward_hook(lambda module, args, output: Mean()(output))
    with pytest.raises(ConfigError, match=r"layer 1|model\.layers\.0 computes"):
        jobs.loader(model, 1)


def test_a_handle_without_the_last_position_is_refused() -> None:
    model = hf.enable(jobs.new_model("llama"))
    kwargs = hf.inputs(next(iter(jobs.loader(model, 1))))
    del kwargs[hf.LAST]
    with pytest.raises(ConfigError, match=r"apportion_last_position.*hf\.inputs\(batch\)"):
        model(**kwargs)


# --- heads


@pytest.mark.parametrize(
    ("head", "rule"),
    [
        ("SequenceClassification", r"its logits are \[1, 1\] for 19 rows"),
        ("TokenClassification", r"its loss is not the sum of the rows' losses of shift_labels"),
        ("QuestionAnswering", r"returns no loss for shift_labels"),
    ],
)
def test_heads_that_do_not_predict_the_next_token_are_refused(head: str, rule: str) -> None:
    own = getattr(transformers, f"LlamaFor{head}")
    labels = 1 if head == "SequenceClassification" else 2
    config = transformers.LlamaConfig(**jobs.SIZES, pad_token_id=0, num_labels=labels)
    with pytest.raises(ConfigError, match=rf"LlamaFor{head}'.*{rule}.*ForCausalLM"):
        hf.enable(own(config))


class OwnMean(transformers.LlamaForCausalLM):
    """A head whose loss ignores num_items_in_batch."""

    def forward(self, *args: Any, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class OwnShift(transformers.LlamaForCausalLM):
    """A head whose loss ignores shift_labels."""

    def forward(self, *args: Any, shift_labels: Any = None, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


@pytest.mark.parametrize("kind", [OwnMean, OwnShift])
def test_a_loss_that_is_not_a_sum_over_shifted_labels_is_refused(kind: Any) -> None:
    with pytest.raises(ConfigError, match=rf"{kind.__name__}.*its loss is not the sum"):
        hf.enable(kind(transformers.LlamaConfig(**jobs.SIZES)))

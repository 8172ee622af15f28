"""Hugging Face models on planned batches match their own attention in one process."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import apportion as ap
from apportion.ir.errors import ConfigError, ExecutionError
from apportion.trainer import hf
from tests.adapters import jobs_hf as jobs

LOSS, GRADIENT = 5e-7, 2e-6  # tolerances: absolute; relative to the largest gradient
SEVERAL = (
    ("tokens", 60),
    ("microbatches", 2),
    ("drop_last", False),
)  # microbatches per iteration, on 4 ranks


def assert_agreement(pool: Any, ranks: int, *args: Any) -> None:
    for loss, gradient, _ in pool.run(jobs.agreement, ranks, *args):
        assert loss <= LOSS
        assert gradient <= GRADIENT


@pytest.mark.parametrize("ranks", [2, 4])
# chooses experts at random in training
@pytest.mark.parametrize("name", sorted(jobs.MODELS.keys() - {"phimoe"}))
def test_losses_and_gradients_equal_one_process(pool: Any, name: str, ranks: int) -> None:
    assert_agreement(pool, ranks, name)


@pytest.mark.parametrize("wrap", ["plain", "ddp", "ddp_every", "fsdp"])
@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_sums_of_gradients_are_exact_with_checkpointing_and_accumulation(
    pool: Any, name: str, wrap: Any
) -> None:
    assert_agreement(pool, 4, name, wrap, True, False, SEVERAL)


@pytest.mark.parametrize("recipe", ["ulysses", "usp"])
def test_latent_rows_are_expanded_for_some_heads(pool: Any, recipe: str) -> None:
    assert_agreement(pool, 4, "deepseek_v3", "fsdp", True, False, (("recipe", recipe),))


def test_a_copy_expands_latent_rows_with_its_own_weights() -> None:
    model = hf.enable(jobs.new_model("deepseek_v3"))
    other = deepcopy(model)
    batch = next(iter(jobs.loader(model, 1)))
    losses = [model(**hf.inputs(batch)).loss]
    with torch.no_grad():
        for layer in other.model.layers:
            layer.self_attn.kv_b_proj.weight.mul_(3.0)
    losses += [one(**hf.inputs(batch)).loss for one in (model, other)]
    assert losses[0] == losses[1] != losses[2]


def test_tied_weights(pool: Any) -> None:
    assert_agreement(pool, 4, "llama", "ddp", False, False, SEVERAL, {"tie_word_embeddings": True})


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "deepseek_v3"])
def test_bfloat16_by_autocast(pool: Any, name: str) -> None:
    # with experts, rounding may route a token differently
    changes = {"first_k_dense_replace": 2} if name == "deepseek_v3" else {}
    options = (("dtype", "bf16"),)
    for loss, gradient, _ in pool.run(jobs.agreement, 4, name, "ddp", True, True, options, changes):
        assert loss <= 2e-3
        assert gradient <= 3e-2


# --- behaviour of enabled models without a plan, and refusals


def test_an_enabled_model_without_a_plan_is_unchanged() -> None:
    plain, enabled = jobs.new_model("gemma3"), hf.enable(jobs.new_model("gemma3"))
    ids = torch.arange(24).view(2, 12) % jobs.VOCABULARY
    mask = torch.ones_like(ids)
    mask[0, :5] = 0  # left padding
    batch = next(iter(jobs.loader(enabled, 1)))
    for _ in range(2):  # before a planned forward, and after it
        for model in (plain, enabled):
            model.eval()
        generated = [
            m.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False) for m in (plain, enabled)
        ]
        assert torch.equal(*generated)
        outputs = [m(input_ids=ids, attention_mask=mask).logits for m in (plain, enabled)]
        assert torch.equal(*outputs)
        enabled.train()
        assert enabled(**hf.inputs(batch)).loss.isfinite()


@pytest.mark.parametrize("name", ["mistral", "phimoe"])
def test_a_window_layer_on_a_causal_plan_is_refused_by_layer_and_kind(name: str) -> None:
    model = hf.enable(jobs.new_model(name))
    batch = next(iter(jobs.loader(model, 1, masks=ap.masks.causal())))
    with pytest.raises(
        ConfigError, match=r"window = 24.*kind 'default' in layer 0: causal.*sliding_window\(24\)"
    ):
        model(**hf.inputs(batch))


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "phimoe"])
def test_a_window_of_the_config_that_changed_after_the_loader_is_refused(name: str) -> None:
    model = hf.enable(jobs.new_model(name))
    batch = next(iter(jobs.loader(model, 1)))
    model(**hf.inputs(batch))
    model.config.sliding_window = 8  # masks of the model's own attention follow it, its layers do not
    with pytest.raises(
        ConfigError, match=r"window = 8: differs from the plan's .* in layer 0: .* window of 24"
    ):
        model(**hf.inputs(batch))
    for layer in model.model.layers:
        layer.self_attn.sliding_window = 8 if getattr(layer.self_attn, "sliding_window", None) else None
    model(**hf.inputs(next(iter(jobs.loader(hf.enable(model), 1)))))


def test_a_full_layer_on_a_windowed_plan_is_refused() -> None:
    model = hf.enable(jobs.new_model("llama"))
    batch = next(iter(jobs.loader(model, 1, masks=ap.masks.sliding_window(24))))
    with pytest.raises(ConfigError, match=r"window = -1.*layer 0: sliding window of 24"):
        model(**hf.inputs(batch))


def test_layers_that_look_ahead_are_refused_on_a_causal_plan() -> None:
    model = hf.enable(jobs.new_model("llama"))
    batch = next(iter(jobs.loader(model, 1)))
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    with pytest.raises(ConfigError, match=r"causal = False: .*layer 0: causal"):
        model(**hf.inputs(batch))


def test_a_bidirectional_model_is_refused() -> None:
    model = hf.enable(jobs.new_model("llama"))
    model.config.is_causal = False
    with pytest.raises(ConfigError, match=r"is_causal = False.*give masks= to the loader"):
        jobs.loader(model, 1)
    batch = next(iter(jobs.loader(model, 1, masks=ap.masks.causal())))
    with pytest.raises(ConfigError, match=r"causal = False: .*layer 0: causal"):
        model(**hf.inputs(batch))


def test_dropout_and_a_dtype_that_differs_from_the_plan_are_refused() -> None:
    model = hf.enable(jobs.new_model("llama", attention_dropout=0.1))
    batch = next(iter(jobs.loader(model, 1)))
    with pytest.raises(ConfigError, match="dropout is not supported"):
        model(**hf.inputs(batch))
    model = hf.enable(jobs.new_model("llama"))
    batch = next(iter(jobs.loader(model, 1, dtype="bf16")))
    with pytest.raises(ExecutionError, match=r"q has dtype torch.float32, the plan torch.bfloat16"):
        model(**hf.inputs(batch))


def test_a_loss_with_weights_replaces_the_models_own() -> None:
    model = hf.enable(jobs.new_model("llama"))
    batch = next(iter(jobs.loader(model, 1, dataset=jobs.Weighted)))
    outputs, weights = model(**hf.inputs(batch)), batch.fields["loss_weights"]
    assert outputs.loss is None
    share = ap.normalised_loss(outputs.logits, batch.labels, batch.total_weight, weights=weights)
    losses = torch.nn.functional.cross_entropy(outputs.logits[0], batch.labels, reduction="none")
    torch.testing.assert_close(share, (losses * weights).sum() / weights[batch.labels >= 0].sum())


def test_a_compiled_model_is_one_graph_for_all_plans() -> None:
    model = hf.enable(jobs.new_model("llama"))
    batches = list(jobs.loader(model, 1, tokens=140))
    with torch.no_grad():
        expected = [model(**hf.inputs(batch)).logits for batch in batches]
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="aot_eager", dynamic=True)
        torch._dynamo.utils.counters.clear()
        for batch, logits in zip(batches, expected, strict=True):
            torch.testing.assert_close(compiled(**hf.inputs(batch)).logits, logits, rtol=1e-5, atol=1e-6)
    assert len(batches) > 2
    assert torch._dynamo.utils.counters["graph_break"] == {}
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.filterwarnings("ignore:'set_vital'")  # torchdata calls it
def test_torchdata_stateful_loader_resumes_where_it_stopped() -> None:
    """Like torchdata, loads a state saved during a pass into a new loader before iterating."""
    model = hf.enable(jobs.new_model("llama"))
    whole = [batch.tokens.tolist() for batch in jobs.loader(model, 1, tokens=140)]
    first = StatefulDataLoader(_Passes(jobs.loader(model, 1, tokens=140)), batch_size=None)
    consumed = []
    for tokens in first:
        consumed.append(tokens)
        if len(consumed) == 2:
            state = first.state_dict()
            break
    second = StatefulDataLoader(_Passes(jobs.loader(model, 1, tokens=140)), batch_size=None)
    second.load_state_dict(state)
    assert consumed + list(second) == whole


class _Passes(IterableDataset):
    """Wraps a loader as a stateful dataset."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Any:
        return (batch.tokens.tolist() for batch in self.loader)

    def state_dict(self) -> Any:
        return self.loader.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.loader.load_state_dict(state)


@pytest.mark.parametrize(
    ("loss_kind", "message"),
    [("", None), ("own", "loss cannot be checked"), ("added", "has a term other than")],
)
def test_custom_losses_cause_a_warning(pool: Any, loss_kind: str, message: str | None) -> None:
    for found in pool.run(jobs.loss_warnings, 2, loss_kind):
        assert len(found) == (message is not None)
        assert message is None or message in found[0]

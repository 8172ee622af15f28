"""Models of transformers with recurrent layers: logits and gradients under plans match those of separate documents."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import apportion as ap
from apportion.ir.errors import ConfigError
from apportion.ir.masks import specs as masks
from apportion.ir.request.batch import Batch
from apportion.ir.request.hf_config import model_of
from apportion.ir.request.sequences import Sequence
from apportion.trainer import hf
from tests.adapters import jobs_hf_recurrent
from tests.adapters.jobs_hf_recurrent import VOCABULARY, by_documents, new_model
from tests.ranks.rank_pool import Pool
from tests.support.strategies import STRATEGIES

PACKED = [Sequence(length, masks.causal()) for length in (50, 1, 23, 9)]
TREES = [
    Sequence(36, masks.tree([[-1, 12], [0, 9], [0, 5], [1, 10]])),
    Sequence(40, masks.shared_question(14, [9, 17])),
]


@pytest.mark.parametrize(
    ("name", "ranks", "recipe", "sequences", "checkpointing"),
    [
        ("Qwen3Next", 4, "fcp", PACKED, False),
        ("Qwen3Next", 2, "ring", TREES, True),
        ("Qwen3_5", 2, "contiguous", PACKED, True),
        ("OlmoHybrid", 4, "ring", PACKED, False),
        ("KimiLinear", 4, "fcp", PACKED, True),
        ("KimiLinear", 2, "contiguous", TREES, False),
        ("NemotronH", 4, "ring", PACKED, True),
        ("GraniteMoeHybrid", 2, "fcp", TREES, False),
        ("Bamba", 4, "contiguous", PACKED, False),
        ("FalconH1", 2, "ring", PACKED, True),
        ("MiniMax", 4, "fcp", PACKED, True),
        ("MiniMax", 2, "ring", TREES, False),
    ],
)
def test_logits_and_gradients_equal_separate_documents(
    pool: Pool, name: str, ranks: int, recipe: str, sequences: list[Sequence], checkpointing: bool
) -> None:
    batch = Batch.from_sequences(sequences)
    rng = np.random.default_rng(0)
    tokens, grad = rng.integers(0, VOCABULARY, batch.tokens), rng.standard_normal((batch.tokens, VOCABULARY))
    expected, expected_grads = by_documents(name, batch, tokens, grad)
    model = replace(model_of(new_model(name).config.to_dict()), dtype="fp64")
    steps = {"name": recipe, "steps": STRATEGIES[recipe]}
    plan = ap.plan(batch, ap.Cluster(nodes=1, ranks_per_node=ranks), model, steps)
    each = [plan.for_rank(rank).encode() for rank in range(ranks)]
    job, home = jobs_hf_recurrent.planned, plan.layout(plan.header.home_layout)
    results = pool.run(job, ranks, name, each=[(data, (tokens, grad), checkpointing, 2) for data in each])
    for rank, (logits, grads) in enumerate(results):
        np.testing.assert_allclose(
            logits, expected[home.tokens(rank)], atol=1e-10 * np.abs(expected).max(), rtol=0
        )
        assert grads.keys() == expected_grads.keys()
        for key, gradient in expected_grads.items():
            np.testing.assert_allclose(
                grads[key], gradient, atol=1e-10 * max(np.abs(gradient).max(), 1e-3), rtol=0
            )


def test_a_loader_step_equals_a_step_on_separate_documents(pool: Pool) -> None:
    """Compares the loss and gradient norms in float32, with padding rows."""
    results = pool.run(jobs_hf_recurrent.step, 4, "Qwen3Next", True)
    ((expected, norms),) = pool.run(jobs_hf_recurrent.step, 1, "Qwen3Next", False)
    for loss, own in results:
        assert loss == pytest.approx(expected, rel=1e-5)
        assert own == pytest.approx(norms, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("name", ["Qwen3Next", "KimiLinear", "GraniteMoeHybrid", "MiniMax"])
def test_resumed_training_equals_uninterrupted_training(pool: Pool, name: str) -> None:
    """Bitwise, for a model of each family of recurrences."""
    for losses, parts, different in pool.run(jobs_hf_recurrent.resumed_training, 2, name):
        assert len(losses) > 3
        assert parts == losses
        assert not different


def test_an_enabled_model_without_a_handle_is_unchanged() -> None:
    tokens = torch.arange(20)[None] % VOCABULARY
    for name in ("KimiLinear", "MiniMax", "Bamba"):
        model = new_model(name)
        before = model(input_ids=tokens, use_cache=False).logits
        torch.testing.assert_close(
            hf.enable(model)(input_ids=tokens, use_cache=False).logits, before, rtol=0, atol=0
        )


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("Jamba", {"num_experts": 1}, "no adapter for its recurrent layers, JambaMambaMixer"),
        (
            "Lfm2",
            {"layer_types": ["conv", "full_attention"]},
            "1 of its 2 layers are attention that can be replaced",
        ),
        ("Mamba2", {"num_heads": 8, "head_dim": 8}, "0 of its 2 layers are attention that can be replaced"),
    ],
)
def test_unsupported_recurrences_are_refused_by_name(name: str, fields: dict[str, Any], message: str) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = getattr(transformers, f"{name}Config")(**{**sizes, "num_attention_heads": 4, **fields})
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with pytest.raises(ConfigError, match=message):
        hf.enable(model)


def test_a_recurrent_layer_added_later_is_detected() -> None:
    model = hf.enable(new_model("Bamba"))
    model.model.layers[0].mamba = new_model("Bamba").model.layers[0].mamba
    with pytest.raises(ConfigError, match=r"attention of layers \[0 \(recurrent\)\] would ignore the plan"):
        hf.require_enabled(model)


def test_a_convolution_that_ignores_the_plan_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    model = hf.enable(new_model("OlmoHybrid"), check=False)
    home = sys.modules[type(model).__module__]
    monkeypatch.setattr(home, "causal_conv1d_fn", vars(home)["causal_conv1d_fn"].unplanned)
    with pytest.raises(ConfigError, match="computes a row from other rows of the call"):
        hf.enable(model)


@pytest.mark.parametrize("name", ["Qwen3Next", "KimiLinear", "NemotronH", "MiniMax"])
def test_an_enabled_model_that_is_sent_to_other_processes_runs_there(name: str) -> None:
    model = hf.enable(new_model(name))
    fresh = Pool(timeout_s=240, size=2)  # whose processes have not enabled a model
    shares = fresh.run(jobs_hf_recurrent.loss_of, 2, model)
    fresh.close()
    assert shares is not None
    assert sum(shares) == pytest.approx(jobs_hf_recurrent.loss_of(ap.Communicator(), model), abs=1e-6)

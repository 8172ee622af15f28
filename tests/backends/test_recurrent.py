"""Recurrent layers of plans on numpy match a token-by-token scan in one process, for any placement of tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import apportion as ap
from apportion import ConfigError, ExecutionError, Recurrent
from tests.support import recurrent_executor
from tests.support.recurrences import Edit, changed, dense, predecessors, random_inputs, setting

KINDS = {
    "gated_delta": Recurrent(heads=4, key_dim=3, value_dim=2, key_heads=2, conv=4),
    "gated_linear": Recurrent(heads=5, key_dim=2, value_dim=2, gate="diagonal", delta=False, conv=2),
    "kimi_delta": Recurrent(heads=3, key_dim=2, value_dim=3, gate="diagonal", conv=3),
    "mamba": Recurrent(heads=2, key_dim=2, value_dim=2, delta=False),
}
MODEL = ap.Model(q_heads=4, kv_heads=4, head_dim=8, recurrent=KINDS)
BATCH = ap.Batch.from_sequences(
    [
        ap.Sequence(26, ap.masks.tree([[-1, 10], [0, 5], [0, 7], [2, 2], [2, 2]])),
        ap.Sequence(20, ap.masks.documents([5, 11, 3, 1])),
        ap.Sequence(24, ap.masks.shared_question(10, [8, 5, 1])),
        ap.Sequence(40),
        ap.Sequence(1),
    ]
)


def plan_of(recipe: str, model: ap.Model = MODEL, batch: ap.Batch = BATCH) -> ap.Plan:
    return ap.plan(batch, ap.Cluster(nodes=2, ranks_per_node=2), model, recipe=recipe)


@pytest.mark.parametrize("recipe", ["fcp", "blend", "ulysses", "usp", "zeppelin"])
def test_planned_recurrence_equals_one_process(recipe: str) -> None:
    plan, before = plan_of(recipe), predecessors(BATCH)
    for seed, (name, kind) in enumerate(KINDS.items()):
        inputs, do = random_inputs(kind, BATCH.tokens, seed)
        references = dense(kind, before, inputs, do)
        for found, expected in zip(recurrent_executor.run(plan, name, inputs, do), references, strict=True):
            assert (found is None) == (expected is None)
            assert found is None or np.allclose(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "edit", "words"),
    [
        ("states", lambda c: c["peer"].fill(0), "sends|receives"),
        ("states", setting("head", 0, 1), "receives"),
        ("halo", setting("rows", 0, 2), "receives"),
        ("runs", lambda c: c["leads"].fill(0), "never computed or received"),
    ],
)
def test_unmatched_sends_and_receives_are_an_error(name: str, edit: Edit, words: str) -> None:
    inputs, _ = random_inputs(KINDS["gated_delta"], BATCH.tokens)
    with pytest.raises(ExecutionError, match=words):
        recurrent_executor.run(changed(plan_of("blend"), name, edit), "gated_delta", inputs)


@pytest.mark.parametrize(
    "mask",
    [
        ap.masks.full(),
        ap.masks.prefix_lm(3),
        ap.masks.sliding_window(3, 1),
        ap.masks.image_spans([[1, 3]]),
        ap.masks.bands([[0, 5, 0, 5, 0, 9]]),
        ap.masks.documents([16], ap.masks.full()),
    ],
    ids=lambda mask: type(mask).__name__,
)
def test_masks_without_an_order_are_refused(mask: ap.masks.Mask) -> None:
    with pytest.raises(ConfigError, match="no token order for the model's recurrent layers"):
        plan_of("blend", batch=ap.Batch.from_lengths([16], mask))


def test_kinds_that_disagree_on_the_order_are_refused() -> None:
    """The trees have the same positions and labels."""
    nodes = [[-1, 5], [0, 3], [0, 3], [1, 2], [2, 2], [1, 2], [2, 2]]
    swapped = [[-1, 5], [0, 3], [0, 3], [2, 2], [1, 2], [1, 2], [2, 2]]
    masks = {"a": ap.masks.tree(nodes), "b": ap.masks.tree(swapped)}
    assert ap.Batch.from_lengths([19], masks).tokens == 19
    with pytest.raises(ConfigError, match="disagree on the token order"):
        plan_of("blend", batch=ap.Batch.from_lengths([19], masks))


def test_a_recurrent_kind_named_like_an_attention_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model.recurrent = 'default': is also an attention kind"):
        plan_of("blend", replace(MODEL, recurrent={"default": KINDS["mamba"]}))

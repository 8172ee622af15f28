"""Tiles, and checkpoints on the host, change memory use but no result."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import apportion as ap
from apportion.ir.errors import ConfigError
from tests.ranks import jobs_memory
from tests.ranks.loading import MODEL, job, planning
from tests.ranks.rank_pool import Pool
from tests.support.sparse import sparse


@pytest.mark.parametrize("tokens", sparse([7, 1, 500], 3))
def test_ranks_train_the_same_model_by_tiles_with_checkpoints_on_the_host(pool: Pool, tokens: int) -> None:
    arguments = planning(replace(job(2, 64), model=replace(MODEL, dtype="fp64")))
    plain, tiled = (pool.run(jobs_memory.trained, 2, arguments, n, torch.float64) for n in (None, tokens))
    for (loss, gradients), (expected, expected_gradients) in zip(tiled, plain, strict=True):
        assert loss == pytest.approx(expected, rel=1e-12)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 50])
def test_a_tiled_loss_equals_the_loss_of_all_logits(rows: int, weighted: bool) -> None:
    torch.manual_seed(1)
    hidden, head = torch.randn(rows, 12), torch.randn(90, 12)
    labels = torch.randint(0, 90, (rows,)).where(torch.arange(rows) % 3 > 0, -100)
    weights = torch.rand(rows) if weighted else None
    leaves = [part.clone().requires_grad_() for part in (hidden, head)]
    reference_leaves = [part.clone().requires_grad_() for part in (hidden, head)]
    one = ap.memory.tiled_loss(*leaves, labels, 40, 2, weights, tokens=8)
    other = ap.normalised_loss(reference_leaves[0] @ reference_leaves[1].T, labels, 40, 2, weights)
    torch.testing.assert_close(one, other)
    for loss in (one, other):
        (3 * loss).backward()
    for leaf, reference in zip(leaves, reference_leaves, strict=True):
        torch.testing.assert_close(leaf.grad, reference.grad)


def test_the_gradient_of_a_bfloat16_head_is_summed_in_float32() -> None:
    """512 tiles of one row have the same gradient: in bfloat16 their sum would stop growing."""
    hidden, head = torch.ones(512, 4, dtype=torch.bfloat16), torch.zeros(2, 4, dtype=torch.bfloat16)
    head.requires_grad_()
    ap.memory.tiled_loss(hidden, head, torch.zeros(512, dtype=torch.int64), 1, tokens=1).backward()
    assert head.grad is not None
    assert head.grad[:, 0].tolist() == [-256.0, 256.0]


class SavedBytes:
    """Counts the bytes that autograd saves, except parameters."""

    def __init__(self, model: nn.Module) -> None:
        self.known = {param.data_ptr() for param in model.parameters()}
        self.bytes = 0

    def __enter__(self) -> SavedBytes:
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self._keep, lambda x: x)
        self.hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.hooks.__exit__(*error)

    def _keep(self, x: Tensor) -> Tensor:
        self.bytes += x.nbytes * (x.data_ptr() not in self.known)
        return x


def test_a_tiled_module_saves_only_its_input() -> None:
    model = nn.ModuleDict({"mlp": nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8))})
    x, kept = torch.randn(1, 40, 8, requires_grad=True), []
    for tokens in (None, 16):
        if tokens is not None:
            ap.memory.tile(model, "mlp", tokens)
        with SavedBytes(model) as keeping:
            out = model["mlp"](x)
        out.sum().backward()
        kept.append(keeping.bytes)
    assert kept[0] >= 40 * (8 + 64 + 64) * 4
    assert kept[1] <= 40 * 8 * 4


def test_a_layer_behind_frozen_embeddings_gets_gradients() -> None:
    layer, other, x = nn.Linear(4, 4), nn.Linear(4, 4), torch.ones(3, 4)
    ap.memory.offloaded(layer, x).sum().backward()
    other.load_state_dict(layer.state_dict())
    other(x).sum().backward()
    torch.testing.assert_close(layer.weight.grad, other.weight.grad)
    assert x.grad is None


def test_a_tiled_loss_without_the_heads_bias_is_refused(pool: Pool) -> None:
    for error in pool.errors(jobs_memory.biased, 2, planning(job(2, 64))):
        assert (
            "tiled_loss multiplies hidden states by the head's weight only, but the head has a bias" in error
        )


def test_modules_that_cannot_be_tiled_are_refused_by_name() -> None:
    model = nn.ModuleDict({"mlp": nn.Flatten(0), "gate": nn.Identity()})
    with pytest.raises(ConfigError, match=r"name = 'mlpp'.*name one of gate, mlp"):
        ap.memory.tile(model, "mlpp")
    ap.memory.tile(model, "mlp", 2)
    with pytest.raises(ConfigError, match=r"a tiled module's output = \(6,\): must be a tensor with the row"):
        model["mlp"](torch.zeros(2, 3))
    labels, learnt = torch.zeros(2, dtype=torch.int64), torch.ones(2, requires_grad=True)
    with pytest.raises(ConfigError, match="hidden and head"):
        ap.memory.tiled_loss(torch.zeros(2, 3), torch.zeros(5, 4), labels, 2)
    with pytest.raises(ConfigError, match=r"weights = 'a learnt tensor'.*no gradient.*normalised_loss"):
        ap.memory.tiled_loss(torch.zeros(2, 3), torch.zeros(5, 3), labels, 2, weights=learnt)

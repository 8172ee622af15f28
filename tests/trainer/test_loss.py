"""Normalised loss: a batch dimension of one, weights, and refused arguments."""

from __future__ import annotations

import pytest
import torch

from apportion.ir.errors import ConfigError
from apportion.trainer.step.loss import IGNORED, normalised_loss
from apportion.trainer.step.reduction import Reduction, check_reduction

LABELS = torch.tensor([1, IGNORED, 3, 0, 6])


def logits_of() -> torch.Tensor:
    return torch.randn(5, 7, generator=torch.Generator().manual_seed(0))


def test_a_batch_dimension_of_one_is_ignored() -> None:
    logits, weights = logits_of(), torch.rand(5)
    for row_weights in (None, weights):
        expected = normalised_loss(logits, LABELS, 4, weights=row_weights)
        for batched in (row_weights, None if row_weights is None else row_weights[None]):
            assert torch.equal(normalised_loss(logits[None], LABELS, 4, weights=batched), expected)
            assert torch.equal(normalised_loss(logits[None], LABELS[None], 4, weights=batched), expected)
    one, batched = (normalised_loss(x, LABELS[:1], 1) for x in (logits[:1], logits[:1][None]))
    assert torch.equal(batched, one)


def test_weights_multiply_the_losses_of_their_rows() -> None:
    logits = logits_of().requires_grad_()
    weights = torch.tensor([0.5, 9.0, 2.0, 0.0, -1.0], dtype=torch.float64)
    share = normalised_loss(logits, LABELS, 1.5, averaged_over=2, weights=weights)
    logs = logits.log_softmax(-1)
    rows = [(0, 0.5, 1), (2, 2.0, 3), (4, -1.0, 6)]
    expected = sum(-weight * logs[row, label] for row, weight, label in rows) * 2 / 1.5
    torch.testing.assert_close(share, expected)
    (grad,) = torch.autograd.grad(share, logits)
    assert not grad[1].any()
    torch.testing.assert_close(grad, torch.autograd.grad(expected, logits)[0])
    ones = normalised_loss(logits, LABELS, 4, weights=torch.ones(5))
    torch.testing.assert_close(ones, normalised_loss(logits, LABELS, 4))


def test_a_rank_without_rows_has_a_gradient_path() -> None:
    logits = torch.zeros(0, 7, requires_grad=True)
    for weights in (None, torch.zeros(0)):
        share = normalised_loss(logits, LABELS[:0], 4, weights=weights)
        share.backward()
        assert share.item() == 0


def test_a_step_without_labels_has_no_loss_and_no_gradient() -> None:
    logits = logits_of().requires_grad_()
    for weights in (None, torch.ones(5)):
        share = normalised_loss(logits, torch.full((5,), IGNORED), 0, weights=weights)
        assert share.item() == 0
        assert not torch.autograd.grad(share, logits)[0].any()


@pytest.mark.parametrize(
    ("logits", "labels", "weights", "message"),
    [
        (
            (7,),
            (7,),
            None,
            r"logits\.shape = \(7,\): must be \[rows, vocabulary\], optionally in a batch of 1",
        ),
        ((2, 5, 7), (2, 5), None, r"logits\.shape = \(2, 5, 7\)"),
        ((5, 7), (5, 1), None, r"labels\.shape = \(5, 1\): must be \[rows\]"),
        ((5, 7), (4,), None, r"labels\.shape = \(4,\): logits have 5 rows"),
        ((1, 5, 7), (1, 5), (4,), r"weights\.shape = \(4,\): logits have 5 rows"),
        ((5, 7), (5,), (2, 5), r"weights\.shape = \(2, 5\): must be \[rows\]"),
        ((5, 7), (5,), (), r"weights\.shape = \(\): must be \[rows\]"),
    ],
)
def test_other_shapes_are_refused(
    logits: tuple[int, ...], labels: tuple[int, ...], weights: tuple[int, ...] | None, message: str
) -> None:
    row_weights = None if weights is None else torch.ones(weights)
    with pytest.raises(ConfigError, match=message):
        normalised_loss(torch.zeros(logits), torch.zeros(labels, dtype=torch.int64), 5, weights=row_weights)


def test_a_negative_number_of_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"valid_tokens = -4: .*pass batch\.valid_tokens"):
        normalised_loss(logits_of(), LABELS, -4)


def test_float64_logits_keep_their_precision() -> None:
    logits, weights = logits_of().double().requires_grad_(), torch.rand(5, dtype=torch.float64)
    logs, kept = logits.log_softmax(-1), [0, 2, 3, 4]
    losses = -logs[kept, LABELS[kept]]
    for row_weights, expected in ((None, losses.sum() / 4), (weights, (losses * weights[kept]).sum() / 4)):
        got = normalised_loss(logits, LABELS, 4, weights=row_weights)
        torch.testing.assert_close(got, expected, atol=1e-15, rtol=1e-15)
    assert normalised_loss(logits.bfloat16(), LABELS, 4).dtype == torch.float32


def test_a_loss_is_averaged_over_the_ranks_of_the_reduction_or_of_the_mean() -> None:
    averages = Reduction("DDP", 2, sums=False)
    for ranks in (2.0, 4.0):
        check_reduction(averages, ranks, 4, ranks)
    with pytest.raises(ConfigError, match="averaged_over = 3"):
        check_reduction(averages, 3.0, 4, 3.0)

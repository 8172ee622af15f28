"""Rank pool jobs with a layer whose attention and linear parts use two layouts."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray

from apportion import Communicator, from_linear, to_linear
from apportion.trainer.step.attention import planned_attention, planned_remap
from tests.ranks.jobs import handle_of, leaf

Array = NDArray[Any]


def project(x: torch.Tensor, weights: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """q [rows, 2, 4], k and v [rows, 1, 4] of hidden states [rows, E]."""
    rows = len(x)
    q, k, v = torch.split(x @ weights[0], [8, 4, 4], dim=1)
    return q.reshape(rows, 2, 4), k.reshape(rows, 1, 4), v.reshape(rows, 1, 4)


def feed_forward(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    """Hidden states [rows, E] from attention's output [rows, 8]; works row by row, so in any layout."""
    x = torch.tanh(x @ weights[1])
    return x + torch.relu(x @ weights[2]) @ weights[3]


def layer(
    comm: Communicator, shard: tuple[bytes, Array, list[Array], Array]
) -> tuple[tuple[int, int], Array, Array, list[Array]]:
    """Numbers of rows in both layouts, result, and gradients of hidden states and weights. shard: slice, hidden states,
    weights, gradient of the result."""
    piece, hidden, weights, grad = shard
    handle, hidden = handle_of(comm, piece), leaf(hidden, torch.float64)
    weights = [leaf(weight, torch.float64) for weight in weights]
    attended = planned_attention(*project(hidden, weights), handle).flatten(1)
    linear_rows = to_linear(attended, handle)
    out = from_linear(feed_forward(linear_rows, weights), handle)
    out.backward(torch.from_numpy(grad))
    rows = (len(attended), len(linear_rows))
    return rows, out.detach().numpy(), hidden.grad.numpy(), [weight.grad.numpy() for weight in weights]  # type: ignore[attr-defined]


def there_and_back(comm: Communicator, shard: tuple[bytes, Array]) -> tuple[Array, Array]:
    """Rows after a move and its inverse, in their own dtype, and the gradient of a weighted sum of them."""
    piece, rows = shard
    handle, x = handle_of(comm, piece), torch.from_numpy(rows).requires_grad_()
    back = planned_remap(planned_remap(x, handle, "attention", "linear"), handle, "linear", "attention")
    (back * x.detach()).sum().backward()
    return back.detach().numpy(), x.grad.numpy()

"""Rank pool jobs with attention that selects keys at run time among gathered rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

import apportion as ap
from apportion.backends.torch.transport import Communicator
from tests.ranks.jobs import handle_of

TOP = 5


class Projections(NamedTuple):
    """Projections of each row: query, key and value, and the indexer's query and key."""

    q: torch.Tensor
    kv: torch.Tensor
    index_query: torch.Tensor
    index: torch.Tensor


def project(x: torch.Tensor, weight: torch.Tensor) -> Projections:
    return Projections(*(x @ weight).split([8, 16, 3, 3], dim=1))


def sparse(own: Projections, kv: torch.Tensor, index: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Attention of each query to the TOP visible rows with the best indexer scores. kv, index: [visible, ...]; mask:
    bool [queries, visible]."""
    score = (own.index_query @ index.T).masked_fill(~mask, -torch.inf)
    best = score.topk(min(TOP, score.shape[1]), dim=1)
    keys, values = kv[best.indices].chunk(2, dim=2)
    logits = torch.einsum("qd,qkd->qk", own.q, keys) + best.values
    return torch.einsum("qk,qkd->qd", logits.softmax(1), values)


def layer(comm: Communicator, padding: int, shard: tuple[Any, ...]) -> tuple[Any, ...]:
    """Result, gradients of hidden states and weight, and the columns of visible rows. shard: slice, hidden states,
    weight, gradient of the result."""
    piece, hidden, weight, grad = shard
    handle = handle_of(comm, piece, padding)
    rows = torch.from_numpy(np.concatenate([hidden, np.ones((padding, hidden.shape[1]))])).requires_grad_()
    weight = torch.from_numpy(weight).requires_grad_()
    own = project(rows, weight)
    tokens = torch.cat([handle.tokens, torch.full((padding,), -1)])
    found = ap.gather_visible((own.kv, own.index, tokens), handle)
    kv, index, numbers = found.rows
    assert torch.equal(numbers, found.tokens)
    real = slice(handle.rows)
    assert not found.mask()[handle.rows :].any()
    out = sparse(Projections(*(part[real] for part in own)), kv, index, found.mask()[real])
    out.backward(torch.from_numpy(grad))
    assert rows.grad is not None
    assert not rows.grad[handle.rows :].any()
    columns = (found.tokens, found.positions, found.sequences, found.first, found.end, found.spans)
    results = out.detach(), rows.grad[real], weight.grad
    return *(one.numpy() for one in results), [part.numpy() for part in columns]


def gathered(comm: Communicator, kind: str, piece: bytes) -> None:
    handle = handle_of(comm, piece)
    ap.gather_visible(torch.zeros(handle.rows, 2), handle, kind)


def narrow(comm: Communicator, shard: tuple[bytes, NDArray[Any], float]) -> tuple[NDArray[Any], NDArray[Any]]:
    """The visible rows in bfloat16, and the gradients of this rank's rows if the gradient of each visible row is
    `weight`. shard: slice, rows, weight."""
    piece, rows, weight = shard
    x = torch.from_numpy(rows).bfloat16().requires_grad_()
    found = ap.gather_visible(x, handle_of(comm, piece))
    found.rows.sum().backward(torch.tensor(weight).bfloat16())
    return found.rows.detach().float().numpy(), x.grad.float().numpy()

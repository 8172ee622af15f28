"""A tiny encoder in front of a tiny decoder, each under its own plan, on ranks of the pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import apportion as ap
from apportion.backends.torch.transport import Communicator
from tests.ranks.jobs import handle_of

MERGE, PATCH, WIDTH, HEADS = 4, 6, 16, 2
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def weights() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = {
        "patch": (PATCH, WIDTH),
        "see": (WIDTH, 3 * WIDTH),
        "merge": (MERGE * WIDTH, WIDTH),
        "embed": (WIDTH, WIDTH),
        "read": (WIDTH, 3 * WIDTH),
    }
    tensors = {name: torch.randn(shape, generator=draw).double() / 4 for name, shape in shapes.items()}
    return {name: one.requires_grad_() for name, one in tensors.items()}


def layer(x: torch.Tensor, weight: torch.Tensor, attend: Attend) -> torch.Tensor:
    q, k, v = ((x @ weight).view(len(x), 3, HEADS, -1)).unbind(1)
    return x + attend(q, k, v).flatten(1)


def encode(patches: torch.Tensor, own: dict[str, torch.Tensor], attend: Attend) -> torch.Tensor:
    return layer((patches @ own["patch"]).tanh(), own["see"], attend)


def decode(
    tokens: torch.Tensor,
    rows: torch.Tensor,
    encoded: torch.Tensor,
    own: dict[str, torch.Tensor],
    attend: Attend,
) -> torch.Tensor:
    """Runs the decoder. encoded: the encoder's rows, MERGE for each of the decoder's `rows`."""
    merged = (encoded.reshape(-1, MERGE * WIDTH) @ own["merge"]).tanh()
    hidden = (tokens @ own["embed"]).index_copy(0, rows, merged)
    return layer(hidden, own["read"], attend)


def planned(comm: Communicator, padding: int, places: Any, shard: tuple[Any, ...]) -> tuple[Any, ...]:
    """This rank's result and its gradients of patches, tokens and weights. shard: slices of encoder and decoder,
    patches, tokens, gradient of the result."""
    encoder, decoder = handle_of(comm, shard[0], padding), handle_of(comm, shard[1])
    feed, own = ap.EncoderFeed(encoder, decoder, places, MERGE), weights()
    patches, tokens, grad = (torch.from_numpy(one) for one in shard[2:])
    padded = torch.cat([patches, torch.ones(padding, PATCH).double()]).requires_grad_()
    tokens.requires_grad_()
    encoded = ap.move_rows(encode(padded, own, lambda *qkv: ap.planned_attention(*qkv, encoder)), feed)
    out = decode(tokens, feed.rows, encoded, own, lambda *qkv: ap.planned_attention(*qkv, decoder))
    out.backward(grad)
    assert not padded.grad[len(patches) :].any()
    results = out.detach(), padded.grad[: len(patches)], tokens.grad
    return *(one.numpy() for one in results), {name: one.grad.numpy() for name, one in own.items()}


def refused(comm: Communicator, places: list[Any], merge: int, pieces: tuple[bytes, bytes]) -> str:
    """The error of feeding rows at this rank's places; "" if there is none."""
    encoder, decoder = (handle_of(comm, piece) for piece in pieces)
    try:
        feed = ap.EncoderFeed(encoder, decoder, places[comm.rank % len(places)], merge)
        ap.move_rows(torch.zeros(encoder.rows, 2), feed)
    except ap.ApportionError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def other_rows(comm: Communicator, places: Any, pieces: tuple[bytes, bytes]) -> str:
    """The error of moving a wrong number of rows; "" if there is none."""
    encoder, decoder = (handle_of(comm, piece) for piece in pieces)
    feed = ap.EncoderFeed(encoder, decoder, places, MERGE)
    assert feed.rows.numel() <= decoder.rows
    try:
        ap.move_rows(torch.zeros(encoder.rows + 1, 2), feed)
    except ap.ExecutionError as error:
        return str(error)
    return ""


def dense_attention(mask: np.ndarray) -> Attend:
    """Attention in one process, with a dense mask."""
    allowed = torch.from_numpy(mask)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (one.transpose(0, 1) for one in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, allowed).transpose(0, 1)

    return attend

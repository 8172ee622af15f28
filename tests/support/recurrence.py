"""Linear recurrences computed token by token directly from the formula, and inputs for them."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


def rows_of(
    rows: int, heads: int, key_heads: int, key: int, value: int, gate: str, delta: bool, seed: int = 0
) -> dict[str, Tensor]:
    """q, k [rows, key heads, key], v [rows, heads, value], g <= 0, and beta with the delta rule, in float64."""
    draw = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(rows, *shape, dtype=torch.float64, generator=draw)

    k = torch.nn.functional.normalize(random(key_heads, key), dim=-1)
    g = -random(heads, *(key,) * (gate == "diagonal")).abs() / 4
    beta = {"beta": random(heads).sigmoid()} if delta else {}
    return {"q": random(key_heads, key), "k": k, "v": random(heads, value), "g": g, **beta}


def token_by_token(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None = None,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = True,
    cu_seqlens: Tensor | None = None,
    parents: list[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Runs a recurrence with the arguments of a kernel, for a batch of one. parents: for each sequence, the sequence
    whose last state it starts from; -1: its own initial state."""
    heads, outs, states = v.shape[2], [], []
    q, k = (x[0].repeat_interleave(heads // x.shape[2], 1) for x in (q, k))
    ends = [0, v.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    for number, (first, last) in enumerate(pairwise(ends)):
        parent = -1 if parents is None else parents[number]
        h = v.new_zeros(heads, k.shape[-1], v.shape[-1])
        h = h if initial_state is None else initial_state[number]
        h = states[parent] if parent >= 0 else h
        for t in range(first, last):
            decay = g[0, t].exp()
            h = (decay if decay.dim() == 2 else decay[:, None])[..., None] * h
            new = v[0, t]
            if beta is not None:
                new = beta[0, t][:, None] * (new - torch.einsum("hk,hkv->hv", k[t], h))
            h = h + torch.einsum("hk,hv->hkv", k[t], new)
            outs.append(scale * torch.einsum("hk,hkv->hv", q[t], h))
        states.append(h)
    return torch.stack(outs)[None], torch.stack(states)

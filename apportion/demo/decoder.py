"""A small decoder-only transformer: RMSNorm, RoPE from position ids, grouped-query attention, SwiGLU.

Attention is an argument: the demo runs the same weights with planned and with plain attention.
Shapes: tokens and position_ids [rows]; hidden [rows, E]; q [rows, Hq, D]; k, v [rows, Hk, D].
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import apportion as ap

#: (q, k, v, kind=attention kind) -> out [rows, Hq, D]
Attention = Callable[..., Tensor]


class Decoder(nn.Module):
    """tokens, position_ids -> logits [rows, vocabulary]. model: its sizes; layers of a kind are consecutive."""

    def __init__(self, model: ap.Model, vocabulary: int) -> None:
        super().__init__()
        layers = {"default": model.layers} if isinstance(model.layers, int) else model.layers
        self.embed = nn.Embedding(vocabulary, model.hidden)
        self.layers = nn.ModuleList(
            Layer(model, kind) for kind, count in layers.items() for _ in range(count)
        )
        self.norm = nn.RMSNorm(model.hidden)
        self.head = nn.Linear(model.hidden, vocabulary, bias=False)

    def forward(self, tokens: Tensor, position_ids: Tensor, attention: Attention) -> Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden, position_ids, attention)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


class Layer(nn.Module):
    def __init__(self, model: ap.Model, kind: str) -> None:
        super().__init__()
        self.kind, self.heads = kind, (model.q_heads, model.kv_heads, model.kv_heads)
        self.norms = nn.ModuleList(nn.RMSNorm(model.hidden) for _ in range(2))
        self.qkv = nn.Linear(model.hidden, sum(self.heads) * model.head_dim, bias=False)
        self.out = nn.Linear(model.q_heads * model.head_dim, model.hidden, bias=False)
        self.up = nn.Linear(model.hidden, 2 * model.ffn, bias=False)
        self.down = nn.Linear(model.ffn, model.hidden, bias=False)

    def forward(self, hidden: Tensor, position_ids: Tensor, attention: Attention) -> Tensor:
        return self.post(hidden, attention(*self.pre(hidden, position_ids), kind=self.kind))

    def pre(self, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v."""
        rows, heads = len(hidden), sum(self.heads)
        # no -1 in the shape: a rank may hold no rows
        qkv = self.qkv(self.norms[0](hidden)).view(rows, heads, self.qkv.out_features // heads)
        q, k, v = qkv.split(self.heads, dim=1)
        return rotate(q, position_ids), rotate(k, position_ids), v

    def post(self, hidden: Tensor, out: Tensor) -> Tensor:
        """The layer's output from its input and attention's output."""
        hidden = hidden + self.out(out.flatten(1))
        gate, value = self.up(self.norms[1](hidden)).chunk(2, dim=-1)
        mixed: Tensor = hidden + self.down(nn.functional.silu(gate) * value)
        return mixed


def rotate(x: Tensor, position_ids: Tensor, base: float = 10_000.0) -> Tensor:
    """RoPE (Su et al., 2021) on x [rows, heads, D], halves paired."""
    half = x.shape[-1] // 2
    frequency = base ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = position_ids[:, None, None] * frequency
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)

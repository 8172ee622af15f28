"""Projections for `planned_attention_block` and `planned_latent_attention` from a layer's own modules: any weights, any
heads, no permutation.

hidden [n, E] ──rows of the weights of some heads──► q [n, heads, D] ──norm, rotary──► q; k and v alike
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor, cat, nn, split
from torch.nn import functional

#: (x [n, heads, D], position_ids [n]) -> x with its positions
Rotary = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class HeadProjection:
    """The projection of some heads, from the linear layers of all.

    q, k, v: linear layers with or without bias whose outputs lie head after head, `head_dim` (`v_head_dim`) each.
    q_norm, k_norm: applied to each head's row (QK-norm); rotary: applied to q and k after that. Weights are read at
    every call and never kept, so the layers may be wrapped by FSDP2 as parts of the module whose forward calls
    `planned_attention_block`: shard that module, not the layers one by one.
    """

    q: nn.Linear
    k: nn.Linear
    v: nn.Linear
    head_dim: int
    v_head_dim: int | None = None
    q_norm: nn.Module | None = None
    k_norm: nn.Module | None = None
    rotary: Rotary | None = None

    @property
    def params(self) -> tuple[nn.Parameter, ...]:
        """All parameters, for the call: read anew each time, in the forward that makes the call."""
        return tuple(self._params())

    def _params(self) -> Iterator[nn.Parameter]:
        for module in (self.q, self.k, self.v, self.q_norm, self.k_norm):
            if module is not None:
                yield from module.parameters()

    def __call__(
        self, hidden: Tensor, position_ids: Tensor, q_heads: tuple[int, ...], kv_heads: tuple[int, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of hidden [n, E]: [n, heads, D], of the heads and in the order given; a list may be empty."""
        q = self._placed(heads_of(self.q, hidden, q_heads, self.head_dim), self.q_norm, position_ids)
        k = self._placed(heads_of(self.k, hidden, kv_heads, self.head_dim), self.k_norm, position_ids)
        return q, k, heads_of(self.v, hidden, kv_heads, self.v_head_dim or self.head_dim)

    def _placed(self, x: Tensor, norm: nn.Module | None, position_ids: Tensor) -> Tensor:
        x = x if norm is None else norm(x)
        return x if self.rotary is None else self.rotary(x, position_ids)


@dataclass(frozen=True)
class LatentExpansion:
    """The expansion of latent rows for `planned_latent_attention` from a layer's linear layer of all heads.

    linear: from rank to the heads, one after another, each with its own part of k and then v. own: width of that part.
    width: of v. Weights are read at every call and never kept; only a `Linear` of another kind (LoRA, quantized) makes
    all heads where some are wanted.
    """

    linear: nn.Module
    own: int
    width: int

    @property
    def params(self) -> tuple[nn.Parameter, ...]:
        """All parameters, for the call: read anew each time, in the forward that makes the call."""
        return tuple(self.linear.parameters())

    def __call__(self, compressed: Tensor, rotated: Tensor, heads: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """k [n, heads, own + rope] and v [n, heads, width] of compressed [n, rank] and rotated [n, rope]."""
        size = self.own + self.width
        if type(self.linear) is nn.Linear and len(heads) * size < self.linear.out_features:
            made = heads_of(self.linear, compressed, heads, size)
        else:
            made = self.linear(compressed).view(len(compressed), -1, size)
            made = made if heads == tuple(range(made.shape[1])) else made[:, list(heads)]
        own, v = split(made, [self.own, self.width], -1)
        return cat((own, rotated.unsqueeze(1).expand(-1, len(heads), -1)), -1), v


def heads_of(linear: nn.Linear, hidden: Tensor, heads: tuple[int, ...], width: int) -> Tensor:
    """[n, len(heads), width]: the layer's outputs of some of its heads, computed alone."""
    chosen = list(heads)
    weight = linear.weight.view(-1, width, linear.in_features)[chosen].flatten(0, 1)
    bias = None if linear.bias is None else linear.bias.view(-1, width)[chosen].flatten()
    return functional.linear(hidden, weight, bias).view(len(hidden), len(chosen), width)

"""Projections for `planned_attention_block` and `planned_latent_attention` from a layer's own modules, for any weights
and subset of heads, without permutation.

hidden [n, E] ──rows of the weights of some heads──► q [n, heads, D] ──norm, rotary──► q; the same for k and v
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, arange, cat, enable_grad, nn, split
from torch.nn import functional

from apportion.backends.torch.graphs import nodes
from apportion.backends.torch.rehearsal import LOW, are_close
from apportion.ir.errors import ConfigError

#: (x [n, heads, D], position_ids [n]) -> x with rotary positions applied
Rotary = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class HeadProjection:
    """Projection of a subset of heads, from linear layers of all heads.

    q, k, v: linear layers with or without bias whose outputs are ordered by head, `head_dim` (`v_head_dim`) each.
    q_norm, k_norm: applied to each head's row (QK-norm); rotary: applied to q and k after that. Weights are read at
    every call and never cached, so FSDP2 may wrap the layers as parts of the module whose forward calls
    `planned_attention_block`: shard that module, not the individual layers.
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
        """All parameters, read in the forward of each call."""
        return tuple(self._params())

    def _params(self) -> Iterator[nn.Parameter]:
        for module in (self.q, self.k, self.v, self.q_norm, self.k_norm):
            if module is not None:
                yield from module.parameters()

    def __call__(
        self, hidden: Tensor, position_ids: Tensor, q_heads: tuple[int, ...], kv_heads: tuple[int, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of hidden [n, E]: [n, heads, D], for these heads in order; a list may be empty."""
        q = self._with_positions(heads_of(self.q, hidden, q_heads, self.head_dim), self.q_norm, position_ids)
        k = self._with_positions(heads_of(self.k, hidden, kv_heads, self.head_dim), self.k_norm, position_ids)
        return q, k, heads_of(self.v, hidden, kv_heads, self.v_head_dim or self.head_dim)

    def _with_positions(self, x: Tensor, norm: nn.Module | None, position_ids: Tensor) -> Tensor:
        x = x if norm is None else norm(x)
        return x if self.rotary is None else self.rotary(x, position_ids)


@dataclass(frozen=True)
class LatentExpansion:
    """Expansion of latent rows for `planned_latent_attention`, by a layer's linear layer for all heads.

    linear: maps latent rows to all heads in order: for each, k without its rotated part, then v. own: width of this k;
    width: of v. Weights are read at every call, not cached; only layers other than a plain `Linear` (LoRA, quantized)
    compute all heads when only some are needed.
    """

    linear: nn.Module
    own: int
    width: int

    @property
    def params(self) -> tuple[nn.Parameter, ...]:
        """All parameters, read in the forward of each call."""
        return tuple(self.linear.parameters())

    def __call__(self, compressed: Tensor, rotated: Tensor, heads: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """k [n, heads, own + rope] and v [n, heads, width] of compressed [n, rank] and rotated [n, rope]."""
        size = self.own + self.width
        if type(self.linear) is nn.Linear and len(heads) * size < self.linear.out_features:
            values = heads_of(self.linear, compressed, heads, size)
        else:
            values = self.linear(compressed).unflatten(-1, (-1, size))
            values = values if heads == tuple(range(values.shape[1])) else values[:, list(heads)]
        keys, v = split(values, [self.own, self.width], -1)
        return cat((keys, rotated.unsqueeze(1).expand(-1, len(heads), -1)), -1), v


_ROWS = 64  # rows to check


def check_projection(
    project: Callable[..., Sequence[Tensor]], params: Sequence[Tensor], *rows: Tensor
) -> None:
    """Checks `project(*rows)`, [n, ...] each, which also runs for rows of other ranks and again in backward. Raises
    ConfigError if a row depends on other rows or on random numbers, or if `params` lacks a tensor that it uses."""
    count = min(len(rows[0]), _ROWS)
    fewer = arange(count, device=rows[0].device)[1:].flip(0)
    with enable_grad():
        full, part = (
            [*project(*(tensor.detach()[selection] for tensor in rows))]
            for selection in (slice(count), fewer)
        )
    param_ids, ends = {*map(id, params)}, {tensor.grad_fn for tensor in params}
    leaves = (
        getattr(node, "variable", None)
        for node in nodes((tensor.grad_fn for tensor in full), ends.__contains__)
    )
    if missing := [
        tuple(tensor.shape) for tensor in leaves if tensor is not None and id(tensor) not in param_ids
    ]:
        rule = "would get no gradient: the projection uses them, and they are not among its params"
        raise ConfigError(
            "params", f"without tensors of shapes {missing}", rule, "pass all that need gradients"
        )
    for tensor, expected in zip(full, part, strict=True):
        if len(expected) and not are_close(
            tensor[fewer].flatten(1), expected.flatten(1), tensor.dtype not in LOW
        ):
            rule = "returns different results on other ranks and in backward, which run it again"
            raise ConfigError(
                "projection",
                "depends on other rows or random numbers",
                rule,
                "remove dropout and other random or row-mixing layers",
            )


def heads_of(linear: nn.Linear, hidden: Tensor, heads: tuple[int, ...], width: int) -> Tensor:
    """[n, len(heads), width]: the layer's outputs for some of its heads, computed without the others."""
    indexes = list(heads)
    weight = linear.weight.view(-1, width, linear.in_features)[indexes].flatten(0, 1)
    bias = None if linear.bias is None else linear.bias.view(-1, width)[indexes].flatten()
    return functional.linear(hidden, weight, bias).view(len(hidden), len(indexes), width)

"""Memory savings for long contexts: feed-forward networks and loss in tiles of rows, and checkpoints on the host.

    ap.memory.tile(model, "mlp", tokens=4096)                           once, each submodule of that name
    hidden = ap.memory.offloaded(layer, hidden, batch.handle)           instead of torch's checkpoint
    loss = ap.memory.tiled_loss(hidden, head.weight, batch.labels, batch.valid_tokens)

Results equal the untiled ones row by row, since tiled functions are row-wise. Forecasts model them as `mlp_tile`,
`offload` and `loss_tokens` of the training. Tiles follow ALST (Bekman et al., 2025); the loss computes its gradients in
forward, like Liger Kernel's (Hsu et al., 2024).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import save_on_cpu
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from apportion.ir.errors import ConfigError
from apportion.ir.fields import integer, name as name_of
from apportion.trainer.step import wiring
from apportion.trainer.step.attention import refuse_gradients
from apportion.trainer.step.loss import IGNORED, checked_labels, share_of


def tile(model: nn.Module, name: str, tokens: int = 4096) -> int:
    """Makes every submodule named `name` compute `tokens` rows of its input [..., rows, width] at a time: forward saves
    only the input, and backward recomputes. Returns the number of submodules. Each must map one tensor to one with the
    same rows. Raises ConfigError if there is no such submodule."""
    tokens, name = integer("tokens", tokens), name_of("name", name)
    modules = [module for path, module in model.named_modules() if path.rpartition(".")[2] == name]
    if not modules:
        names = sorted({path.rpartition(".")[2] for path, _ in model.named_modules() if path})
        remedy = f"name one of {', '.join(names)}"
        raise ConfigError("name", name, "is not a submodule of the model", remedy)
    for module in modules:
        module.forward = _Tiled(module.forward, tokens)
    return len(modules)


class _Tiled:
    """A row-wise function that runs on `tokens` rows at a time."""

    def __init__(self, forward: Callable[[Tensor], Tensor], tokens: int) -> None:
        self._forward, self._tokens = forward, tokens

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([self._tile_part(rows) for rows in torch.split(x, self._tokens, -2)], -2)

    def _tile_part(self, rows: Tensor) -> Tensor:
        needs_grad = torch.is_grad_enabled()
        out = checkpoint(self._forward, rows, use_reentrant=False) if needs_grad else self._forward(rows)
        if not isinstance(out, Tensor) or out.shape[:-1] != rows.shape[:-1]:
            shape = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
            rule = f"must be a tensor with the rows of its input, {tuple(rows.shape)}"
            raise ConfigError("a tiled module's output", shape, rule, "tile a module inside it")
        return out


def offloaded(layer: Callable[..., Any], *inputs: Any) -> Any:
    """Runs `layer(*inputs)`, and again in backward; its input tensors are kept in host memory, pinned if there is a
    GPU. The layer's activations are not kept. Its parameters get gradients also if no input requires one, as behind
    frozen embeddings."""
    if torch.is_grad_enabled() and not any(isinstance(one, Tensor) and one.requires_grad for one in inputs):
        floats = (isinstance(one, Tensor) and one.is_floating_point() for one in inputs)
        inputs = tuple(
            one.detach().requires_grad_() if is_float else one
            for one, is_float in zip(inputs, floats, strict=True)
        )
    with save_on_cpu(pin_memory=torch.cuda.is_available()):
        return checkpoint(layer, *inputs, use_reentrant=True)


def tiled_loss(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    valid_tokens: float,
    averaged_over: int = 1,
    weights: Tensor | None = None,
    tokens: int = 1024,
) -> Tensor:
    """`normalised_loss` of the logits `hidden @ head.T`, computed for `tokens` rows at a time: forward also computes
    the gradients, accumulating the head's in float32.

    hidden [rows, E], head [vocabulary, E], the whole matrix, of a layer without a bias: under FSDP2 call it inside the
    module that gathers it. Other arguments and errors: see `normalised_loss`. Differentiable once.
    """
    tokens = integer("tokens", tokens)
    refuse_gradients("use normalised_loss", weights=weights)
    if hidden.dim() == 3 and len(hidden) == 1:
        hidden = hidden[0]
    if hidden.dim() != 2 or head.dim() != 2 or hidden.shape[1] != head.shape[1]:
        rule, shapes = "must be [rows, E] and [vocabulary, E]", (tuple(hidden.shape), tuple(head.shape))
        raise ConfigError("hidden and head", shapes, rule, "pass this rank's rows, and the head's weight")
    batch, labels, weights = checked_labels(hidden, labels, valid_tokens, weights)
    if not wiring.watch.settled:
        wiring.watch.heads[head] = None
    total: Tensor = _TiledLoss.apply(hidden, head, labels, weights, tokens)  # type: ignore[no-untyped-call]
    return share_of(total, batch, valid_tokens, averaged_over)


class _TiledLoss(torch.autograd.Function):
    """Autograd function of the summed loss. hidden [rows, E], head [vocabulary, E], labels, weights [rows] or None."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, labels: Tensor, weights: Tensor | None, tokens: int
    ) -> Tensor:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        total = torch.zeros((), dtype=dtype, device=hidden.device)
        hidden_grad, head_grad = torch.empty_like(hidden), torch.zeros_like(head, dtype=dtype)
        for first in range(0, len(hidden), tokens):
            rows = slice(first, first + tokens)
            with torch.enable_grad():
                logits = (hidden[rows].detach() @ head.detach().T).requires_grad_()
                losses = cross_entropy(logits.to(dtype), labels[rows], ignore_index=IGNORED, reduction="none")
                part = losses.sum() if weights is None else (losses * weights[rows].to(dtype)).sum()
            (grad,) = torch.autograd.grad(part, logits)
            total += part.detach()
            hidden_grad[rows] = grad @ head
            head_grad += grad.T @ hidden[rows]
        ctx.save_for_backward(hidden_grad, head_grad)
        ctx.dtype = head.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden_grad, head_grad = ctx.saved_tensors
        return hidden_grad * grad.to(hidden_grad.dtype), (head_grad * grad).to(ctx.dtype), None, None, None

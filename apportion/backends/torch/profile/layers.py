"""Measured rates of layers other than attention, in eager torch: matrix products, row work, the loss, Adam.

Forward and backward are timed together, in the shapes of one layer; FLOPs and bytes are counted as in
`apportion.ir.layer_work`, which forecasts convert to times at these rates. Shape suffixes: T tokens, E hidden size, F
FFN size, H heads of Q, K and V together, D head dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear, rms_norm, silu

from apportion.backends.torch.memory.arrays import DTYPES
from apportion.backends.torch.profile.clock import Runs, Work, best_us
from apportion.ir.layer_work import BACKWARD, LOSS, adam_bytes, linear_parameters, row_work_numbers
from apportion.ir.request.figures import Figure
from apportion.ir.request.model import Model

BOTH = 1 + BACKWARD  # forward and backward relative to forward
ROTARY_BASE = 10_000.0
#: torch's implementations of AdamW -> arguments
ADAM: dict[str, dict[str, bool]] = {"by default": {}, "foreach": {"foreach": True}, "fused": {"fused": True}}


@dataclass(frozen=True)
class TimedLayer:
    """Device and shapes of one timed layer. tokens: per rank; vocab: logits per token."""

    model: Model
    tokens: int
    vocab: int
    device: torch.device
    runs: Runs

    def linear_tflops(self) -> Figure:
        """1e12 FLOP/s of the matrix products of one layer."""
        flops = 2 * BOTH * linear_parameters(self.model) * self.tokens
        return self._rate(self._products(), flops / 1e3, f"linear layers, {self._shape}", digits=6)

    def rows_gbs(self) -> Figure:
        """1e9 bytes/s that norms, residual sums, rotary embeddings and the gate move."""
        moved_bytes = BOTH * self.tokens * self.model.element_bytes * row_work_numbers(self.model)
        source = f"norms, residual sums, rotary embeddings and gate, {self._shape}"
        return self._rate(self._row_work(), moved_bytes, source)

    def loss_gbs(self) -> Figure:
        """1e9 bytes/s that the cross-entropy of logits moves."""
        moved_bytes = BOTH * LOSS * self.tokens * self.vocab * self.model.element_bytes
        source = f"cross-entropy of {self.tokens} x {self.vocab} logits, forward and backward"
        return self._rate(self._loss(), moved_bytes, source)

    def optimizer_gbs(self) -> Figure:
        """1e9 bytes/s of a step of AdamW over one layer's float32 weights; the figure's source lists torch's other
        implementations."""
        shapes = [*self._weights(), (self.model.hidden,), (self.model.hidden,)]
        count = sum(torch.Size(shape).numel() for shape in shapes)
        moved_bytes = count * adam_bytes(4, self.model.element_bytes)
        rates = {name: moved_bytes / self._adam_us(shapes, options) / 1e3 for name, options in ADAM.items()}
        others = ", ".join(f"{name} {rate:.4g}" for name, rate in rates.items() if ADAM[name])
        source = f"measured: torch's default AdamW, {count} float32 parameters; {others}"
        return Figure(round(rates["by default"], 4), source)

    def _rate(self, work: Work, amount: float, source: str, digits: int = 4) -> Figure:
        """The rate of an amount of work, in 1e9 per second."""
        us = best_us(work, self.device, self.runs)
        return Figure(round(amount / us / 1e3, digits), f"measured: {source}")

    @property
    def _shape(self) -> str:
        m = self.model
        return f"hidden {m.hidden}, ffn {m.ffn}, {self.tokens} tokens, forward and backward"

    def _weights(self) -> list[tuple[int, int]]:
        """[out, in] of the layer's matrices."""
        m = self.model
        qkv = m.q_heads * m.head_dim + m.kv_heads * (m.head_dim + m.value_dim)
        return [
            (qkv, m.hidden),
            (m.hidden, m.q_heads * m.value_dim),
            (2 * m.ffn, m.hidden),
            (m.hidden, m.ffn),
        ]

    def _random_tensor(self, *shape: int) -> Tensor:
        """A normally distributed tensor that requires a gradient."""
        numbers = torch.randn(shape, device=self.device).to(DTYPES[self.model.dtype])
        return numbers.requires_grad_()

    def _products(self) -> Work:
        weights = [self._random_tensor(*shape) for shape in self._weights()]
        inputs = [self._random_tensor(self.tokens, weight.shape[1]) for weight in weights]
        return _forward_and_backward(lambda: list(map(linear, inputs, weights)), [*inputs, *weights])

    def _row_work(self) -> Work:
        m, rows = self.model, self.tokens
        heads = [m.q_heads, m.kv_heads, m.kv_heads]
        hidden_TE, out_TE, down_TE = (self._random_tensor(rows, m.hidden) for _ in range(3))
        qkv_THD = self._random_tensor(rows, sum(heads), m.head_dim)
        up_TF = self._random_tensor(rows, 2 * m.ffn)
        scales = [self._random_tensor(m.hidden) for _ in range(2)]
        positions = torch.arange(rows, device=self.device)

        def work() -> list[Tensor]:
            first = rms_norm(hidden_TE, (m.hidden,), scales[0])
            q, k, v = torch.split(qkv_THD, heads, dim=1)
            middle = hidden_TE + out_TE
            second = rms_norm(middle, (m.hidden,), scales[1])
            gate, value = up_TF.chunk(2, dim=-1)
            return [
                first,
                rotated(q, positions),
                rotated(k, positions),
                v,
                second,
                silu(gate) * value,
                middle + down_TE,
            ]

        return _forward_and_backward(work, [hidden_TE, qkv_THD, out_TE, up_TF, down_TE, *scales])

    def _loss(self) -> Work:
        logits_TV = self._random_tensor(self.tokens, self.vocab)
        labels = torch.randint(self.vocab, (self.tokens,), device=self.device)
        return _forward_and_backward(
            lambda: [cross_entropy(logits_TV.float(), labels, reduction="sum")], [logits_TV]
        )

    def _adam_us(self, shapes: Sequence[tuple[int, ...]], options: dict[str, bool]) -> float:
        weights = [torch.nn.Parameter(torch.randn(shape, device=self.device)) for shape in shapes]
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer = torch.optim.AdamW(weights, **options)  # type: ignore[arg-type]
        return best_us(optimizer.step, self.device, self.runs)


def rotated(x_THD: Tensor, positions: Tensor) -> Tensor:
    """RoPE (Su et al., 2021), halves paired."""
    half = x_THD.shape[-1] // 2
    frequency = ROTARY_BASE ** (-torch.arange(half, device=x_THD.device, dtype=torch.float32) / half)
    angle = positions[:, None, None] * frequency
    cos, sin = angle.cos().to(x_THD.dtype), angle.sin().to(x_THD.dtype)
    a, b = x_THD[..., :half], x_THD[..., half : 2 * half]
    return torch.cat([a * cos - b * sin, a * sin + b * cos, x_THD[..., 2 * half :]], dim=-1)


def _forward_and_backward(forward: Callable[[], list[Tensor]], inputs: Sequence[Tensor]) -> Work:
    """Work that runs forward, and backward to all inputs."""
    grads = [torch.ones_like(output) for output in forward()]
    return lambda: torch.autograd.grad(forward(), inputs, grads)

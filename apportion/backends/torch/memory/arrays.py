"""Memory layout of a rank's tensors: one array per part, or one for parts that are interleaved for transfer.

work arenas    Q [rows, columns, D]     KV [rows, columns, D + Dv]: k, then v      O: o [rows, columns, Dv], lse
home rows      the same with all heads, except that k and v are two arrays, as the caller passes them in
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch

from apportion.backends.interp import Component, components
from apportion.ir.plan.tables import Header
from apportion.ir.tensors import HEADLESS, Space, Tensor as Name

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
)


class Array(NamedTuple):
    """One array [rows, columns, width] of a tensor; a dimension of size 0 is dropped. parts: the widths of the
    parts that are interleaved in it."""

    dtype: torch.dtype
    columns: int
    width: int
    parts: tuple[int, ...]

    def shape(self, rows: int) -> tuple[int, ...]:
        return (rows, *(size for size in (self.columns, self.width) if size))

    @property
    def row_bytes(self) -> int:
        return max(self.columns, 1) * max(self.width, 1) * self.dtype.itemsize


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def arrays_of(
    tensor: Name, space: Space, header: Header, columns: int | None = None, hidden: int = 0
) -> list[Array]:
    """The arrays of a tensor. columns: head columns of a work arena (all heads by default); hidden: width of X, dX."""
    if tensor in HEADLESS:
        columns = 0
    elif columns is None:
        columns = header.heads_of(tensor)
    parts = components(tensor, header, hidden)
    if tensor.contents.fused and (tensor, space) != (Name.KV, Space.HOME):
        widths = tuple(part.width for part in parts)
        return [
            Array(_dtype(tensor, parts[0], header), columns, sum(max(width, 1) for width in widths), widths)
        ]
    return [Array(_dtype(tensor, part, header), columns, part.width, (part.width,)) for part in parts]


def _dtype(tensor: Name, part: Component, header: Header) -> torch.dtype:
    # Each merge rounds the LSE, and backward turns that into a relative error of the whole row: in float64 the
    # error of 10 merges equals that of one. Messages and kernels carry it in the accumulator's dtype.
    if tensor == Name.O and part.name == "lse":
        return torch.float64
    return wire_dtype(tensor, part, DTYPES[header.dtype])


def wire_dtype(tensor: Name, part: Component, model: torch.dtype, narrow: bool = False) -> torch.dtype:
    """The dtype of a part in a message; narrow: the part belongs to a sum sent in the model's dtype."""
    if part.integer:
        return torch.int64
    rounded = narrow and part.width > 0  # all but row statistics
    return accumulator_dtype(model) if tensor.contents.wide and not rounded else model


def part_views(arrays: Iterable[torch.Tensor], specs: Iterable[Array]) -> tuple[torch.Tensor, ...]:
    """Every part as its own tensor, e.g. k and v of an interleaved array."""
    return tuple(part for array, spec in zip(arrays, specs, strict=True) for part in _split(array, spec))


def _split(array: torch.Tensor, spec: Array) -> tuple[torch.Tensor, ...]:
    if len(spec.parts) == 1:
        return (array,)
    views = torch.split(array, [max(width, 1) for width in spec.parts], -1)
    return tuple(view if width else view.squeeze(-1) for view, width in zip(views, spec.parts, strict=True))

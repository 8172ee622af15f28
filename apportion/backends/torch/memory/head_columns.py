"""Access to head columns of a tensor: views if they are evenly spaced, else gather and scatter."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

import torch
from torch import Tensor

from apportion.backends.interp import columns_of

Columns = slice | tuple[int, ...]


def pick(tensor: Tensor, columns: Columns) -> Tensor:
    """[rows, len(columns), ...]: a view for a slice, else a copy."""
    return (
        tensor[:, columns]
        if isinstance(columns, slice)
        else tensor.index_select(1, index_of(columns, tensor.device))
    )


def put(tensor: Tensor, columns: Columns, value: Tensor) -> None:
    """Writes back the result of `pick` after changes in place; does nothing for a view."""
    if not isinstance(columns, slice):
        tensor.index_copy_(1, index_of(columns, tensor.device), value)


@lru_cache(maxsize=1024)
def index_of(columns: tuple[int, ...], device: torch.device) -> Tensor:
    """int64 [columns], cached on the device: copying from the host would stall the device each time."""
    return torch.tensor(columns, device=device)


@dataclass(frozen=True, slots=True)
class HeadGroup:
    """Query columns, ordered by KV head, and their KV columns: each KV column serves the same number of query
    columns."""

    q: Columns
    kv: Columns
    kv_heads: int


@lru_cache(maxsize=1024)
def head_groups(kv_of: tuple[int, ...]) -> tuple[HeadGroup, ...]:
    """Groups with equally many query columns per KV column; usually one. kv_of: the KV column of each query column."""
    by_kv = sorted(range(len(kv_of)), key=lambda i: kv_of[i])
    by_head = [(kv, tuple(members)) for kv, members in groupby(by_kv, key=lambda i: kv_of[i])]
    ratios = sorted({len(members) for _, members in by_head})
    return tuple(_group([row for row in by_head if len(row[1]) == ratio]) for ratio in ratios)


def _group(by_head: list[tuple[int, tuple[int, ...]]]) -> HeadGroup:
    q = tuple(i for _, members in by_head for i in members)
    kv = tuple(column for column, _ in by_head)
    return HeadGroup(columns_of(q), columns_of(kv), len(kv))

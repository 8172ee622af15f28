"""Example arguments for compiling kernels without a device.

The kernels' signatures have the types of integers and floats; the dtypes of arrays are here.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

#: arrays of the model's dtype
_MODEL = frozenset(
    {
        *("q_home", "q_work", "k_home", "v_home", "kv_work", "do_home", "do_work", "sinks"),
        *("out", "dq_out", "dk_out", "dv_out", "wire"),
    }
)
_TABLES = frozenset({"tiles", "entries", "heads", "arrays", "chunks"})
_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        **dict.fromkeys(_TABLES, torch.int32),
        "panels": torch.int64,
        **dict.fromkeys(("lse", "lse_home", "lse_work", "shares"), torch.float64),
        **dict.fromkeys(
            ("o", "o_home", "o_work", "lse_wire", "delta_home", "delta_work", "dlse"), torch.float32
        ),
        **dict.fromkeys(("dq_home", "dq_work", "dkv_home", "dkv_work"), torch.float32),
    }
)
#: numbers by type: addresses are multiples of 16, sizes are arbitrary
_NUMBERS: Mapping[str, int | float] = MappingProxyType({"i32": 3, "i64": 1 << 40, "fp32": 0.5})


def examples(parameters: Mapping[str, str], dtype: torch.dtype) -> list[Any]:
    """One argument per parameter, for models of a dtype. parameters: name -> Triton type ("" for arrays)."""
    return [_NUMBERS[kind] if kind else _array(name, dtype) for name, kind in parameters.items()]


def _array(name: str, dtype: torch.dtype) -> Tensor:
    """An empty array at address 0, a multiple of 16."""
    return torch.empty(0, dtype=dtype if name in _MODEL else _DTYPES[name])

"""Registers the package's ops with torch, so that features that work on ops, like selective checkpointing, apply.

Uses `Library` instead of `torch.library.custom_op`, which adds 50 us to a forward and backward: on a small
microbatch more than the kernels take.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

LIBRARY: Any = torch.library.Library("apportion", "FRAGMENT")  # type: ignore[no-untyped-call]


def op(function: Callable[..., Any]) -> Callable[..., Any]:
    """Registers a function as an op with its name, for all devices."""
    name = function.__name__.removeprefix("_")
    schema = torch.library.infer_schema(function, mutates_args=()).replace("SymInt", "int")
    LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    return function

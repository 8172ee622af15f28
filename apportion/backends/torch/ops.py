"""Registers the ops of this package with torch: what looks at ops, like selective activation checkpointing, sees them.

With `Library` and not with `torch.library.custom_op`, which takes 50 us more for a forward and backward: on a small
microbatch that is longer than the kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

LIBRARY: Any = torch.library.Library("apportion", "FRAGMENT")  # type: ignore[no-untyped-call]


def op(function: Callable[..., Any]) -> Callable[..., Any]:
    """Registers it as the op of its name, for all devices."""
    name = function.__name__.removeprefix("_")
    schema = torch.library.infer_schema(function, mutates_args=()).replace("SymInt", "int")
    LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    return function

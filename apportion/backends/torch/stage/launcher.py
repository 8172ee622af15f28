"""How a kernel gets to the device: Triton compiles it on its first launch, and then it is started directly.

Triton's own way to start a kernel looks at every argument each time, to see whether it has to compile anew: 28 us a
launch where this takes 9. What decides that here are the compile-time arguments and the arrays' dtypes alone: sizes are
not specialised, and arrays begin at multiples of 16 bytes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from triton.runtime import driver

from apportion.backends.torch.stage import attention, rows

KERNELS: Mapping[str, Any] = {
    **{name: getattr(attention, name) for name in ("attend", "dq", "dkdv")},
    **{name: getattr(rows, name) for name in ("move", "add", "merge", "delta", "finish")},
}


class Launcher(Protocol):
    """Takes launches in the order of one stream: a kernel, how many programs, its arguments, and its compile-time
    arguments with Triton's options."""

    def __call__(
        self, kernel: str, programs: int, args: Sequence[Any], constants: Mapping[str, Any]
    ) -> None: ...


class DeviceLauncher:
    """Launches on the current stream of the current device."""

    def __init__(self) -> None:
        self._compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}

    def __call__(self, kernel: str, programs: int, args: Sequence[Any], constants: Mapping[str, Any]) -> None:
        dtypes = [arg.dtype for arg in args if isinstance(arg, torch.Tensor)]
        key = (kernel, driver.active.get_current_device(), *dtypes, *constants.values())
        if key not in self._compiled:
            self._compiled[key] = _compile(kernel, args, constants)
        compiled, rest = self._compiled[key]
        compiled[programs, 1, 1](*args, *rest)


def _compile(kernel: str, args: Sequence[Any], constants: Mapping[str, Any]) -> tuple[Any, tuple[Any, ...]]:
    """The compiled kernel, and the arguments that follow those of a launch."""
    function = KERNELS[kernel]
    compiled = function.warmup(*args, grid=(1,), **constants)
    return compiled, tuple(constants[name] for name in function.arg_names[len(args) :])


def interpreted(kernel: str, programs: int, args: Sequence[Any], constants: Mapping[str, Any]) -> None:
    """Interprets a kernel, on the CPU."""
    KERNELS[kernel][(programs,)](*args, **constants)


def default_launcher() -> Launcher:
    """Triton's interpreter where TRITON_INTERPRET=1 asks for it, else the device."""
    return interpreted if os.environ.get("TRITON_INTERPRET") == "1" else _ON_DEVICE


_ON_DEVICE = DeviceLauncher()

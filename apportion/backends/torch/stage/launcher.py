"""Kernel launcher: Triton compiles a kernel on its first launch; later launches start it directly.

Triton's own launch inspects every argument each time to decide whether to recompile: 28 us per launch, against 9 us
here. Here only compile-time arguments and the arrays' dtypes decide: sizes are not specialised, and arrays are aligned
to 16 bytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from triton.runtime import driver

from apportion.backends.torch.stage import attention, rows

KERNELS: Mapping[str, Any] = {
    **{name: getattr(attention, name) for name in ("attend", "dq", "dkdv")},
    **{name: getattr(rows, name) for name in ("move", "add", "merge", "delta", "finish")},
}


#: launches in stream order: a kernel, the number of programs, its arguments, and its compile-time arguments with
#: Triton's options
Launcher = Callable[[str, int, Sequence[Any], Mapping[str, Any]], None]


class DeviceLauncher:
    """Launches on the current stream of the current device."""

    def __init__(self) -> None:
        self._compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}

    def __call__(self, kernel: str, programs: int, args: Sequence[Any], constants: Mapping[str, Any]) -> None:
        dtypes = [arg.dtype for arg in args if isinstance(arg, torch.Tensor)]
        key = (kernel, driver.active.get_current_device(), *dtypes, *constants.values())
        if key not in self._compiled:
            self._compiled[key] = _compile(kernel, args, constants)
        compiled, extra = self._compiled[key]
        compiled[programs, 1, 1](*args, *extra)


def _compile(kernel: str, args: Sequence[Any], constants: Mapping[str, Any]) -> tuple[Any, tuple[Any, ...]]:
    """The compiled kernel, and the arguments to append to those of a launch."""
    function = KERNELS[kernel]
    compiled = function.warmup(*args, grid=(1,), **constants)
    return compiled, tuple(constants[name] for name in function.arg_names[len(args) :])


def interpret(kernel: str, programs: int, args: Sequence[Any], constants: Mapping[str, Any]) -> None:
    """Interprets a kernel, on the CPU."""
    KERNELS[kernel][(programs,)](*args, **constants)


def default_launcher() -> Launcher:
    """Triton's interpreter if TRITON_INTERPRET=1, else the device."""
    return interpret if os.environ.get("TRITON_INTERPRET") == "1" else _ON_DEVICE


_ON_DEVICE = DeviceLauncher()

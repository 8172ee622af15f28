"""How a kernel gets to the device: Triton compiles it on its first launch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

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


def on_device(kernel: str, programs: int, args: Sequence[Any], constants: Mapping[str, Any]) -> None:
    """Launches one of `KERNELS` on the current stream, or interprets it."""
    KERNELS[kernel][(programs,)](*args, **constants)

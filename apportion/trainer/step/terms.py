"""Terms of a loss beside shares of a mean, and the scale of a GradScaler, read from autograd's graph and the
callers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from threading import get_ident
from typing import Any

from torch import Tensor
from torch.amp import GradScaler
from torch.autograd.graph import _engine_run_backward

from apportion.backends.torch.graphs import nodes

#: keys in the metadata of nodes
SHARE, LOGITS, MULTIPLIED = "apportion.share", "apportion.logits", "apportion.multiplied"


def mark(known: Tensor, kind: str = SHARE) -> None:
    """What a loss is made of is known."""
    node: Any = known.grad_fn
    if node is not None:
        node.metadata[kind] = True


def holds(loss: Tensor, kind: str) -> bool:
    """Whether a loss is made of something marked, or compiled, of which nothing is known."""
    return any(
        kind in one.metadata or one.name() == "CompiledFunctionBackward" for one in nodes([loss.grad_fn])
    )


def scaled_by() -> float:
    """What the GradScaler has multiplied a loss by whose step this is in; 1.0 without."""
    frame = sys._getframe()
    while frame is not None and frame.f_code is not GradScaler.step.__code__:
        frame = frame.f_back  # type: ignore[assignment]
    return 1.0 if frame is None else float(frame.f_locals["self"].get_scale())


def passes_by(kind: str) -> bool:
    """Whether the loss whose backward this is reaches parameters otherwise too than through what is marked."""
    found = [*nodes(_roots(), lambda node: kind in node.metadata)]
    return any(kind in node.metadata for node in found) and any(hasattr(node, "variable") for node in found)


def _roots() -> Iterator[Any]:
    """Of the innermost backward of this thread, or of those that others wait for: hooks on other devices run in threads
    of their own."""
    frames = sys._current_frames()
    here = [*_nodes(frames.pop(get_ident()))]
    yield from here or (node for frame in frames.values() for node in _nodes(frame))


def _nodes(frame: Any) -> Iterator[Any]:
    while frame is not None and frame.f_code is not _engine_run_backward.__code__:
        frame = frame.f_back
    for one in frame.f_locals["t_outputs"] if frame is not None else ():
        yield one.grad_fn if isinstance(one, Tensor) else one.node

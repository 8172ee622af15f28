"""Detects loss terms other than shares of a mean, and the scale of a GradScaler, from autograd's graph and the call
stack."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from math import prod
from threading import get_ident
from typing import Any

from torch import Tensor
from torch.amp import GradScaler
from torch.autograd.graph import _engine_run_backward
from torch.optim import Optimizer

from apportion.backends.torch.graphs import nodes

_OPAQUE = ("CompiledFunctionBackward", "CheckpointFunctionBackward")  # nodes that hide the terms of a loss
#: keys in the metadata of nodes
SHARE, LOGITS, MULTIPLIED = "apportion.share", "apportion.logits", "apportion.multiplied"


def mark(known: Tensor, kind: str = SHARE) -> None:
    """Marks a tensor as a known term of losses."""
    node: Any = known.grad_fn
    if node is not None:
        node.metadata[kind] = True


def has_term(loss: Tensor, kind: str) -> bool:
    """True if a loss has a marked term; for shares also if it is compiled, so that its terms are unknown."""
    compiled = "CompiledFunctionBackward" if kind == SHARE else None
    return any(kind in node.metadata or node.name() == compiled for node in nodes([loss.grad_fn]))


_STEP = Optimizer.profile_hook_step(print).__code__  # of the function that runs a step and its hooks


def stepping() -> Any:
    """The outermost optimizer whose step is running, such as ZeRO's around that of its shards; None if there is none,
    or it is compiled."""
    result, frame = None, sys._getframe()
    while frame is not None:
        if frame.f_code is _STEP:
            result = frame.f_locals["args"][0]
        frame = frame.f_back  # type: ignore[assignment]
    return result


def running_loss_scale() -> float:
    """The loss scale of the GradScaler whose step is running; 1.0 if there is none."""
    frame = sys._getframe()
    while frame is not None and frame.f_code is not GradScaler.step.__code__:
        frame = frame.f_back  # type: ignore[assignment]
    return 1.0 if frame is None else float(frame.f_locals["self"].get_scale())


def has_unmarked_path(kind: str) -> bool:
    """True if the loss of the running backward reaches parameters on a path without a marked term."""
    graph = [*nodes(_roots(), lambda node: kind in node.metadata)]
    return any(kind in node.metadata for node in graph) and any(hasattr(node, "variable") for node in graph)


def is_known() -> bool:
    """True if the loss of the running backward has a marked term, or is not a scalar of an eager computation."""
    roots = [node for node in _roots() if node is not None]
    opaque = (len(node._input_metadata[0].shape) or node.name() in _OPAQUE for node in roots)
    return any(map(_is_marked, nodes(roots))) or any(opaque)


def means() -> set[int]:
    """The numbers of values of which the loss of the running backward takes means on paths to marked terms."""
    path = (node for node in nodes(_roots(), _is_marked) if node.name() == "MeanBackward0")
    return {prod(node._saved_self_sym_sizes) for node in path}


def _is_marked(node: Any) -> bool:
    return SHARE in node.metadata or LOGITS in node.metadata


def is_multiplied() -> bool:
    """True if an adapter has multiplied the loss of the running backward by the number of ranks."""
    graph = nodes(_roots(), lambda node: SHARE in node.metadata)
    return any(MULTIPLIED in node.metadata and SHARE not in node.metadata for node in graph)


def _roots() -> Iterator[Any]:
    """The roots of this thread's innermost backward, or of other threads' backwards: hooks on other devices run in
    separate threads."""
    frames = sys._current_frames()
    roots = [*_nodes(frames.pop(get_ident()))]
    yield from roots or (node for frame in frames.values() for node in _nodes(frame))


def _nodes(frame: Any) -> Iterator[Any]:
    while frame is not None and frame.f_code is not _engine_run_backward.__code__:
        frame = frame.f_back
    for output in frame.f_locals["t_outputs"] if frame is not None else ():
        yield output.grad_fn if isinstance(output, Tensor) else output.node

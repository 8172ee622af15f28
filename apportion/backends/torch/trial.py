"""The first steps of a loop of one's own: what its model computes of a row, checked.

    first forward   module and arguments of the call in which attention ran; a few rows of attention's results
    first step      the module again, on these rows and on fewer of them: the same rows, or an error

Models that were tried before are not tried again, nor those with an attribute `mixes_rows = True`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable
from functools import partial
from logging import getLogger
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map

from apportion.backends.torch.handle import PlanHandle
from apportion.backends.torch.rerun import Call, Part, Results, kept_rows
from apportion.backends.torch.transport import Transport
from apportion.ir.errors import ConfigError

_ROWS, _LEAST = 64, 4  # that a module is run on again


class ModelTrial:
    """Of what this process trains. part: of the run that goes on, which gives attention's results. handle: gives
    that of the last attention, while it lives. Each module is tried once; those of a later training too."""

    def __init__(self) -> None:
        self.part: Part | None = None
        self.handle: Callable[[], PlanHandle | None] = lambda: None
        self.calls = dict[nn.Module, Call]()
        self.over = False  # what attended in this pass was tried
        self._seen, self._tried, self._met = WeakSet[nn.Module](), WeakSet[nn.Module](), False
        self._last = 0  # the arguments of the module's last call

    def begin(self) -> None:
        """A pass over a loader, perhaps for another model."""
        self.over = self._met = False
        self.calls.clear()

    def keep(
        self, handle: PlanHandle, results: Results, held: Callable[[], list[Tensor]], enabled: Collection[Any]
    ) -> nn.Module | None:
        """Attention gave these results, [rows, ...] each. The module in whose call, outside all others, where that was
        not seen before. held: of the handle's batch the tensors; enabled: models that were tried already."""
        first = next((one.handle for one in self.calls.values()), handle)
        past = self.over or handle is not first or handle.communicator.ranks == 1
        if past or (found := _outermost()) is None:
            return None
        (module, given), last = found, self._last
        self._last = id(given[1])
        new = module not in self._seen
        self._seen.add(module)
        self._met = True
        inner = {*module.modules()}
        fsdp = next((one for one in inner if isinstance(one, FullyShardedDataParallel)), None)
        handle.wrapper = fsdp or handle.wrapper
        if inner & {*enabled} or fsdp is not None:
            self._tried.add(module)
        elif module not in self.calls and module not in self._tried:
            count = max(min(_ROWS, handle.rows, handle.padded_rows - 1), 0)
            rows = torch.randperm(handle.rows, generator=torch.Generator().manual_seed(1))[:count]
            own = held()
            _check_places(module, given, handle, {*map(id, own)})
            kept = tree_map(partial(kept_rows, handle.padded_rows, rows, {*map(id, own)}), given)
            self.calls[module] = Call(module, kept, handle, rows, own)
            last = self._last
        if last == self._last and (call := self.calls.get(module)) is not None:
            call.results.append(tuple(one.detach()[call.rows.to(one.device)] for one in results))
        return module if new else None

    def run(self, params: Iterable[Tensor], transports: Iterable[Transport]) -> bool:
        """Before an optimizer's step; a collective of transports where modules were found. Whether they were
        tried. Raises ConfigError."""
        held = {*map(id, params)}
        calls = [one for one in self.calls.values() if held & {*map(id, one.module.parameters())}]
        if not calls:
            self.over |= self._met and not self.calls
            return False
        least = min(len(one.rows) for one in calls)
        for transport in transports:
            least = min(map(min, transport.all_gather([least], "rows to try a model on")))
        for call in calls:
            del self.calls[call.module]
        if least < _LEAST:  # of a small microbatch
            return False
        self._tried.update(one.module for one in calls)
        inside = {id(param) for one in calls for param in one.module.parameters()}
        if held - inside:
            names = ", ".join(dict.fromkeys(type(one.module).__name__ for one in calls))
            what = (
                f"{len(held - inside)} of {len(held)} parameters are outside of {names}, where attention runs"
            )
            getLogger(__name__).warning("%s: what is computed there is not checked", what)
        for call in calls:
            if not getattr(call.module, "mixes_rows", False):
                call.check(partial(setattr, self, "part"))
        return True


def _check_places(module: nn.Module, given: Any, handle: PlanHandle, known: Collection[int]) -> None:
    """Raises ConfigError for an argument that numbers this rank's rows in a line, which are of other places."""
    line = torch.arange(handle.rows)
    for one in tree_leaves(given) if handle.rows > 1 and not getattr(module, "mixes_rows", False) else ():
        if not isinstance(one, Tensor) or one.is_floating_point() or id(one) in known:
            continue
        found = one.detach().flatten().cpu()[: handle.rows]
        if one.numel() != handle.padded_rows or not torch.equal(found - found[0], line):
            continue
        if not torch.equal(found, handle.position_ids):
            rule = f"is given {found[0]}, {found[1]}, ... for this rank's rows, whose places in their texts are others"
            remedy = "give batch.position_ids; where you know better, set its attribute mixes_rows = True"
            raise ConfigError("model", type(module).__name__, rule, remedy)


_CALL = nn.Module._wrapped_call_impl.__code__


def _outermost() -> tuple[nn.Module, Any] | None:
    """The module in whose call this is, outside all others, with (args, kwargs): no wrapper, and no step of
    Lightning, which it calls in forward's place. None in backward, which recomputes."""
    found, frame = None, sys._getframe() if torch._C._current_graph_task_id() == -1 else None
    while (frame := frame and frame.f_back) is not None:
        if frame.f_code is _CALL:
            module = frame.f_locals["self"]
            if not isinstance(module, DistributedDataParallel) and not hasattr(module, "training_step"):
                found = module, (frame.f_locals["args"], frame.f_locals["kwargs"])
    return found

"""Reruns a module's call on fewer of its rows, with attention's results replayed from the first run.

given   arguments; of per-row tensors only `rows`
whole   these rows ─► module          records every module's output, attention's inputs, the result
part    fewer rows, in another order ─► module ─► the same rows, or an error
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from logging import getLogger
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from apportion.backends.torch.handle import PlanHandle
from apportion.backends.torch.rehearsal import LOW, ExactMode, Rehearsal, is_here, recorded, undisturbed
from apportion.ir.errors import ConfigError

_PART = 0.6  # share of the rows in the last run
_REMEDY = (
    "compute each row from its token and position id alone, with planned attention in every layer; if it mixes rows "
    "on purpose, set its attribute mixes_rows = True"
)

Results = tuple[Tensor, ...]


class Part(Rehearsal):
    """Some rows of a module's call, `taken`, int64; results: of each call of attention, for all rows kept."""

    def __init__(self, taken: Tensor, results: Sequence[Results], whole: Rehearsal | None = None) -> None:
        super().__init__(taken, torch.zeros_like(taken), whole)
        self._results = results

    def answer(self, *inputs: Tensor) -> Results:
        """The recorded results of attention for these rows."""
        number = len(self.attended)
        self.record(f"the input of attention, call {number}", inputs, decides=True)
        self.attended.append(inputs[0])
        return tuple(one[self.taken.to(one.device)] for one in self._results[number])


@dataclass
class ModuleCall:
    """A module's call that ran planned attention. given: its arguments, per-row tensors reduced to `rows`; held:
    tensors of the batch, referenced by identity and cut in place; sums: of position ids and arguments."""

    module: nn.Module
    given: Any
    handle: PlanHandle
    rows: Tensor
    held: Sequence[Tensor]
    sums: list[int]
    results: list[Results] = field(default_factory=list)

    def check(self, run: Callable[[Part | None], None]) -> None:
        """Raises ConfigError if a row changes when fewer rows are computed. run: reruns with a part's results."""
        name, count = type(self.module).__name__, len(self.rows)
        draw = torch.Generator().manual_seed(0)
        fewer = torch.randperm(count, generator=draw)[: max(2, int(_PART * count))]
        whole, here = None, is_here(self.module)
        with undisturbed(self.module, next(self.module.parameters()).device) as reset:
            for taken in (torch.arange(count), torch.arange(count), fewer):
                part = Part(taken, self.results, whole)
                part.exact = here or self.results[0][0].dtype not in LOW
                reset()
                try:
                    run(part)
                    with self._cut(self.rows[taken]), recorded(self.module, part), ExactMode(here):
                        args, kwargs = tree_map(lambda one, at=taken: _taken(one, at), self.given)
                        part.record("its result", self.module(*args, **kwargs), decides=True)
                except Exception as error:
                    why = f"cannot run on {len(taken)} of its rows ({type(error).__name__}: {error})"
                    return getLogger(__name__).warning("%s %s: its layers are not checked", name, why)
                finally:
                    run(None)
                if whole is not None and (differs := part.differing()) is not None:
                    if taken is not fewer:
                        why = "gives different results each time"
                        return getLogger(__name__).warning("%s %s: its layers are not checked", name, why)
                    rule = f"{differs} computes or receives rows that depend on other rows, their number or order"
                    raise ConfigError("model", name, rule, _REMEDY)
                whole = whole or part
        return None

    @contextmanager
    def _cut(self, rows: Tensor) -> Iterator[None]:
        """Cuts the batch and its handle, which models may read, to these rows."""
        tensors = *self.held, self.handle.tokens, self.handle.position_ids
        held = [*{id(one): one for one in tensors}.values()]
        before, handle = [one.data for one in held], vars(self.handle)
        kept = {name: handle[name] for name in ("padding", "rows")}
        try:
            for one in held:
                one.data = one.data[rows.to(one.device)]
            handle.update(padding=0, rows=len(rows))
            yield
        finally:
            handle.update(kept)
            for one, data in zip(held, before, strict=True):
                one.data = data


@dataclass(frozen=True)
class _Argument:
    """The kept rows of an argument, and the dimensions that index rows."""

    tensor: Tensor
    dims: tuple[int, ...]


def kept_rows(rows: int, taken: Tensor, known: Collection[int], value: Any) -> Any:
    """The taken rows of a tensor with `rows` rows; known tensors and other values unchanged."""
    if not isinstance(value, Tensor) or id(value) in known:
        return value
    value, dims = value.detach(), tuple(dim for dim, size in enumerate(value.shape) if size == rows)
    return _Argument(_indexed(value, dims, taken), dims) if dims else value


def _taken(value: Any, at: Tensor) -> Any:
    return _indexed(value.tensor, value.dims, at) if isinstance(value, _Argument) else value


def _indexed(tensor: Tensor, dims: Sequence[int], at: Tensor) -> Tensor:
    for dim in dims:
        tensor = tensor.index_select(dim, at.to(tensor.device))
    return tensor

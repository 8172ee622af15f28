"""Row-independence check of a custom loop's model, in its first step and again in some later ones.

    forward         records the module and arguments of the call in which attention ran, and a few rows of its results
    before a step   reruns the module on these rows, in another order, and on fewer of them: equal rows, or an error

Models are checked again when `again` is called; those with an attribute `mixes_rows = True` are not checked.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from logging import getLogger
from typing import Any
from weakref import WeakKeyDictionary, WeakSet
from zlib import crc32

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map

from apportion.backends.torch.handle import PlanHandle
from apportion.backends.torch.rehearsal import (
    LOW,
    ExactMode,
    Rehearsal,
    is_whole,
    noiseless,
    recording,
    snapshot,
)
from apportion.backends.torch.transport import Transport
from apportion.ir.errors import ConfigError

_ROWS, _MIN_ROWS = 64, 4  # maximum and minimum number of rows of a rerun
_PREFIXES = 11  # prefixes of an argument that have a checksum
_LONGER = 1.1  # growth of the longest position after which models are checked again
_PART = 0.6  # share of the rows in the last run
_REMEDY = (
    "compute each row only from its token and position id, with planned attention in every layer (with tensor "
    "parallelism the loader's communicator= has the ranks of other tokens); if it mixes rows on purpose, set its "
    "attribute mixes_rows = True"
)

Results = tuple[Tensor, ...]


class ModelTrial:
    """Checks each of this process's models once, and once more after `again`. part: during a rerun, its `Part`, which
    replays attention's results. eager: during a call of attention that reports its results, unlike one in a compiled
    graph, whose op does. handle: returns the handle of the last attention call, if alive. met: whether a module called
    attention in this pass. Modules of a later training run are checked too."""

    def __init__(self) -> None:
        self.part: Part | None = None
        self.eager = False
        self.handle: Callable[[], PlanHandle | None] = lambda: None
        self.calls = dict[nn.Module, ModuleCall]()
        self.over = False  # whether the modules of this pass were checked
        self._seen, self._checked, self.met = WeakSet[nn.Module](), WeakSet[nn.Module](), False
        self._reported = WeakKeyDictionary[nn.Module, set[str]]()  # texts in the log
        self._longest = 0  # position in a batch
        self._last = 0  # id of the arguments of the module's last call

    def begin(self) -> None:
        """Starts a pass over a loader, possibly for another model."""
        self.over = self.met = False
        self.calls.clear()

    def again(self) -> None:
        """Checks the modules of the next calls again."""
        self.over = False
        self.calls.clear()
        self._checked.clear()

    def keep(
        self,
        handle: PlanHandle,
        results: Results,
        batch_tensors: Callable[[], list[Tensor]],
        enabled: Collection[Any],
    ) -> nn.Module | None:
        """Records attention's results, [rows, ...] each, for the outermost module that is being called, if it is new.
        batch_tensors: tensors of the handle's batch; enabled: models that were checked elsewhere."""
        if handle.longest > _LONGER * self._longest:
            self.again()
        self._longest = max(self._longest, handle.longest)
        first = next((item.handle for item in self.calls.values()), handle)
        past = self.over or handle is not first or handle.communicator.ranks == 1
        if past or (outermost := _outermost_call()) is None:
            return None
        (module, arguments), last = outermost, self._last
        self._last = id(arguments[1])
        is_new = module not in self._seen
        self._seen.add(module)
        self.met = True
        inner = {*module.modules()}
        fsdp = next((item for item in inner if isinstance(item, FullyShardedDataParallel)), None)
        handle.wrapper = fsdp or handle.wrapper
        if module in enabled or fsdp is not None:
            self._checked.add(module)
        elif module not in self.calls and module not in self._checked:
            count = max(min(_ROWS, handle.rows, handle.padded_rows - 1), 0)
            rows = torch.randperm(handle.rows, generator=torch.Generator().manual_seed(1))[:count]
            tensors = batch_tensors()
            _check_places(module, arguments, handle, {*map(id, tensors)})
            saved = tree_map(partial(kept_rows, handle.padded_rows, rows, {*map(id, tensors)}), arguments)
            sums = _checksums(handle.position_ids, 0)
            floats = (x for x in tree_leaves(arguments) if isinstance(x, Tensor) and x.is_floating_point())
            for item in floats:
                if handle.padded_rows in item.shape and not item.requires_grad:
                    sums += _checksums(item.movedim(item.shape.index(handle.padded_rows), 0), 1)
            self.calls[module] = ModuleCall(module, saved, handle, rows, tensors, sums)
            last = self._last
        if last == self._last and (call := self.calls.get(module)) is not None:
            call.results.append(tuple(item.detach()[call.rows.to(item.device)] for item in results))
        return module if is_new else None

    def run(self, params: Iterable[Tensor], transports: Iterable[Transport]) -> bool:
        """Checks the recorded modules before an optimizer's step; a collective of each of `transports`. Returns
        whether they were checked. Raises ConfigError."""
        ids = {*map(id, params)}
        calls = [*self.calls.values()]  # a frozen teacher's too
        if not any(ids & {*map(id, item.module.parameters())} for item in calls):
            self.over |= self.met and not self.calls
            return False
        smallest = min(len(item.rows) for item in calls)
        for transport in transports:
            smallest = min(map(min, transport.all_gather([smallest], "rows to check a model on")))
            for call in calls:
                _check_tables(call.module, transport.all_gather(call.sums, "arguments of a model"))
        for call in calls:
            del self.calls[call.module]
        if smallest < _MIN_ROWS:  # a small microbatch
            return False
        self._checked.update(item.module for item in calls)
        covered = {id(param) for item in calls for param in item.module.parameters()}
        if ids - covered:
            names = ", ".join(dict.fromkeys(type(item.module).__name__ for item in calls))
            text = f"{len(ids - covered)} of {len(ids)} parameters are outside {names}, which calls attention"
            self._report(calls[0].module, f"{text}: their modules are not checked")
        for call in calls:
            if not getattr(call.module, "mixes_rows", False):
                reason = call.check(partial(setattr, self, "part"), smallest)
                if reason is not None:
                    self._report(
                        call.module, f"{type(call.module).__name__} {reason}: its layers are not checked"
                    )
        return True

    def _report(self, module: nn.Module, text: str) -> None:
        """Logs a text, once for each module."""
        reported = self._reported.setdefault(module, set())
        if text not in reported:
            getLogger(__name__).warning("%s", text)
        reported.add(text)


def _check_places(module: nn.Module, arguments: Any, handle: PlanHandle, known: Collection[int]) -> None:
    """Raises ConfigError for an argument that numbers this rank's rows consecutively, unlike the position ids."""
    line = torch.arange(handle.rows)
    for tensor in (
        tree_leaves(arguments) if handle.rows > 1 and not getattr(module, "mixes_rows", False) else ()
    ):
        if not isinstance(tensor, Tensor) or tensor.is_floating_point() or id(tensor) in known:
            continue
        values = tensor.detach().flatten().cpu()[: handle.rows]
        if tensor.numel() != handle.padded_rows or not torch.equal(values - values[0], line):
            continue
        if not torch.equal(values, handle.position_ids):
            rule = (
                f"receives {values[0]}, {values[1]}, ... for this rank's rows, which have other position ids"
            )
            remedy = "pass batch.position_ids; if these are intended, set its attribute mixes_rows = True"
            raise ConfigError("model", type(module).__name__, rule, remedy)


def _checksums(table: Tensor, distinct: int) -> list[int]:
    """Checksums of the first 4, 8, 16, … rows of a table, `_PREFIXES` of them; 0 beyond its end. distinct: 1 to end the
    table before the first row that repeats an earlier one, else 0."""
    result, seen, total = [0] * _PREFIXES, set[bytes](), 0
    for number, row in enumerate(table.detach()[: 2 << _PREFIXES].double().cpu().numpy(), 1):
        seen.add(row.tobytes())
        if len(seen) < number * distinct:
            break
        total = crc32(row.tobytes(), total)
        if number >= 4 and number & (number - 1) == 0:
            result[number.bit_length() - 3] = total
    return result


def _check_tables(module: nn.Module, ranks: list[list[int]]) -> None:
    """Raises ConfigError for a floating-point argument with the same rows on ranks whose position ids differ."""
    if getattr(module, "mixes_rows", False) or len({*map(len, ranks)}) > 1:
        return
    sums = np.array(ranks).reshape(len(ranks), -1, _PREFIXES)
    positions, tables = sums[:, :1], sums[:, 1:]
    if (
        (tables[:, None] == tables) & (tables != 0) & (positions[:, None] != positions) & (positions != 0)
    ).any():
        rule = "receives an argument with equal rows on ranks whose rows have different position ids"
        remedy = "index tables by batch.position_ids; if it is intended, set its attribute mixes_rows = True"
        raise ConfigError("model", type(module).__name__, rule, remedy)


_CALL = nn.Module._wrapped_call_impl.__code__


def _outermost_call() -> tuple[nn.Module, Any] | None:
    """The outermost module that is being called, with (args, kwargs), except wrappers, compiled or not, and modules
    whose step Lightning calls instead of forward. None in backward, which recomputes."""
    result, frame = None, sys._getframe() if torch._C._current_graph_task_id() == -1 else None
    while (frame := frame and frame.f_back) is not None:
        if frame.f_code is _CALL:
            module = frame.f_locals["self"]
            if (compiled := getattr(module, "_orig_mod", None)) is not None:
                module = compiled.module if isinstance(compiled, DistributedDataParallel) else compiled
            if not isinstance(module, DistributedDataParallel) and not hasattr(module, "training_step"):
                result = module, (frame.f_locals["args"], frame.f_locals["kwargs"])
    return result


# ---- reruns of a module's call on fewer of its rows, with attention's results replayed from the first run


class Part(Rehearsal):
    """Some rows of a module's call, `selected`, int64; results: one per attention call, for all recorded rows."""

    def __init__(self, selected: Tensor, results: Sequence[Results], whole: Rehearsal | None = None) -> None:
        super().__init__(selected, torch.zeros_like(selected), whole)
        self._results = results

    def answer(self, *inputs: Tensor) -> Results:
        """The recorded results of attention for these rows."""
        number = len(self.outputs)
        self.record(f"the input of attention, call {number}", inputs, decides=True)
        self.outputs.append(inputs[0])
        return tuple(tensor[self.selected.to(tensor.device)] for tensor in self._results[number])


@dataclass
class ModuleCall:
    """A module's call that ran planned attention. inputs: its arguments, per-row tensors cut to `rows`; tensors: of
    the batch, referenced by identity and cut in place; sums: checksums of position ids and arguments."""

    module: nn.Module
    inputs: Any
    handle: PlanHandle
    rows: Tensor
    tensors: Sequence[Tensor]
    sums: list[int]
    results: list[Results] = field(default_factory=list)

    def check(self, set_part: Callable[[Part | None], None], count: int) -> str | None:
        """Raises ConfigError if a row changes in another order of rows, or when fewer are computed, others on each
        rank, as tensor-parallel ranks would mix them. Returns why rows cannot be compared, if so. set_part: sets the
        part to rerun; count: rows of each rank."""
        positions, device = self.handle.position_ids[self.rows[:count]], next(self.module.parameters()).device
        draw = torch.Generator().manual_seed(self.handle.communicator.rank)
        order, rows = torch.randperm(count, generator=draw), torch.arange(count)
        is_last = positions[order] == positions.max()  # left out: models may read a rank's largest position
        fewer = order[is_last.int().argsort(stable=True)][: max(2, int(_PART * count))]
        is_local, parts = is_whole(self.module), list[Part]()
        # (rows, number of the run with which results are compared): the third and the fourth begin with the state that
        # the second has kept, the others with the module's; all of them on every rank, since a module may communicate
        runs = (rows, None), (rows, 0), (rows, None), (order, 2), (fewer, 0)
        with noiseless(self.module, device) as reset:
            for number, (indexes, other) in enumerate(runs):
                part = Part(indexes, self.results, None if other is None else parts[other])
                part.exact = is_local or self.results[0][0].dtype not in LOW
                if number == 2:
                    keep = snapshot(self.module, ())
                (keep if number in (2, 3) else reset)()
                try:
                    set_part(part)
                    with (
                        self._cut_batch(self.rows[indexes]),
                        recording(self.module, part),
                        _eagerly(self.module),
                        ExactMode(is_local),
                    ):
                        args, kwargs = tree_map(lambda value, i=indexes: _take_rows(value, i), self.inputs)
                        part.record("its result", self.module(*args, **kwargs), decides=True)
                except Exception as error:
                    return f"cannot run on {len(indexes)} of its rows ({type(error).__name__}: {error})"
                finally:
                    set_part(None)
                parts.append(part)
        random, reordered, cut = (parts[number].first_difference() for number in (1, 3, 4))
        if random is not None:
            return "gives different results each time"
        if (differs := cut or reordered) is not None:
            rule = f"{differs} computes or receives rows that depend on other rows, their number or order"
            raise ConfigError("model", type(self.module).__name__, rule, _REMEDY)
        return None

    @contextmanager
    def _cut_batch(self, rows: Tensor) -> Iterator[None]:
        """Cuts the batch and its handle, which models may read, to these rows."""
        tensors = *self.tensors, self.handle.tokens, self.handle.position_ids
        distinct = [*{id(tensor): tensor for tensor in tensors}.values()]
        saved, handle = [tensor.data for tensor in distinct], vars(self.handle)
        settings = {name: handle[name] for name in ("padding", "rows")}
        try:
            for tensor in distinct:
                tensor.data = tensor.data[rows.to(tensor.device)]
            handle.update(padding=0, rows=len(rows))
            yield
        finally:
            handle.update(settings)
            for tensor, data in zip(distinct, saved, strict=True):
                tensor.data = data


def _eagerly(module: nn.Module) -> AbstractContextManager[None]:
    """A context in which compiled parts of the module run eagerly."""
    parts = module.modules()
    if not any(part._compiled_call_impl is not None or hasattr(part, "_orig_mod") for part in parts):
        return nullcontext()
    stance: AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
    return stance


@dataclass(frozen=True)
class _Argument:
    """The kept rows of an argument, and the dimensions that index rows."""

    tensor: Tensor
    dims: tuple[int, ...]


def kept_rows(rows: int, selected: Tensor, known: Collection[int], value: Any) -> Any:
    """The selected rows of a tensor with `rows` rows; known tensors and other values unchanged."""
    if not isinstance(value, Tensor) or id(value) in known:
        return value
    value, dims = value.detach(), tuple(dim for dim, size in enumerate(value.shape) if size == rows)
    return _Argument(_indexed(value, dims, selected), dims) if dims else value


def _take_rows(value: Any, rows: Tensor) -> Any:
    """The rows of an argument. Tensors of the batch, which are cut in place, are copied: a model may keep them."""
    if isinstance(value, _Argument):
        return _indexed(value.tensor, value.dims, rows)
    return value.clone() if isinstance(value, Tensor) and not value.is_floating_point() else value


def _indexed(tensor: Tensor, dims: Sequence[int], rows: Tensor) -> Tensor:
    for dim in dims:
        tensor = tensor.index_select(dim, rows.to(tensor.device))
    return tensor

"""Executes one rank's program on stage kernels: one launch per instruction (`attend_grad`: two); makes no decisions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from apportion.backends.interp import Operand, Step
from apportion.backends.torch.executor import Layer, TorchMachine
from apportion.backends.torch.kernels.checks import is_checking, require_finite, require_numbers
from apportion.backends.torch.memory.arenas import Memory
from apportion.backends.torch.memory.arrays import DTYPES
from apportion.backends.torch.memory.rounds import Round
from apportion.backends.torch.stage.drafts import Launch
from apportion.backends.torch.stage.launcher import Launcher, default_launcher
from apportion.backends.torch.stage.program import StageExecutable
from apportion.backends.torch.stage.rowlists import Slot
from apportion.backends.torch.transport import Transport
from apportion.ir.plan.fusion import gaps
from apportion.ir.tensors import Tensor as Name


class StageMachine(TorchMachine):
    """A TorchMachine for a program from `stage.program.load`. launcher: starts kernels on the device."""

    def __init__(
        self,
        executable: StageExecutable,
        memory: Memory,
        layer: Layer,
        transport: Transport,
        launcher: Launcher | None = None,
    ) -> None:
        self._loaded, self.launcher = executable, launcher or default_launcher()
        executable.table.join()
        super().__init__(executable, memory, layer, transport)
        self._score = layer.score.scale, layer.score.softcap or 1.0
        self._arrays = [self._array(slot) for slot in executable.drafts.slots]
        self._addresses = [array.data_ptr() for array in self._arrays]
        self._unused = executable.table.data  # stands in for absent arrays of the layer
        self._sinks = self._unused if layer.sinks is None else layer.sinks

    @cached_property
    def _results(self) -> tuple[Tensor, ...]:
        """The caller's results, [rows, heads, width] in the model's dtype: the output, or dq, dk and dv of a
        backward program."""
        header, dtype = self.program.header, DTYPES[self.program.header.dtype]
        keys = header.kv_heads
        widths = (header.q_heads, header.head_dim), (keys, header.head_dim), (keys, header.v_head_dim)
        if Name.DO in self.memory.home:
            return tuple(self.memory.allocate(width, dtype) for width in widths)
        return (self.memory.allocate((header.q_heads, header.v_head_dim), dtype),)

    @cached_property
    def _sink_gradient_shares(self) -> Tensor:
        """Buffer for each delta tile's share of the sinks' gradients."""
        shape = (self._loaded.drafts.shares, self.program.header.q_heads)
        return torch.zeros(shape, dtype=torch.float64, device=self.memory.device)

    def bind(self) -> None:
        """Does nothing: only projections need views, and they make their own."""

    def _free_attention_inputs(self) -> None:
        super()._free_attention_inputs()
        self._arrays.clear()

    def _array(self, slot: Slot) -> Any:
        """The kernel argument for a slot."""
        if slot is None:
            return self.memory.staging
        tensor, home, number = slot
        if tensor == Name.NONE and not home:  # staging, viewed as numbers
            return self.memory.staging.view((DTYPES[self.program.header.dtype], torch.float32)[number])
        if tensor == Name.NONE:
            return self._results[number]
        return (self.memory.home_arrays(tensor) if home else self.memory.work[tensor])[number]

    # --- instructions

    def attend(self, step: Step) -> None:
        capped, has_sinks = self._layer.score.softcap is not None, self._layer.sinks is not None
        extra = {"attend": (self._sinks,)}, {"attend": (int(has_sinks),), "dq": (self._may_use_statistics,)}
        for launch in self._loaded.launches[step.index]:
            tensors, sizes = (added.get(launch.kernel, ()) for added in extra)
            args = *launch.tables, *launch.arrays(self._arrays), *tensors, *launch.sizes, *sizes, *self._score
            self.launcher(launch.kernel, launch.programs, args, launch.constants[capped])
        if is_checking():
            self._check(step)

    attend_grad = attend

    @property
    def _may_use_statistics(self) -> int:
        """1 if the kernel `dq` may compute row statistics; with learned sinks or a gradient of LSE, `delta` must."""
        return int(self._layer.sinks is None and self._layer.dlse is None)

    def _check(self, step: Step) -> None:
        """Checks the rows that an instruction accumulated: at home, in work rows, or at their destinations."""
        sums = {task.o for task in step.tasks} | {i for task in step.grads for i in (task.dq, task.dkv)}
        for index in sorted(sums):
            operand = self.program.operands[index]
            label = f"instruction {step.index}"
            for part in self._sum_rows(step, operand):
                if operand.tensor == Name.O:
                    require_finite(f"{label}, {operand}", *part)
                else:
                    for rows in part:
                        require_numbers(label, **{str(operand): rows})

    def _sum_rows(self, step: Step, operand: Operand) -> Iterator[tuple[Tensor, ...]]:
        """Yields the rows of a sum; complete ones from their destinations."""
        drafts, row, stop = self._loaded.drafts, operand.row, operand.row + operand.rows
        complete = drafts.complete_rows(step, operand)
        parts, results = self.memory.view(operand).read(), self._result_parts(operand.tensor)
        places = [(low, high, low - row, parts) for low, high in gaps(complete, row, stop)]
        if operand.is_home:
            places += [(low, high, low, results) for low, high in complete]
        for entry in () if operand.is_home else drafts.in_place[operand.tensor.name.lower()]:
            parts = tuple(part[:, entry.operand.heads] for part in results)
            if entry.message is not None:
                parts = self.memory.tile_parts(entry.message, self.program.operands)[entry.tile]
            for low, high in complete:
                start = max(entry.row, low)
                places.append((start, min(entry.stop, high), entry.first + start - entry.row, parts))
        for low, high, first, parts in places:
            if max(low, row) < min(high, stop):
                yield tuple(part[first + max(row - low, 0) : first + min(high, stop) - low] for part in parts)

    def _result_parts(self, tensor: Name) -> tuple[Tensor, ...]:
        if tensor == Name.O:
            return self._results[0], self.memory.home_arrays(Name.O)[1]
        return self._results[:1] if tensor == Name.DQ else self._results[1:]

    def merge(self, step: Step) -> None:
        self._start(self._loaded.launches[step.index])

    copy = deliver = clear = add = merge

    def _start(self, launches: Iterable[Launch], *layer: Any, **constants: bool) -> None:
        """Starts launches. layer: tensors after a launch's own arrays; constants: after its own."""
        for launch in launches:
            if launch.programs:
                arrays = self._addresses if launch.kernel in ("move", "add") else self._arrays
                args = *launch.tables, *launch.arrays(arrays), *layer, *launch.sizes
                self.launcher(launch.kernel, launch.programs, args, {**launch.constants, **constants})

    def _pack(self, step: Step, round_: Round) -> None:
        self._start(self._loaded.launches[step.index])

    _unpack = _pack

    # --- instructions that depend on the layer

    def delta(self, step: Step) -> None:
        has_sinks, dlse = self._layer.sinks is not None, self._layer.dlse
        launches = self._loaded.launches[step.index]
        self._start(
            launches[-1:] if self._may_use_statistics else launches[:1],
            self._sinks,
            self._sink_gradient_shares if has_sinks else self._unused,
            self._unused if dlse is None else dlse.float().contiguous(),
            SINKS=has_sinks,
            DLSE=dlse is not None,
        )

    def finish(self, step: Step) -> None:
        has_sinks = self._layer.sinks is not None
        self._start(self._loaded.launches[step.index][: 1 + has_sinks], self._sinks, SINKS=has_sinks)

    # --- results

    def output(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return self._results[0], self.memory.home_arrays(Name.O)[1]

    def input_gradients(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        self._start(self._loaded.results)
        dq, dk, dv = self._results
        return dq, dk, dv

    def close(self) -> None:
        super().close()
        if self._loaded.drafts.shares and self._layer.sinks is not None:
            self.gradients.sinks = self._sink_gradient_shares.sum(0)

"""Executes one rank's program on stage kernels: one launch per instruction (`attend_grad`: two); makes no decisions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
        self._constants = executable.constants[layer.score.softcap is not None]
        self._arrays = [self._array(slot) for slot in executable.slots]
        self._addresses = [array.data_ptr() for array in self._arrays]

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
        shape = (self._loaded.shares, self.program.header.q_heads)
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
        sinks = self._layer.sinks
        self._start_attention(step, (sinks,), {"attend": (int(sinks is not None),)})

    def attend_grad(self, step: Step) -> None:
        self._start_attention(step, (), {"dq": (self._may_use_statistics,)})

    @property
    def _may_use_statistics(self) -> int:
        """1 if the kernel `dq` may compute row statistics; with learned sinks or a gradient of LSE, `delta` must."""
        return int(self._layer.sinks is None and self._layer.dlse is None)

    def _start_attention(
        self, step: Step, layer: tuple[Tensor | None, ...], extra: Mapping[str, tuple[int, ...]]
    ) -> None:
        """Starts an instruction's launches. layer: arrays after a launch's own; extra: sizes after its own."""
        for launch in self._loaded.launches[step.index]:
            tensors = (launch.tables[0] if tensor is None else tensor for tensor in layer)
            sizes = *launch.sizes, *extra.get(launch.kernel, ())
            args = *launch.tables, *launch.arrays(self._arrays), *tensors, *sizes, *self._score
            self.launcher(launch.kernel, launch.programs, args, self._constants[launch.kernel])
        if is_checking():
            self._check(step)

    def _check(self, step: Step) -> None:
        """Checks the rows that an instruction accumulated: at home, in work rows, or at their destinations."""
        sums = {task.o for task in step.tasks} | {i for task in step.grads for i in (task.dq, task.dkv)}
        for index in sorted(sums):
            operand = self.program.operands[index]
            label = f"instruction {step.index}, {operand}"
            for part in self._sum_rows(step, operand):
                if operand.tensor == Name.O:
                    require_finite(label, *part)
                else:
                    for rows in part:
                        require_numbers(f"instruction {step.index}", **{str(operand): rows})

    def _sum_rows(self, step: Step, operand: Operand) -> Iterator[tuple[Tensor, ...]]:
        """Yields the rows of a sum; complete ones from their destinations."""
        parts = self.memory.view(operand).read()
        row, stop = operand.row, operand.row + operand.rows
        complete = self._loaded.complete.get((step.index, operand.tensor, operand.is_home), [])
        for low, high in gaps(complete, row, stop):
            yield tuple(part[low - row : high - row] for part in parts)
        for start, end in complete:
            if row < end and start < stop:
                yield from self._complete_views(operand, max(start, row), min(end, stop))

    def _complete_views(self, operand: Operand, row: int, stop: int) -> Iterator[tuple[Tensor, ...]]:
        """Yields the complete rows [row, stop) from their destinations."""
        if operand.is_home:
            yield tuple(part[row:stop] for part in self._result_parts(operand.tensor))
            return
        for entry in self._loaded.in_place[operand.tensor]:
            low, high = max(entry.row, row), min(entry.stop, stop)
            if low < high:
                first = entry.first + low - entry.row
                parts = tuple(part[:, entry.operand.heads] for part in self._result_parts(operand.tensor))
                if entry.message is not None:
                    parts = self.memory.tile_parts(entry.message, self.program.operands)[entry.tile]
                yield tuple(part[first : first + high - low] for part in parts)

    def _result_parts(self, tensor: Name) -> tuple[Tensor, ...]:
        if tensor == Name.O:
            return self._results[0], self.memory.home_arrays(Name.O)[1]
        return self._results[:1] if tensor == Name.DQ else self._results[1:]

    def merge(self, step: Step) -> None:
        for launch in self._loaded.launches[step.index]:
            self._start(launch)

    def _by_address(self, step: Step) -> None:
        for launch in self._loaded.launches[step.index]:
            self._move(launch)

    copy = deliver = clear = add = _by_address

    def _move(self, launch: Launch) -> None:
        args = *launch.tables, *launch.arrays(self._addresses), *launch.sizes
        self.launcher(launch.kernel, launch.programs, args, launch.constants)

    def _start(self, launch: Launch, *layer: Any, **constants: bool) -> None:
        if launch.programs:
            args = *launch.tables, *launch.arrays(self._arrays), *layer, *launch.sizes
            self.launcher(launch.kernel, launch.programs, args, {**launch.constants, **constants})

    def _pack(self, step: Step, round_: Round) -> None:
        self._by_address(step)

    _unpack = _pack

    # --- instructions that depend on the layer

    def delta(self, step: Step) -> None:
        sinks, dlse = self._layer.sinks, self._layer.dlse
        dlse = None if dlse is None else dlse.float().contiguous()
        launches = self._loaded.launches[step.index]
        for launch in launches[-1:] if self._may_use_statistics else launches[:1]:
            unused = launch.tables[0]
            tensors = (
                unused if sinks is None else sinks,
                unused if sinks is None else self._sink_gradient_shares,
                unused if dlse is None else dlse,
            )
            self._start(launch, *tensors, SINKS=sinks is not None, DLSE=dlse is not None)

    def finish(self, step: Step) -> None:
        sinks = self._layer.sinks
        for launch in self._loaded.launches[step.index][: 1 if sinks is None else 2]:
            self._start(launch, launch.tables[0] if sinks is None else sinks, SINKS=sinks is not None)

    # --- results

    def output(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return self._results[0], self.memory.home_arrays(Name.O)[1]

    def input_gradients(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        for launch in self._loaded.results:
            self._move(launch)
        dq, dk, dv = self._results
        return dq, dk, dv

    def close(self) -> None:
        super().close()
        if self._loaded.shares and self._layer.sinks is not None:
            self.gradients.sinks = self._sink_gradient_shares.sum(0)

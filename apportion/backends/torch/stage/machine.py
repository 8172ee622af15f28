"""One rank's program on stage kernels: an instruction is one launch (`attend_grad`: two), with nothing decided here."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from apportion.backends.interp import Step
from apportion.backends.torch.arrays import DTYPES
from apportion.backends.torch.checks import is_checking, require_finite, require_numbers
from apportion.backends.torch.executor import Layer, TorchMachine
from apportion.backends.torch.memory import Memory
from apportion.backends.torch.rounds import Round
from apportion.backends.torch.stage.launcher import Launcher, default_launcher
from apportion.backends.torch.stage.program import Launch, StageLoaded
from apportion.backends.torch.stage.rowlists import Slot
from apportion.backends.torch.transport import Transport
from apportion.ir.isa import Tensor as Name


class StageMachine(TorchMachine):
    """As TorchMachine, of a program that `stage.program.load` made. launcher: gets kernels to the device."""

    def __init__(
        self,
        loaded: StageLoaded,
        memory: Memory,
        layer: Layer,
        transport: Transport,
        launcher: Launcher | None = None,
    ) -> None:
        self._loaded, self.launcher = loaded, launcher or default_launcher()
        loaded.table.join()
        super().__init__(loaded, memory, layer, transport)
        self._score = layer.score.scale, layer.score.softcap or 1.0
        self._constants = loaded.plain if layer.score.softcap is None else loaded.capped
        self._arrays = [self._array(slot) for slot in loaded.slots]
        self._addresses = [0 if array is None else array.data_ptr() for array in self._arrays]

    @cached_property
    def _out(self) -> Tensor:
        """What forward gives, [rows, Hq, Dv] in the model's dtype."""
        header = self.program.header
        return self.memory.fresh((header.q_heads, header.v_head_dim), DTYPES[header.dtype])

    @cached_property
    def _shares(self) -> Tensor:
        """Shares of the tiles of all deltas in the gradients of the sinks."""
        shape = (self._loaded.shares, self.program.header.q_heads)
        return torch.zeros(shape, dtype=torch.float64, device=self.memory.device)

    def bind(self) -> None:
        """Views serve ops that start no kernel of this engine."""
        if self._loaded.needs_views:
            super().bind()

    def _array(self, slot: Slot) -> Any:
        """What kernels are given for a slot; a result is made when it is asked for."""
        if slot is None:
            return self.memory.staging
        tensor, home, number = slot
        if tensor == Name.NONE:
            return None
        return (self.memory.home_arrays(tensor) if home else self.memory.work[tensor])[number]

    # --- instructions

    def _attention(self, step: Step) -> None:
        for launch in self._loaded.launches[step.index]:
            args = *launch.tables, *launch.arrays(self._arrays), *launch.sizes, *self._score
            self.launcher(launch.kernel, launch.programs, args, self._constants[launch.kernel])
        if is_checking():
            self._check(step)

    def _check(self, step: Step) -> None:
        """Looks at the rows that an instruction accumulated."""
        for index in sorted({task.o for task in step.tasks}):
            operand = self.program.operands[index]
            require_finite(f"instruction {step.index}, {operand}", *self.memory.view(operand).read())
        for index in sorted({index for task in step.grads for index in (task.dq, task.dkv)}):
            operand = self.program.operands[index]
            for part in self.memory.view(operand).read():
                require_numbers(f"instruction {step.index}", **{str(operand): part})

    attend = attend_grad = _attention

    def merge(self, step: Step) -> None:
        for launch in self._loaded.launches[step.index]:
            self._start(launch)

    def _by_address(self, step: Step) -> None:
        for launch in self._loaded.launches[step.index]:
            self._move(launch)

    copy = clear = add = _by_address

    def _move(self, launch: Launch) -> None:
        args = *launch.tables, *launch.arrays(self._addresses), *launch.sizes
        self.launcher(launch.kernel, launch.programs, args, launch.constants)

    def _start(self, launch: Launch, *layer: Any, **constants: bool) -> None:
        args = *launch.tables, *launch.arrays(self._arrays), *layer, *launch.sizes
        self.launcher(launch.kernel, launch.programs, args, {**launch.constants, **constants})

    def _pack(self, step: Step, found: Round) -> None:
        self._by_address(step)

    def _unpack(self, step: Step, found: Round) -> None:
        self._by_address(step)

    # --- what the layer knows

    def delta(self, step: Step) -> None:
        sinks, dlse = self._layer.sinks, self._layer.dlse
        dlse = None if dlse is None else dlse.float().contiguous()
        for launch in self._loaded.launches[step.index]:
            unused = launch.tables[0]
            given = (
                unused if sinks is None else sinks,
                unused if sinks is None else self._shares,
                unused if dlse is None else dlse,
            )
            self._start(launch, *given, SINKS=sinks is not None, DLSE=dlse is not None)

    def finish(self, step: Step) -> None:
        sinks = self._layer.sinks
        for launch in self._loaded.launches[step.index]:
            given = self._out, launch.tables[0] if sinks is None else sinks
            self._start(launch, *given, SINKS=sinks is not None)

    # --- results

    def output(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return self._out, self.memory.home_arrays(Name.O)[1]

    def input_gradients(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        given = [part for name in (Name.Q, Name.KV) for part in self.memory.home[name]]
        found = [self.memory.fresh(tuple(part.shape[1:]), part.dtype) for part in given]
        for number, slot in enumerate(self._loaded.slots):
            if slot is not None and slot[0] == Name.NONE:
                self._addresses[number] = found[slot[2]].data_ptr()
        for launch in self._loaded.results:
            self._move(launch)
        dq, dk, dv = found
        return dq, dk, dv

    def close(self) -> None:
        super().close()
        if self._loaded.shares and self._layer.sinks is not None:
            self.gradients.sinks = self._shares.sum(0)

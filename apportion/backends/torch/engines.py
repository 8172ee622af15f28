"""Engines that compute instructions. Each must pass the conformance tests of the backend.

    stage   one Triton launch per instruction over work lists made once per plan       CUDA; float16, bfloat16, float32
    flash   torch's flash attention, one or a few calls per task; torch's ops for rows        any device
    plain   matrix products in strips, everything else like flash                              any device

To add an engine, write a machine in its own file and add it to `ENGINES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

import torch

from apportion.backends.torch.executor import Executable, LoadRequest, PlainMachine, TaskMachine, TorchMachine
from apportion.backends.torch.memory.arenas import Arenas
from apportion.backends.torch.memory.rounds import find_rounds
from apportion.ir.errors import ConfigError
from apportion.ir.fields import choice
from apportion.ir.plan.tables import Header

if TYPE_CHECKING:
    from apportion.backends.torch.stage.launcher import Launcher


class Engine(Protocol):
    """Interface of an engine."""

    @property
    def machine(self) -> Callable[..., TorchMachine]:
        """The constructor (loaded, memory, layer, transport) -> machine of one call."""

    def obstacle(self, header: Header, device: torch.device) -> str | None:
        """The reason why the engine cannot run plans with this header on a device; None if it can."""

    def load(self, request: LoadRequest) -> Executable:
        """Builds the state that all calls of one rank's program share, padded to the envelope. Raises ConfigError if
        the envelope is too small."""


@dataclass(frozen=True)
class TaskEngine:
    """An engine that computes task by task. newest: whether to use the newest flash attention available."""

    machine: type[TorchMachine]
    newest: bool = False

    def obstacle(self, header: Header, device: torch.device) -> str | None:
        return None

    def load(self, request: LoadRequest) -> Executable:
        if self.newest:
            activate_newest_flash(request.device)
        program, hidden = request.program, request.hidden
        rounds = find_rounds(request.columns, program, hidden, early={})
        arenas = Arenas(program, rounds.staging_bytes, hidden, request.envelope)
        return Executable(program, rounds, arenas)


@dataclass(frozen=True)
class StageEngine:
    """The Triton engine, imported on first use. launcher: starts kernels on the device, by default through Triton."""

    launcher: Launcher | None = None

    @cached_property
    def machine(self) -> Callable[..., TorchMachine]:
        from apportion.backends.torch.stage.machine import StageMachine

        return StageMachine if self.launcher is None else partial(StageMachine, launcher=self.launcher)

    def obstacle(self, header: Header, device: torch.device) -> str | None:
        from apportion.backends.torch.stage import obstacle

        return obstacle(header, device)

    def load(self, request: LoadRequest) -> Executable:
        from apportion.backends.torch.stage.program import load

        return load(request)


#: in order of preference
ENGINES: Mapping[str, Engine] = MappingProxyType(
    {"stage": StageEngine(), "flash": TaskEngine(TaskMachine, newest=True), "plain": TaskEngine(PlainMachine)}
)


#: major compute capability -> torch's name of the flash attention written for it
_WRITTEN_FOR = MappingProxyType({9: "FA3", 10: "FA4"})


def activate_newest_flash(device: torch.device) -> None:
    """Activates FlashAttention-3 or -4 behind torch's own ops, for the whole process, if torch and the machine have it
    and no other implementation has been chosen."""
    from torch.nn import attention

    if device.type != "cuda" or not hasattr(attention, "activate_flash_attention_impl"):
        return
    name = _WRITTEN_FOR.get(torch.cuda.get_device_capability(device)[0])
    if attention.current_flash_attention_impl() is None and name in attention.list_flash_attention_impls():
        with suppress(ImportError, RuntimeError):  # engine flash then uses FlashAttention-2
            attention.activate_flash_attention_impl(name)


def choose_engine(name: str | Engine, header: Header, device: torch.device) -> Engine:
    """The engine with that name; for `auto`, the first that can run the plan. Raises UnknownNameError, ConfigError."""
    if not isinstance(name, str):
        return name
    if choice("engine", name, ("auto", *ENGINES)) == "auto":
        return next(engine for engine in ENGINES.values() if engine.obstacle(header, device) is None)
    obstacle = ENGINES[name].obstacle(header, device)
    if obstacle is not None:
        raise ConfigError("engine", name, obstacle, 'use engine="auto" or "flash"')
    return ENGINES[name]

"""Plan handle of a trainer: one rank's slice, its compiled programs, and the communicator that executes it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from itertools import count
from typing import Any, NoReturn, TypeVar, cast
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from apportion.backends.interp import Program, Segments, compile_program
from apportion.backends.torch.engines import ENGINES, Engine, choose_engine
from apportion.backends.torch.envelope import UNPADDED, Envelope
from apportion.backends.torch.executor import Executable, LoadRequest
from apportion.backends.torch.memory.arrays import DTYPES
from apportion.backends.torch.transport import Communicator, Transport, different_plans_error
from apportion.ir.bytes.slices import Slice
from apportion.ir.errors import ConfigError, ExecutionError, UnknownNameError
from apportion.ir.fields import choice, integer
from apportion.ir.masks.declared import Declared
from apportion.ir.plan.segments import Cuts, agreed_cuts
from apportion.ir.tensors import PHASES

T = TypeVar("T")

# torch.compile sees a plan as its number, a tensor, so that a new plan does not recompile.
# Numbers are never used twice; the table keeps no handle alive.
_HANDLES: WeakValueDictionary[int, PlanHandle] = WeakValueDictionary()
_numbers = count()


class PlanHandle:
    """The explicit plan argument of planned attention; there is no global "current plan".

    communicator: the ranks of the plan, by default all of the job. engine: one of `engines.ENGINES`, or
    "auto": the fastest that can run the plan on the device. Holds no buffers: calls have their own, so a handle serves
    any number of layers and of microbatches in flight. padding: rows without tokens after the others, in all tensors
    that layers receive and return: their results and gradients are 0. envelope: sizes that rows, buffers and tables
    are padded to. calls: number of forward attention calls so far, including recomputed ones; called: per kind.
    Raises ExecutionError if the slice is not this rank's, UnknownNameError for an unknown engine, ConfigError if the
    plan is larger than the envelope. gathered: whether rows were gathered for the caller's own kernel.
    feeds: True for an encoder's plan, whose rows go to another plan; fed: True if this plan received such rows.
    """

    def __init__(
        self,
        piece: Slice,
        communicator: Transport | None = None,
        engine: str | Engine = "auto",
        padding: int = 0,
        envelope: Envelope = UNPADDED,
    ) -> None:
        self.slice, self.envelope = piece, envelope
        self.padding = envelope.size("rows", self.rows + integer("padding", padding, 0)) - self.rows
        self.communicator = communicator if communicator is not None else Communicator.shared()
        self.engine = engine if not isinstance(engine, str) else choice("engine", engine, ("auto", *ENGINES))
        if (piece.rank, piece.ranks) != (self.communicator.rank, self.communicator.ranks):
            raise ExecutionError(
                f"the slice of rank {piece.rank} of {piece.ranks} is on rank {self.communicator.rank} of "
                f"{self.communicator.ranks}: give each rank `plan.for_rank(rank)` of a plan for this group"
            )
        self._states: dict[tuple[Hashable, ...], Any] = {}
        self._loaded: dict[tuple[str, str, torch.device, int], Executable] = {}
        self._segments: dict[tuple[str, str], Segments] = {}
        self._agreed = False
        self.calls, self.called = 0, Counter[str]()
        self.gathered = self.feeds = self.fed = False
        # the wrapper, DDP or FSDP1, of the module that called attention last
        self.wrapper: DistributedDataParallel | FullyShardedDataParallel | None = None
        # largest position in its batch, equal on all ranks that compare models; 0 if unknown
        self.longest = 0
        #: gets the results of attention ops, also in compiled graphs
        self.observer: Callable[[PlanHandle, tuple[Tensor, ...]], None] | None = None
        self._checked: set[tuple[str, int | None, bool | None]] = set()
        self.number = torch.tensor(next(_numbers), device="cpu")
        _HANDLES[int(self.number)] = self

    def __repr__(self) -> str:
        return f"<PlanHandle: plan {self.name}, rank {self.slice.rank} of {self.slice.ranks}, engine {self.engine}>"

    def __reduce__(self) -> NoReturn:
        raise ExecutionError(
            "a plan handle cannot leave its process: send `handle.slice.encode()`, and make a handle there"
        )

    def __deepcopy__(self, memo: object) -> PlanHandle:
        return self

    @staticmethod
    def of_number(number: Tensor) -> PlanHandle:
        """The handle with that number. Raises ExecutionError if it no longer exists."""
        handle = _HANDLES.get(int(number))
        if handle is None:
            raise ExecutionError(
                f"plan handle {int(number)} is gone: under torch.compile, keep it until backward has run"
            )
        return handle

    @property
    def id(self) -> bytes:
        return self.slice.id

    @cached_property
    def name(self) -> str:
        """A prefix of the plan's id."""
        return self.id.hex()[:12]

    @property
    def kinds(self) -> tuple[str, ...]:
        return self.slice.header.kinds

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that q, k and v must have."""
        return DTYPES[self.slice.header.dtype]

    @cached_property
    def rows(self) -> int:
        """The number of tokens that this rank holds."""
        return int(self.slice.layout(self.slice.header.home_layout).rows_per_rank[0])

    @property
    def padded_rows(self) -> int:
        """The number of rows of the layers' tensors: tokens and padding."""
        return self.rows + self.padding

    def require_unpadded(self, action: str) -> None:
        """Raises ExecutionError if the batch has padding."""
        if self.padding:
            raise ExecutionError(
                f"{action} only without padding, and this batch has {self.padding} rows of padding: make the loader "
                "without rows_multiple"
            )

    @cached_property
    def tokens(self) -> Tensor:
        """[rows] int64, the global token of each row."""
        return torch.from_numpy(self.slice.layout(self.slice.header.home_layout).tokens(0))

    @cached_property
    def position_ids(self) -> Tensor:
        """[rows] int64."""
        return torch.from_numpy(self.slice.layout(self.slice.header.home_layout).position_ids(0))

    def kind(self, name: str | None) -> str:
        """The kind with that name; for None, the plan's only kind. Raises UnknownNameError, ConfigError."""
        if name is None and len(self.kinds) == 1:
            return self.kinds[0]
        if name is None:
            raise ConfigError(
                "kind", None, "the plan has several attention kinds", f"name one of {self.kinds}"
            )
        if name not in self.kinds:
            raise UnknownNameError("kind", name, f"the plan has {', '.join(self.kinds)}", "name one of these")
        return name

    def check(self, kind: str, window: int | None, causal: bool | None, layer: str | None = None) -> None:
        """Compares a layer's declared mask with the plan's (`ir.masks.declared`), once. Raises ConfigError."""
        declared = kind, window, causal
        if declared not in self._checked:
            Declared(window, causal).check(self.slice.header.diagonals, kind, layer)
            self._checked.add(declared)

    @property
    def declared(self) -> set[str]:
        """Kinds whose window a layer has declared."""
        return {kind for kind, window, _ in self._checked if window is not None}

    def state(self, build: Callable[[], T], *key: Hashable) -> T:
        """State of this plan under a key, built on first use."""
        if key not in self._states:
            self._states[key] = build()
        return cast("T", self._states[key])

    def program(self, kind: str, phase: str) -> Program:
        """This rank's program, compiled on first use."""
        tables, header = self.slice.programs, self.slice.header
        return self.state(lambda: compile_program(tables[kind, phase], header), "program", kind, phase)

    def engine_on(self, device: torch.device) -> Engine:
        """The engine for a device. Raises UnknownNameError, ConfigError if the named engine cannot run there."""
        return self.state(lambda: choose_engine(self.engine, self.slice.header, device), "engine", device)

    def executable(self, kind: str, phase: str, device: torch.device, hidden: int = 0) -> Executable:
        """A program with the state that its calls on a device share, built on first use. hidden: width of X."""
        key = kind, phase, device, hidden
        if key not in self._loaded:
            program, columns = self.program(kind, phase), self.slice.programs[kind, phase]
            request = LoadRequest(columns, program, device, self.rows, hidden, self.envelope)
            self._loaded[key] = self.engine_on(device).load(request)
        return self._loaded[key]

    def sizes(self) -> tuple[int, int, int]:
        """Rows with padding; of the loaded programs, the largest buffer in bytes and the most table numbers."""
        pairs = [(entry.arenas.size, entry.table_numbers) for entry in self._loaded.values()] or [(0, 0)]
        buffers, tables = zip(*pairs, strict=True)
        return self.padded_rows, max(buffers), max(tables)

    def prepare(self, device: torch.device | str) -> PlanHandle:
        """Loads all programs of attention on q, k and v ahead of the first call. May be called from any thread."""
        for key in (key for key in self._keys() if not self.program(*key).uses_project):
            self.executable(*key, torch.device(device))
        return self

    def segments(self, kind: str, phase: str) -> Segments:
        """This rank's program in three segments, with boundaries common to all ranks. A collective the first time."""
        if not self._segments:
            keys = self._keys()
            numbers = [cut for key in keys for cut in self.program(*key).cuts]
            rows = self.communicator.all_gather(numbers, f"segments of plan {self.name}")
            cuts = zip(*(map(Cuts, row[::2], row[1::2]) for row in rows), strict=True)
            common = {key: agreed_cuts(ranks) for key, ranks in zip(keys, cuts, strict=True)}
            self._segments = {key: self.program(*key).segments(cut) for key, cut in common.items()}
        return self._segments[kind, phase]

    def projects(self, kind: str) -> bool:
        """True if the plan calls the layer's projection, and so takes hidden states."""
        return any(self.program(*key).uses_project for key in self._keys() if key[0] == kind)

    def agree(self) -> None:
        """Checks once that all ranks hold this plan. A collective the first time. Raises
        ExecutionError."""
        if not self._agreed:
            agree([self])

    def call(self, name: str) -> AbstractContextManager[None]:
        """Opens one call under this plan, like `Transport.call`, after checking that all ranks hold it."""
        self.agree()
        return self.communicator.call(name)

    @property
    def channels(self) -> int:
        """The number of channels that this rank's programs launch on."""
        return max((1 + max(self.program(*key).channels, default=0) for key in self._keys()), default=1)

    def _keys(self) -> Sequence[tuple[str, str]]:
        keys = [(kind, phase) for kind in self.kinds for phase in PHASES]
        return [key for key in keys if key in self.slice.programs]


def agree(
    handles: Sequence[PlanHandle], facts: Sequence[int] = (), describe: Callable[[], str] | None = None
) -> list[list[int]]:
    """Checks that all ranks hold these plans, and starts the channels that they need: one collective between hosts that
    waits for no device; call it ahead of time if possible. Returns the facts of every rank. describe: returns
    this rank's plans as text, for the error that all ranks raise if they differ. Raises ExecutionError."""
    transport = handles[0].communicator
    ids = [number for handle in handles for number in np.frombuffer(handle.id, "<i8").tolist()]
    checked_end = 2 + len(ids)
    numbers = [max(handle.channels for handle in handles), len(ids), *ids, *facts]
    rows = transport.all_gather(numbers, "plans")
    if any(row[1:checked_end] != numbers[1:checked_end] for row in rows):
        description = describe() if describe else ", ".join(f"plan {handle.name}" for handle in handles)
        raise different_plans_error(transport.gather_texts(description, "plans of ranks"))
    transport.start(max(row[0] for row in rows))
    for handle in handles:
        handle._agreed = True
    return [row[checked_end:] for row in rows]

"""What a loader asks of whoever plans."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from apportion.ir.bytes.iteration_slice import IterationSlice


@dataclass(eq=False)
class Source(ABC):
    """Plain data: every pass, and every data-loader process, has a copy of its own, made of the fields of the class,
    and closes it. One thread submits and another fetches; any may close. shared: whether what one rank submits is
    planned for all."""

    shared: ClassVar[bool] = True

    @abstractmethod
    def submit(self, key: bytes, request: bytes, ahead: int) -> None:
        """Has a request planned, once however often it is submitted. key: of the request, `Job.request_key`; ahead:
        iterations before it is needed. Raises TimeoutError where nobody answers."""

    @abstractmethod
    def fetch(self, key: bytes, rank: int, wait_s: float, then: Sequence[bytes] = ()) -> IterationSlice:
        """A rank's slice. then: keys of the iterations to come, as far as they are known. Raises TimeoutError where it
        is not there after `wait_s`, UnknownPlanError where nobody has submitted it."""

    @abstractmethod
    def close(self) -> None:
        """Ends what waits here, and frees what is open; again is no error."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(getattr(self, one.name) for one in fields(self) if one.init)

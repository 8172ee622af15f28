"""Results of commands that tests run in their own process."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class CommandResult:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The one JSON object on stdout."""
        assert self.out.count("\n") == 1
        return dict(json.loads(self.out))

    @property
    def row(self) -> dict[str, Any]:
        """The only row of the object."""
        (row,) = self.json["rows"]
        return dict(row)


Command = Callable[..., CommandResult]

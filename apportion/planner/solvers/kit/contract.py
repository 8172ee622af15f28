"""What the conformance kit asks of the problems of a kind: to be drawn, judged and, where small, enumerated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

Draw = np.random.Generator


class Cases(Protocol):
    """Problems of one kind."""

    def small(self, draw: Draw) -> Any:
        """One whose optimum can be enumerated."""

    def medium(self, draw: Draw) -> Any:
        """One that takes a solver well below a second."""

    def hopeless(self) -> Any | None:
        """One without an answer, or None where the kind has none."""

    def permuted(self, problem: Any, draw: Draw) -> Any:
        """The same problem in another order."""

    def faults(self, problem: Any, result: Any) -> Iterator[str]:
        """What is wrong with an answer."""

    def value(self, problem: Any, result: Any) -> float:
        """What the answer is worth."""

    def optimum(self, problem: Any) -> float | None:
        """The least value of all answers, None where there is none."""

"""Before a plan is used: all ranks have it, or those that have not plan the same themselves, or all end.

Where ranks may plan themselves there is one collective an iteration: has this rank the plan, and which; and a second
one where a rank had not.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from apportion.backends.torch.calls import by_value, shown
from apportion.backends.torch.transport import Communicator, different_plans
from apportion.ir.errors import ExecutionError
from apportion.ir.hashing import SIZE
from apportion.trainer.loading.fetching import Fetched

HELD, MISSING, FAILED = 0, 1, 2

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Held:
    """What a rank has of an iteration: its plan, or why not."""

    fetched: Fetched | None = None
    error: Exception | None = None

    @property
    def state(self) -> int:
        if self.fetched is not None:
            return HELD
        return MISSING if isinstance(self.error, TimeoutError) else FAILED

    @property
    def id(self) -> bytes:
        return bytes(SIZE) if self.fetched is None else self.fetched.piece.id


@dataclass
class Agreement:
    """What all ranks do about a plan that some have not. plans: a rank without one in time plans it itself; then all
    tell each other in every iteration what they have. Otherwise a rank that fails tells it where the others compare
    their plans (`backends.torch.handle.agree`). fallbacks: iterations that some rank planned itself."""

    communicator: Communicator
    plans: bool
    fallbacks: int = 0

    def take(self, number: int, fetch: Callable[[], Fetched], plan: Callable[[], Fetched]) -> Fetched:
        """The plan of iteration `number`: what `fetch` gives, or `plan` on the ranks where that raises TimeoutError; a
        collective. Raises what these raise, and ExecutionError where another rank failed or the ids differ."""
        held = _attempt(fetch)
        if self.plans and MISSING in self._states(number, held):
            self.fallbacks += 1
            if held.state == MISSING:
                _log.warning(
                    "iteration %d: no plan in time (%s): this rank plans it itself", number, held.error
                )
                held = _attempt(plan)
            self._states(number, held)
        if held.fetched is not None:
            return held.fetched
        assert held.error is not None
        if not self.plans:
            self.communicator.all_gather([0, 0], "plans")
            self.communicator.gather_texts(shown(held.error), "what ranks hold")
        raise held.error

    def _states(self, number: int, held: Held) -> list[int]:
        """Of every rank; a collective. Raises on all ranks where one failed or two hold different plans."""
        rows = self.communicator.all_gather([held.state, *held.id], "states of plans")
        states = [row[0] for row in rows]
        if FAILED in states:
            self._raise(number, held, states)
        ids = [bytes(row[1:]).hex() for row in rows]
        if MISSING not in states and len(set(ids)) > 1:
            raise different_plans([f"plan {plan_id[:12]}" for plan_id in ids])
        return states

    def _raise(self, number: int, held: Held, states: Sequence[int]) -> NoReturn:
        """Where some rank failed; a collective."""
        told = self.communicator.gather_texts(shown(held.error), "errors of plans")
        if held.state == FAILED and held.error is not None:
            raise held.error
        failed = {rank: told[rank] for rank, state in enumerate(states) if state == FAILED}
        raise ExecutionError(f"iteration {number}: ranks {[*failed]} have no plan: {by_value(failed)}")


def _attempt(make: Callable[[], Fetched]) -> Held:
    try:
        return Held(make())
    except Exception as error:  # told to the other ranks, which would wait, then raised
        return Held(error=error)

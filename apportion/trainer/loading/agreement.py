"""Before a plan is used: all ranks have it, or those that have not plan the same themselves, or all end; and before a
microbatch is, all groups of ranks tell how many labels they have.

Where ranks may plan themselves there is one collective an iteration: has this rank the plan, and which; and a second
one where a rank had not.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from apportion.backends.torch.calls import by_value, shown
from apportion.backends.torch.transport import Communicator, Transport, different_plans
from apportion.ir.errors import ExecutionError
from apportion.ir.hashing import SIZE
from apportion.trainer.loading.fetching import Fetched

HELD, MISSING, FAILED = 0, 1, 2

_log = logging.getLogger(__name__)


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
            if isinstance(held, TimeoutError):
                _log.warning("iteration %d: no plan in time (%s): this rank plans it itself", number, held)
                held = _attempt(plan)
            self._states(number, held)
        if isinstance(held, Fetched):
            return held
        if not self.plans:
            self.communicator.all_gather([0, 0], "plans")
            self.communicator.gather_texts(shown(held), "what ranks hold")
        raise held

    def _states(self, number: int, held: Fetched | Exception) -> list[int]:
        """Of every rank; a collective. Raises on all ranks where one failed or two hold different plans."""
        own = [_state(held), *(held.piece.id if isinstance(held, Fetched) else bytes(SIZE))]
        rows = self.communicator.all_gather(own, "states of plans")
        states = [row[0] for row in rows]
        if FAILED in states:
            error = None if isinstance(held, Fetched) else held
            told = self.communicator.gather_texts(shown(error), "errors of plans")
            if error is not None and own[0] == FAILED:
                raise error
            failed = {rank: told[rank] for rank, state in enumerate(states) if state == FAILED}
            raise ExecutionError(f"iteration {number}: ranks {[*failed]} have no plan: {by_value(failed)}")
        ids = [bytes(row[1:]).hex() for row in rows]
        if MISSING not in states and len(set(ids)) > 1:
            raise different_plans([f"plan {plan_id[:12]}" for plan_id in ids])
        return states


def _state(held: Fetched | Exception) -> int:
    if isinstance(held, Fetched):
        return HELD
    return MISSING if isinstance(held, TimeoutError) else FAILED


def _attempt(make: Callable[[], Fetched]) -> Fetched | Exception:
    try:
        return make()
    except Exception as error:  # told to the other ranks, which would wait, then raised
        return error


def totals(
    replicas: Transport | None,
    place: Sequence[int],
    valid: int,
    weight: float,
    error: Exception | None = None,
) -> tuple[int, float]:
    """Labels and their weight, of all groups of ranks on the job (data parallel over context parallel); a collective of
    theirs. replicas: the ranks that have this rank's place in each group, None where there is one group; place: epoch,
    iteration, microbatches. Raises `error`, which ends the other groups too, ExecutionError where they are apart."""
    given = [*place, valid, weight, error is not None]
    groups = [given] if replicas is None else replicas.gather_floats(given, "totals of groups")
    failed = [group for group, row in enumerate(groups) if row[-1]]
    if failed and replicas is not None:
        errors = replicas.gather_texts(shown(error), "errors of groups")
    if error is not None:
        raise error
    if failed:
        says = by_value({group: errors[group] for group in failed}, "group")
        raise ExecutionError(f"iteration {place[1]}: groups {failed} failed: {says}")
    if any(row[:3] != [*place] for row in groups):
        told = "; ".join(f"group {group}: {[*map(int, row[:3])]}" for group, row in enumerate(groups))
        what = "groups are not in step (epoch, iteration or -1 at the end, microbatches)"
        remedy = "Give their samplers equally many, and begin in the same place"
        raise ExecutionError(f"{what}: {told}. {remedy}")
    return int(sum(row[3] for row in groups)), sum(row[4] for row in groups)

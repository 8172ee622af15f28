"""Agreement of ranks before a plan is used: all have it, or those without it plan it themselves, or all raise; and
exchange of label counts between groups of ranks before a microbatch is used.

If ranks may plan themselves, there is one collective per iteration (whether this rank has the plan, and its id), and a
second one if a rank lacked it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from apportion.backends.torch.calls import by_value, quoted
from apportion.backends.torch.transport import Communicator, Transport, different_plans_error
from apportion.ir.errors import ExecutionError
from apportion.ir.hashing import SIZE
from apportion.trainer.loading.fetching import Fetched

READY, MISSING, FAILED = 0, 1, 2

_log = logging.getLogger(__name__)


@dataclass
class Agreement:
    """Agreement about plans that some ranks lack. plans: whether a rank that gets no plan in time computes it; if so,
    all ranks exchange their states in every iteration, else a rank that fails reports it when the others compare their
    plans (`backends.torch.handle.agree`). fallbacks: number of iterations that some rank planned itself."""

    communicator: Communicator
    plans: bool
    fallbacks: int = 0

    def take(self, number: int, fetch: Callable[[], Fetched], plan: Callable[[], Fetched]) -> Fetched:
        """The plan of iteration `number`: from `fetch`, or from `plan` on ranks where `fetch` raises TimeoutError; a
        collective. Raises their errors, and ExecutionError if another rank failed or the ids differ."""
        result = _attempt(fetch)
        if self.plans and MISSING in self._states(number, result):
            self.fallbacks += 1
            if isinstance(result, TimeoutError):
                _log.warning("iteration %d: no plan in time (%s): this rank plans it itself", number, result)
                result = _attempt(plan)
            self._states(number, result)
        if isinstance(result, Fetched):
            return result
        if not self.plans:
            self.communicator.all_gather([0, 0], "plans")
            self.communicator.gather_texts(quoted(result), "plans of ranks")
        raise result

    def _states(self, number: int, result: Fetched | Exception) -> list[int]:
        """The state of every rank; a collective. Raises on all ranks if one failed or two hold different plans."""
        numbers = [_state(result), *(result.piece.id if isinstance(result, Fetched) else bytes(SIZE))]
        rows = self.communicator.all_gather(numbers, "states of plans")
        states = [row[0] for row in rows]
        if FAILED in states:
            failed = [rank for rank, state in enumerate(states) if state == FAILED]
            error = result if numbers[0] == FAILED and isinstance(result, Exception) else None
            raise failure_error(
                self.communicator, failed, error, f"iteration {number}: ranks {failed} have no plan"
            )
        ids = [bytes(row[1:]).hex() for row in rows]
        if MISSING not in states and len(set(ids)) > 1:
            raise different_plans_error([f"plan {plan_id[:12]}" for plan_id in ids])
        return states


def _state(result: Fetched | Exception) -> int:
    if isinstance(result, Fetched):
        return READY
    return MISSING if isinstance(result, TimeoutError) else FAILED


def _attempt(make: Callable[[], Fetched]) -> Fetched | Exception:
    try:
        return make()
    except Exception as error:  # reported to the other ranks, which would wait, then raised
        return error


def failure_error(
    transport: Transport, failed: Sequence[int], error: Exception | None, message: str, unit: str = "rank"
) -> Exception:
    """This rank's error, or one that quotes those of the failed ranks, or groups; a collective."""
    texts = transport.gather_texts(quoted(error), f"errors of {unit}s")
    return error or ExecutionError(f"{message}: {by_value({i: texts[i] for i in failed}, unit)}")


def difference_error(
    transport: Transport, text: str, about: str, message: str, remedy: str, unit: str = "rank"
) -> ExecutionError | None:
    """The error for ranks, or groups, with different texts; None if they are equal. A collective."""
    texts = transport.gather_texts(text, about)
    details = by_value(dict(enumerate(texts)), unit)
    return ExecutionError(f"{message}: {details}. {remedy}") if len({*texts}) > 1 else None


def totals(
    replicas: Transport | None,
    place: Sequence[int],
    valid: int,
    weight: float,
    error: Exception | None = None,
) -> tuple[int, float]:
    """Labels and their weight over all groups of ranks (data parallel over context parallel); a collective of the
    groups. replicas: the ranks in this rank's position in each group, None for one group; place: epoch, iteration,
    microbatches. Raises `error`, or ExecutionError if another group has an error or the groups are out of step."""
    numbers = [*place, valid, weight, error is not None]
    groups = [numbers] if replicas is None else replicas.gather_floats(numbers, "totals of groups")
    failed = [group for group, row in enumerate(groups) if row[-1]]
    if error is not None and replicas is None:
        raise error
    if failed and replicas is not None:
        message = f"iteration {place[1]}: groups {failed} failed"
        raise failure_error(replicas, failed, error, message, "group")
    if any(row[:3] != [*place] for row in groups):
        positions = "; ".join(f"group {group}: {[*map(int, row[:3])]}" for group, row in enumerate(groups))
        message = "groups are not in step (epoch, iteration or -1 at the end, microbatches)"
        remedy = "Give their samplers the same number of iterations, and start them at the same place"
        raise ExecutionError(f"{message}: {positions}. {remedy}")
    return int(sum(row[3] for row in groups)), sum(row[4] for row in groups)

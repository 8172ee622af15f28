"""Groups of ranks on one job (data parallel over context parallel): each one's share, and sums over all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed import ProcessGroup

from apportion.backends.torch.calls import by_value, shown
from apportion.backends.torch.transport import Communicator, Transport
from apportion.ir.errors import ConfigError, ExecutionError
from apportion.trainer.loading.iterations import Deal
from apportion.trainer.loading.metrics import as_bits, as_floats


@dataclass(frozen=True)
class Groups:
    """replicas: the ranks that have this rank's place in each group; None where there is one group."""

    replicas: Transport | None = None

    @staticmethod
    def of(given: Transport | Any) -> Groups:
        """given: a transport, a process group, or None. Raises ConfigError for anything else."""
        if given is None or isinstance(given, Transport):
            return Groups(given)
        if not isinstance(given, ProcessGroup):
            rule = "must be a process group of the ranks in this rank's place"
            raise ConfigError("replicas", given, rule, "give one that torch.distributed.new_group made")
        return Groups(Communicator(given))

    @property
    def deal(self) -> Deal:
        """Which iterations are this group's."""
        return Deal() if self.replicas is None else Deal(self.replicas.rank, self.replicas.ranks)

    def totals(
        self, place: Sequence[int], valid: int, weight: float, error: Exception | None = None
    ) -> tuple[int, float]:
        """Labels and their weight, of all groups; a collective of theirs. place: epoch, iteration, microbatches.
        Raises `error`, which ends the other groups too, and ExecutionError where they are apart."""
        given = [*place, valid, *as_bits([weight]), int(error is not None)]
        groups = [given] if self.replicas is None else self.replicas.all_gather(given, "totals of groups")
        failed = [group for group, row in enumerate(groups) if row[-1]]
        if failed and self.replicas is not None:
            errors = self.replicas.gather_texts(shown(error), "errors of groups")
        if error is not None:
            raise error
        if failed:
            says = by_value({group: errors[group] for group in failed}, "group")
            raise ExecutionError(f"iteration {place[1]}: groups {failed} failed: {says}")
        if any(row[:3] != [*place] for row in groups):
            told = "; ".join(f"group {group}: {row[:3]}" for group, row in enumerate(groups))
            raise ExecutionError(
                f"groups are not in step (epoch, iteration or -1 at the end, microbatches): {told}. Give their "
                "samplers equally many, and begin in the same place"
            )
        return sum(row[3] for row in groups), sum(as_floats([row[4] for row in groups]))

"""A loader as trainers count: epochs of one length, and optimizer steps of one number of microbatches.

Passes over shuffled samples differ in length; Trainer and Lightning take that of the first for all. So an epoch of
theirs goes on where the one before ended, also in the middle of a pass, and what they skip or resume is the loader's
own state alone.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from apportion.ir.errors import ConfigError, ExecutionError
from apportion.trainer.loading.batch import PlannedBatch
from apportion.trainer.loading.loader import PlannedLoader
from apportion.trainer.shared import endless


@dataclass
class Epochs:
    """accumulated: microbatches of an optimizer step, None for evaluation, of which every epoch is a whole pass.
    valid_tokens: labels so far in this epoch, of all ranks. Raises ConfigError where steps do not fit iterations."""

    loader: PlannedLoader
    accumulated: int | None = None
    valid_tokens: int = 0

    def __post_init__(self) -> None:
        self._length = len(self.loader)
        if self.accumulated is not None and self._length % self.accumulated:
            rule = f"an epoch of {self._length} microbatches is no number of whole steps"
            remedy = "accumulate as many as the loader's microbatches, and give the loader drop_last=True"
            raise ConfigError("accumulated microbatches", self.accumulated, rule, remedy)

    def __len__(self) -> int:
        """Microbatches of an epoch."""
        return self._length

    def __iter__(self) -> Iterator[PlannedBatch]:
        """An epoch; when it is left, or over, no pass stays open. Raises ExecutionError."""
        batches, self.valid_tokens = self._pass(), 0
        try:
            for _ in range(len(self)):
                batch = next(batches)
                self._check(batch)
                self.valid_tokens += batch.valid_tokens if batch.is_last else 0
                yield batch
        finally:
            place = self.state_dict()
            batches.close()
            self.load_state_dict(place)

    def state_dict(self) -> dict[str, Any]:
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.loader.load_state_dict(state)

    def _pass(self) -> Generator[PlannedBatch, None, None]:
        if self.accumulated is not None:
            return endless(self.loader)
        self.loader.set_epoch(self.state_dict()["epoch"], start=0)
        return iter(self.loader)

    def _check(self, batch: PlannedBatch) -> None:
        if self.accumulated is not None and batch.is_last != (batch.microbatch + 1 == self.accumulated):
            raise ExecutionError(
                f"iteration {batch.iteration} has not the {self.accumulated} microbatches that an optimizer step "
                "accumulates: accumulate as many as the loader's iterations have, and give it drop_last=True"
            )

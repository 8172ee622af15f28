"""What a trainer says of its job, held against the job of its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from apportion.ir.bytes.job import Job
from apportion.ir.errors import ConfigError
from apportion.ir.masks.spec import Mask
from apportion.ir.plan.plain import MODEL_FACTS
from apportion.ir.request.cluster import Cluster
from apportion.ir.request.model import Model
from apportion.ir.request.policy import Policy, Recipe
from apportion.ir.request.sampling import Masks
from apportion.ir.request.sequences import DEFAULT_KIND
from apportion.ir.tensors import SENT_GRADIENTS
from apportion.planner.recipe.recipes import find_recipe


@dataclass(frozen=True)
class Told:
    """What a trainer says of its job; None where it leaves that to the source."""

    cluster: Cluster | None = None
    model: Model | None = None
    tokens_per_rank: int | None = None
    microbatches: int | None = None
    recipe: str | Mapping[str, Any] | Recipe | None = None
    seed: int | None = None

    def job(self) -> Job:
        """The job of a local source. Raises ConfigError where something is missing."""
        for name in ("cluster", "model", "tokens_per_rank"):
            if getattr(self, name) is None:
                rule = 'source="local" plans here, and needs it'
                raise ConfigError(name, None, rule, "give it, or name a service or a folder as source")
        policy = Policy(self._recipe() or find_recipe("fcp"), seed=self.seed or 0)
        count = 1 if self.microbatches is None else self.microbatches
        return Job(self.cluster, self.model, policy, self.tokens_per_rank, count)  # type: ignore[arg-type]

    def check(self, job: Job) -> None:
        """Raises ConfigError where the source's job differs from what was told."""
        recipe = self._recipe()
        told = (self.cluster, self.tokens_per_rank, self.microbatches, recipe and recipe.to_data())
        held = (job.cluster, job.tokens_per_rank, job.microbatches, job.policy.recipe.to_data())
        names = ("cluster", "tokens_per_rank", "microbatches", "recipe")
        for name, own, other in zip(names, told, held, strict=True):
            if own is not None and own != other:
                rule = f"the source's job has {other!r}"
                raise ConfigError(name, own, rule, "leave it out: the job says it")
        if self.model is not None:
            check_model(self.model, job.model)

    def _recipe(self) -> Recipe | None:
        return None if self.recipe is None else find_recipe(self.recipe)


def check_model(own: Model, planned: Model) -> None:
    """Raises ConfigError where attention of the trainer's model is not what the job plans. Hidden and FFN sizes and
    numbers of layers only price plans, and may differ. How gradients travel is the job's to say, where the trainer asks
    for nothing."""
    for name in MODEL_FACTS:
        if name != "sent_gradients" or own.sent_gradients != SENT_GRADIENTS[0]:
            _same(name, getattr(own, name), getattr(planned, name))
    if isinstance(own.layers, Mapping) and isinstance(planned.layers, Mapping):
        _same("layers", sorted(own.layers), sorted(planned.layers))


def _same(name: str, own: object, planned: object) -> None:
    if own != planned:
        rule = f"the trainer's model has {own!r}, the job's {planned!r}"
        remedy = "change the trainer's model, or make a job of it"
        raise ConfigError(f"model.{name}", own, rule, remedy)


def check_kinds(job: Job, masks: Masks) -> None:
    """Raises ConfigError where masks are not of the attention kinds that the job's model has layers of.

    masks: as batches take them; where there is one a sample the first is looked at, since all must have its kinds."""
    layers = job.model.layers
    if not isinstance(layers, Mapping):
        return
    first = masks if masks is None or isinstance(masks, Mask | Mapping) else next(iter(masks), None)
    kinds = sorted(first) if isinstance(first, Mapping) else [DEFAULT_KIND]
    if kinds != sorted(layers):
        rule = f"the masks are of the attention kinds {kinds}, the job's model has layers of {sorted(layers)}"
        raise ConfigError("masks", kinds, rule, "give a mask of each kind, masks={kind: mask, …}")

"""Apportion plans context-parallel attention: which rank holds which tokens, computes which attention, moves which
bytes. `import apportion as ap` brings the names below; each is imported when it is first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from apportion.ir.version import __version__

if TYPE_CHECKING:
    from apportion.backends.torch.remap import from_linear, to_linear
    from apportion.backends.torch.transport import Communicator
    from apportion.comparison import compare
    from apportion.ir.bytes.codec import Plan
    from apportion.ir.bytes.iteration import IterationPlan
    from apportion.ir.bytes.job import Job
    from apportion.ir.bytes.slices import Slice
    from apportion.ir.errors import (
        ApportionError,
        CapacityError,
        ConfigError,
        DecodeError,
        ExecutionError,
        MissingDependencyError,
        UnknownNameError,
        VerifyError,
        VersionError,
    )
    from apportion.ir.masks import specs as masks
    from apportion.ir.plan.tables import Layout
    from apportion.ir.request.batch import Batch
    from apportion.ir.request.cluster import Cluster
    from apportion.ir.request.hardware import Hardware
    from apportion.ir.request.model import Model
    from apportion.ir.request.policy import Policy, Recipe
    from apportion.ir.request.sequences import Sequence
    from apportion.ir.verify import verify
    from apportion.planner.api import plan
    from apportion.planner.forecast.choices import recipe_parallelisms, static_grids
    from apportion.planner.forecast.parallelism import Degrees, Parallelism
    from apportion.planner.forecast.run import forecast
    from apportion.planner.forecast.training import Training
    from apportion.planner.iteration.iterate import plan_iteration
    from apportion.planner.iteration.nano import nano_batches
    from apportion.planner.iteration.ticks import plan_tick, tick_batch, tick_table
    from apportion.planner.simulate import simulate
    from apportion.planner.simulate.pair.run import simulate_pair
    from apportion.service.client import Client, create_job
    from apportion.trainer import trees
    from apportion.trainer.loading.batch import PlannedBatch
    from apportion.trainer.loading.loader import PlannedLoader
    from apportion.trainer.step.attention import PlanHandle, planned_attention, planned_attention_block
    from apportion.trainer.step.gradients import sum_gradients
    from apportion.trainer.step.loss import normalised_loss
    from apportion.trainer.step.pingpong import PingPongLayer, ping_pong, ping_pong_attention
    from apportion.trainer.step.projection import HeadProjection

_HOMES = {
    "apportion.backends.torch.remap": ("from_linear", "to_linear"),
    "apportion.backends.torch.transport": ("Communicator",),
    "apportion.comparison": ("compare",),
    "apportion.ir.request.batch": ("Batch",),
    "apportion.ir.request.sequences": ("Sequence",),
    "apportion.ir.request.cluster": ("Cluster",),
    "apportion.ir.bytes.codec": ("Plan",),
    "apportion.ir.errors": (
        "ApportionError",
        "CapacityError",
        "ConfigError",
        "DecodeError",
        "ExecutionError",
        "MissingDependencyError",
        "UnknownNameError",
        "VerifyError",
        "VersionError",
    ),
    "apportion.ir.request.hardware": ("Hardware",),
    "apportion.ir.bytes.iteration": ("IterationPlan",),
    "apportion.ir.bytes.job": ("Job",),
    "apportion.ir.bytes.slices": ("Slice",),
    "apportion.ir.request.model": ("Model",),
    "apportion.ir.plan.tables": ("Layout",),
    "apportion.ir.request.policy": ("Policy", "Recipe"),
    "apportion.ir.verify": ("verify",),
    "apportion.planner.api": ("plan",),
    "apportion.planner.forecast.choices": ("recipe_parallelisms", "static_grids"),
    "apportion.planner.forecast.parallelism": ("Degrees", "Parallelism"),
    "apportion.planner.forecast.run": ("forecast",),
    "apportion.planner.forecast.training": ("Training",),
    "apportion.planner.iteration.iterate": ("plan_iteration",),
    "apportion.planner.iteration.nano": ("nano_batches",),
    "apportion.planner.simulate": ("simulate",),
    "apportion.planner.simulate.pair.run": ("simulate_pair",),
    "apportion.planner.iteration.ticks": ("plan_tick", "tick_batch", "tick_table"),
    "apportion.service.client": ("Client", "create_job"),
    "apportion.trainer.step.attention": ("PlanHandle", "planned_attention", "planned_attention_block"),
    "apportion.trainer.loading.batch": ("PlannedBatch",),
    "apportion.trainer.step.gradients": ("sum_gradients",),
    "apportion.trainer.loading.loader": ("PlannedLoader",),
    "apportion.trainer.step.loss": ("normalised_loss",),
    "apportion.trainer.step.pingpong": ("PingPongLayer", "ping_pong", "ping_pong_attention"),
    "apportion.trainer.step.projection": ("HeadProjection",),
}
#: modules that have another name here, or none of their own
_MODULES = {"masks": "apportion.ir.masks.specs", "trees": "apportion.trainer.trees"}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names} | _MODULES

__all__ = ["__version__", *_HOME_OF]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'apportion' has no attribute {name!r}")
    try:
        module = import_module(_HOME_OF[name])
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        from apportion.ir.errors import MissingDependencyError

        raise MissingDependencyError("torch", "torch", f"apportion.{name}") from error
    value = module if name in _MODULES else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

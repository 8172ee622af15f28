"""Apportion plans context-parallel attention: which rank holds which tokens, computes which attention, moves which
bytes. `import apportion as ap` brings the names below; each is imported when it is first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from apportion.ir.version import __version__

if TYPE_CHECKING:
    from apportion.backends.torch.remap import from_linear, to_linear
    from apportion.backends.torch.transport import Communicator
    from apportion.ir import masks
    from apportion.ir.batch import Batch, Sequence
    from apportion.ir.cluster import Cluster
    from apportion.ir.codec import Plan, Slice
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
    from apportion.ir.hardware import Hardware
    from apportion.ir.iteration import IterationPlan
    from apportion.ir.job import Job
    from apportion.ir.model import Model
    from apportion.ir.plan import Layout
    from apportion.ir.policy import Policy, Recipe
    from apportion.ir.verify import verify
    from apportion.planner.api import plan
    from apportion.planner.forecast.choices import recipe_parallelisms, static_grids
    from apportion.planner.forecast.parallelism import Degrees, Parallelism
    from apportion.planner.forecast.run import forecast
    from apportion.planner.forecast.training import Training
    from apportion.planner.iterate import plan_iteration
    from apportion.planner.nano import nano_batches
    from apportion.planner.simulate import simulate
    from apportion.planner.simulate.pair import simulate_pair
    from apportion.planner.ticks import plan_tick, tick_batch, tick_table
    from apportion.service.client import Client, create_job
    from apportion.trainer import trees
    from apportion.trainer.attention import PlanHandle, planned_attention, planned_attention_block
    from apportion.trainer.batch import PlannedBatch
    from apportion.trainer.gradients import sum_gradients
    from apportion.trainer.loader import PlannedLoader
    from apportion.trainer.loss import normalised_loss
    from apportion.trainer.pingpong import PingPongLayer, ping_pong, ping_pong_attention
    from apportion.trainer.projection import HeadProjection

_HOMES = {
    "apportion.backends.torch.remap": ("from_linear", "to_linear"),
    "apportion.backends.torch.transport": ("Communicator",),
    "apportion.ir": ("masks",),
    "apportion.ir.batch": ("Batch", "Sequence"),
    "apportion.ir.cluster": ("Cluster",),
    "apportion.ir.codec": ("Plan", "Slice"),
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
    "apportion.ir.hardware": ("Hardware",),
    "apportion.ir.iteration": ("IterationPlan",),
    "apportion.ir.job": ("Job",),
    "apportion.ir.model": ("Model",),
    "apportion.ir.plan": ("Layout",),
    "apportion.ir.policy": ("Policy", "Recipe"),
    "apportion.ir.verify": ("verify",),
    "apportion.planner.api": ("plan",),
    "apportion.planner.forecast.choices": ("recipe_parallelisms", "static_grids"),
    "apportion.planner.forecast.parallelism": ("Degrees", "Parallelism"),
    "apportion.planner.forecast.run": ("forecast",),
    "apportion.planner.forecast.training": ("Training",),
    "apportion.planner.iterate": ("plan_iteration",),
    "apportion.planner.nano": ("nano_batches",),
    "apportion.planner.simulate": ("simulate",),
    "apportion.planner.simulate.pair": ("simulate_pair",),
    "apportion.planner.ticks": ("plan_tick", "tick_batch", "tick_table"),
    "apportion.service.client": ("Client", "create_job"),
    "apportion.trainer": ("trees",),
    "apportion.trainer.attention": ("PlanHandle", "planned_attention", "planned_attention_block"),
    "apportion.trainer.batch": ("PlannedBatch",),
    "apportion.trainer.gradients": ("sum_gradients",),
    "apportion.trainer.loader": ("PlannedLoader",),
    "apportion.trainer.loss": ("normalised_loss",),
    "apportion.trainer.pingpong": ("PingPongLayer", "ping_pong", "ping_pong_attention"),
    "apportion.trainer.projection": ("HeadProjection",),
}
_MODULES = ("masks", "trees")
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = ["__version__", *_HOME_OF]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'apportion' has no attribute {name!r}")
    try:
        home = _HOME_OF[name]
        module = import_module(f"{home}.{name}" if name in _MODULES else home)
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

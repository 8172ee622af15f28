"""Registry of passes by step and name, without importing them.

Third parties add theirs through the entry point group `apportion.passes`: "step.pass" = a pass class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint
from typing import Any, Protocol

from apportion.ir.errors import UnknownNameError
from apportion.ir.fields import suggestion
from apportion.ir.request.policy import Step
from apportion.planner import plugins
from apportion.planner.options import read
from apportion.planner.problem import Pass
from apportion.planner.solvers.use import SolverOption

#: step -> pass name -> location of its class, whose fields are the pass's parameters
_BUILT_IN = {
    "pack": {"sequential": "pack:Sequential", "balanced": "pack:Balanced", "wlb": "pack:Wlb"},
    "inner": {"ulysses": "inner.groups:Ulysses", "upipe": "inner.upipe:UPipe"},
    "pods": {"documents": "pods:Documents"},
    "shard": {
        "blocks": "shard.blocks:Blocks",
        "chunks": "shard.sequences:Chunks",
        "sequences": "shard.sequences:Sequences",
    },
    "place": {
        "lpt": "place.lpt:Lpt",
        "zigzag": "place.zigzag:ZigZag",
        "contiguous": "place.contiguous:Contiguous",
        "whole": "place.whole:Whole",
        "hybrid_dp": "place.hybrid:HybridDp",
        "megatron_hybrid": "place.hybrid:MegatronHybrid",
        "wlb": "place.wlb:Wlb",
        "flexsp": "place.flexsp:FlexSp",
        "zeppelin": "place.zeppelin:Zeppelin",
        "distca": "place.distca.placement:Distca",
        "dcp": "place.dcp.placement:Dcp",
        "blend": "place.blend.placement:Blend",
    },
    "route": {
        "star": "route.trees:Star",
        "node": "route.gateways:Node",
        "tree": "route.trees:Tree",
        "ring": "route.ring:Ring",
    },
    "schedule": {
        "matchings": "schedule.rounds:Matchings",
        "ring": "schedule.rounds:Ring",
        "gather": "schedule.rounds:Gather",
        "queues": "schedule.queues:Queues",
        "divisions": "schedule.divisions:Divisions",
    },
    "remap": {"flow": "remap:Flow"},
    "search": {"portfolio": "search:Portfolio"},
}
#: step -> contract: call signature and attributes of its passes
_CONTRACTS = {
    "pack": "pack:PackPass",
    "inner": "inner.groups:InnerPass",
    "pods": "pods:PodsPass",
    "shard": "problem:ShardPass",
    "place": "problem:PlacePass",
    "route": "route.routes:RoutePass",
    "schedule": "schedule.rounds:SchedulePass",
    "remap": "remap:RemapPass",
    "search": "pipeline.pipeline:SearchPass",
}
STEPS = tuple(_BUILT_IN)


def names(step: str) -> list[str]:
    """Names of the passes of a step."""
    return [*_BUILT_IN[step], *_plugin_passes()[step]]


def find_pass(step: str, name: str) -> type[Any]:
    """The class of a pass, checked against its step's contract. Raises UnknownNameError, ConfigError."""
    if name in _BUILT_IN[step]:
        return _import_class(_BUILT_IN[step][name])
    points = _plugin_passes()[step]
    if name not in points:
        raise UnknownNameError(f"recipe.{step}", name, "no pass of that name", suggestion(name, names(step)))
    pass_type: type[Any] = plugins.load(points[name], type)
    if fault := contract_fault(step, pass_type):
        raise plugins.entry_point_error(
            points[name], f"provides {pass_type.__name__}, {fault}", "see docs/how-to/own-recipe.md"
        )
    return pass_type


def contract_fault(step: str, pass_type: type[Any]) -> str | None:
    """Describes how a class violates the contract of the step's passes, or None."""
    contract = _import_class(_CONTRACTS[step])
    if not is_dataclass(pass_type):
        return "which is not a dataclass"
    for field in fields(pass_type):
        if field.default is MISSING or not field.init:
            return f"whose parameter {field.name} has no default"
    members = _members(contract)
    abstract: frozenset[str] = getattr(pass_type, "__abstractmethods__", frozenset())
    defined = {name for base in pass_type.__mro__ for name in vars(base)} - abstract
    for member in sorted(members - defined):
        return f"which has no {member}: see {contract.__name__}"
    public = {name for base in pass_type.__mro__[:-1] if base not in contract.__mro__ for name in vars(base)}
    for name in sorted(public - members - {field.name for field in fields(pass_type)}):
        matches = get_close_matches(name, members, 1, 0.8)
        if matches and not name.startswith("_"):
            return f"whose {name} resembles {matches[0]}: correct it or choose another name"
    return None


def _members(contract: type[Any]) -> set[str]:
    protocol_names = {name for base in contract.__mro__ if issubclass(base, Protocol) for name in vars(base)}
    return {name for name in protocol_names if not name.startswith("_") or name == "__call__"}


def _import_class(path: str) -> type[Any]:
    module, _, attribute = path.partition(":")
    pass_type: type[Any] = getattr(import_module(f"apportion.planner.{module}"), attribute)
    return pass_type


def users_of(kind: str) -> list[str]:
    """Names, "step pass", of the passes with a solver of that kind."""
    passes = [(step, name, find_pass(step, name)) for step in STEPS for name in names(step)]
    return [
        f"{step} {name}"
        for step, name, cls in passes
        if any(
            isinstance(field.default, SolverOption) and field.default.kind == kind for field in fields(cls)
        )
    ]


def build(step: Step) -> Pass:
    """Builds the pass of a recipe's step. Raises UnknownNameError, ConfigError."""
    result: Pass = read(find_pass(step.step, step.name), f"recipe.{step.step}.{step.name}", step.params)
    return result


@cache
def _plugin_passes() -> Mapping[str, Mapping[str, EntryPoint]]:
    passes: dict[str, dict[str, EntryPoint]] = {step: {} for step in _BUILT_IN}
    for name, point in plugins.discover("apportion.passes").items():
        step, _, pass_name = name.partition(".")
        if step not in _BUILT_IN or not pass_name or pass_name in _BUILT_IN[step]:
            raise plugins.entry_point_error(
                point, f"has the name {name!r}, which is taken or not of the form step.pass", "rename it"
            )
        passes[step][pass_name] = point
    return passes

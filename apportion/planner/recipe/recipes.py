"""Recipes by name: lookup, validation, and construction of their passes.

    recipe = [pack] · [inner] · [pods] · shard · place · [route] · schedule · [remap] · [reshuffle]
           | [pack] · search, which chooses the other steps

Third parties add recipes through the entry point group `apportion.recipes`: name = a `Recipe` or `RecipeEntry`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any, cast

import msgspec

from apportion.ir.errors import ConfigError, UnknownNameError
from apportion.ir.fields import sequence, suggestion
from apportion.ir.request.policy import DEFAULT_RECIPE, Recipe, Step
from apportion.planner import options, plugins
from apportion.planner.inner.groups import InnerPass
from apportion.planner.pack import PackPass
from apportion.planner.pipeline.pipeline import SearchPass
from apportion.planner.pipeline.steps import Passes
from apportion.planner.pods import PodsPass
from apportion.planner.problem import Pass, PlacePass, ShardPass
from apportion.planner.recipe import registry
from apportion.planner.recipe.built_in import BUILT_IN, RecipeEntry
from apportion.planner.recipe.registry import STEPS
from apportion.planner.remap import RemapPass
from apportion.planner.route.routes import RoutePass
from apportion.planner.route.trees import Star
from apportion.planner.schedule.rounds import SchedulePass

_encode, _decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder().decode

_REQUIRED = ("shard", "place", "schedule")
_SWITCHES = ("reshuffle",)


def entries() -> dict[str, RecipeEntry]:
    """All recipes by name: built-in ones in order, then those of plug-ins. Raises ConfigError for a broken plug-in."""
    return {**BUILT_IN, **_plugin_recipes()}


@cache
def _plugin_recipes() -> Mapping[str, RecipeEntry]:
    recipes = {}
    for name, point in plugins.discover("apportion.recipes").items():
        item = plugins.load(point, (RecipeEntry, Recipe))
        entry = item if isinstance(item, RecipeEntry) else RecipeEntry(item, "", plugins.distribution(point))
        if entry.name in BUILT_IN or entry.name != name:
            raise plugins.entry_point_error(
                point, f"provides a recipe {entry.name!r}", "give both the same unused name"
            )
        recipes[name] = entry
    return recipes


def find_recipe(recipe: str | Mapping[str, Any] | Recipe) -> Recipe:
    """Resolves a recipe given by name, as data (which is validated) or as a Recipe. Raises UnknownNameError,
    ConfigError."""
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, Mapping):
        result = Recipe.from_data(recipe)
        check(result)
        return result
    if not isinstance(recipe, str):
        rule = "must be a name, a Recipe or its data"
        raise ConfigError("recipe", recipe, rule, f"use {DEFAULT_RECIPE}")
    names = BUILT_IN if recipe in BUILT_IN else entries()
    if recipe not in names:
        raise UnknownNameError("recipe", recipe, "no recipe of that name", suggestion(recipe, names))
    built_in = names[recipe].recipe
    # a copy of each step, so that changed parameters affect no other plan
    return Recipe(built_in.name, tuple(replace(step) for step in built_in))


def find_recipes(field: str, recipes: Any) -> list[Recipe]:
    """Resolves a non-empty list of names, Recipes and data. Raises ConfigError."""
    result = [find_recipe(recipe) for recipe in sequence(field, recipes)]
    if not result:
        raise ConfigError(field, [], "must not be empty", "name at least one")
    return result


def check(recipe: Recipe) -> None:
    """Raises UnknownNameError for an unknown step, pass or solver, ConfigError for wrong parameters and
    combinations."""
    if recipe.step("search") is None:
        passes_of(recipe)
    else:
        search_of(recipe)


def schema() -> dict[str, Any]:
    """JSON Schema of all available recipes, including the passes and solvers of plug-ins."""
    steps: dict[str, Any] = {step: _step_schema(step) for step in STEPS}
    steps |= {step: {"type": "boolean", "default": False} for step in _SWITCHES}
    base = json.loads(files("apportion.schemas").joinpath("recipe.schema.json").read_text("utf-8"))
    searches = {"required": ["search"], "propertyNames": {"enum": ["pack", "search"]}}
    plans = {"required": list(_REQUIRED), "not": {"required": ["search"]}}
    body = {"type": "object", "additionalProperties": False, "properties": steps, "oneOf": [plans, searches]}
    return {**base, "properties": {**base["properties"], "steps": body}}


def _step_schema(step: str) -> dict[str, Any]:
    """Schema of one pass, with its parameters or null."""
    schemas = {name: options.schema(registry.find_pass(step, name)) for name in registry.names(step)}
    passes = {name: {"anyOf": [entry, {"type": "null"}]} for name, entry in schemas.items()}
    entry = {"type": "object", "additionalProperties": False, "minProperties": 1, "maxProperties": 1}
    return {**entry, "properties": passes}


def with_block(recipe: Recipe, block: int | str) -> Recipe:
    """The recipe with another block size. Raises ConfigError if it does not shard into blocks."""
    shard = recipe.step("shard")
    if shard is None or shard.name != "blocks":
        rule = f"recipe {recipe.name} does not shard into blocks"
        raise ConfigError("block", block, rule, "take one that does, such as fcp, or leave --block out")
    blocks = Step("shard", "blocks", {**shard.params, "block": block})
    return Recipe(recipe.name, tuple(blocks if step.step == "shard" else step for step in recipe))


def with_pods(recipe: Recipe, ranks: int | str) -> Recipe:
    """The recipe with pods of at most `ranks` ranks, or "auto". Raises ConfigError for recipes that search."""
    if recipe.step("search") is not None:
        rule = f"recipe {recipe.name} searches, and plans all ranks at once"
        raise ConfigError("pods", ranks, rule, "use another recipe, such as fcp, or leave --pods out")
    pods = Step("pods", "documents", {"ranks": ranks})
    return Recipe(recipe.name, (pods, *(step for step in recipe if step.step != "pods")))


def passes_of(recipe: Recipe) -> Passes:
    """Builds the passes of a recipe without search. Raises UnknownNameError for a pass, ConfigError for a step or
    parameter."""
    return _passes(_encode(recipe.to_data()))


@lru_cache(256)
def _passes(data: bytes) -> Passes:
    """The passes of an encoded recipe: in plain data, 1 and true would be equal cache keys."""
    recipe = Recipe.from_data(_decode(data))
    passes = _build_passes(recipe)
    for step in _REQUIRED:
        if step not in passes:
            rule = f"has no step {step}"
            remedy = f"add one of {', '.join(registry.names(step))}"
            raise ConfigError("recipe.steps", recipe.name, rule, remedy)
    schedule = cast(SchedulePass, passes["schedule"])
    return Passes(
        inner=cast(InnerPass | None, passes.get("inner")),
        pods=cast(PodsPass | None, passes.get("pods")),
        shard=cast(ShardPass, passes["shard"]),
        place=cast(PlacePass, passes["place"]),
        route=_route(cast(RoutePass | None, passes.get("route")), schedule.route),
        schedule=schedule,
        reshuffle=_is_on(recipe, "reshuffle"),
        remap=cast(RemapPass | None, passes.get("remap")),
    )


def search_of(recipe: Recipe) -> SearchPass:
    """Builds the search pass of a recipe. Raises the errors of `passes_of`."""
    return cast(SearchPass, _build_passes(recipe)["search"])


def pack_of(recipe: Recipe) -> PackPass | None:
    """Builds the pack pass of a recipe, or None. Raises the errors of `passes_of`."""
    return cast(PackPass | None, _build_passes(recipe).get("pack"))


def _build_passes(recipe: Recipe) -> dict[str, Pass]:
    """Step -> pass; `registry` has checked the contracts."""
    names, searches = (*STEPS, *_SWITCHES), recipe.step("search") is not None
    for step in recipe:
        field = f"recipe.{step.step}"
        if step.step not in names:
            raise UnknownNameError("recipe.steps", step.step, "unknown step", suggestion(step.step, names))
        if searches and step.step not in ("pack", "search"):
            rule = "cannot be combined with a search, which chooses it"
            raise ConfigError(field, step.name, rule, "put it into a recipe among the candidates")
    return {step.step: registry.build(step) for step in recipe if step.step not in _SWITCHES}


def _route(route: RoutePass | None, default: RoutePass | None) -> RoutePass:
    """The route pass: some schedules bring their own; otherwise tiles go straight to their destinations."""
    if default is not None and route is not None:
        rule = "the schedule has its own route"
        raise ConfigError("recipe.route", type(route).__name__.lower(), rule, "leave the route out")
    return default or route or Star()


def _is_on(recipe: Recipe, step_name: str) -> bool:
    step = recipe.step(step_name)
    if step is None:
        return False
    if step.name not in ("on", "off") or step.params:
        raise ConfigError(f"recipe.{step_name}", step.name, "is a switch", "write true or false")
    return step.name == "on"

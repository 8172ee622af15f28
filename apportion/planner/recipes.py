"""Named strategies as data, and the passes that their steps may name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

from apportion.ir.errors import ConfigError, UnknownNameError
from apportion.ir.policy import Recipe, Step
from apportion.planner.passes.place import Lpt
from apportion.planner.passes.schedule import Matchings
from apportion.planner.passes.shard import Blocks

#: step -> pass name -> class; the fields of the class are the pass's parameters
PASSES: Mapping[str, Mapping[str, type[Any]]] = MappingProxyType(
    {
        "shard": MappingProxyType({"blocks": Blocks}),
        "place": MappingProxyType({"lpt": Lpt}),
        "schedule": MappingProxyType({"matchings": Matchings}),
    }
)

#: FCP, section 4: fixed blocks, LPT, matchings. By default the attention layout is the loader's own.
FCP = Recipe(
    "fcp",
    {
        "shard": {"blocks": {"block": "auto", "zigzag": True}},
        "place": {"lpt": {}},
        "schedule": {"matchings": {"coalesce": "auto", "buffers": 3}},
        "reshuffle": False,
    },
)

RECIPES: Mapping[str, Recipe] = MappingProxyType({FCP.name: FCP})


@dataclass(frozen=True)
class Pipeline:
    """The passes of a recipe, ready to run."""

    shard: Blocks
    place: Lpt
    schedule: Matchings
    reshuffle: bool


def find_recipe(recipe: str | Mapping[str, Any] | Recipe) -> Recipe:
    """The recipe of that name, or the one given as data. Raises UnknownNameError, ConfigError."""
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, Mapping):
        return Recipe.from_data(recipe)
    if recipe not in RECIPES:
        raise UnknownNameError(
            "recipe", recipe, f"there is {', '.join(RECIPES)}", "name one of these or give a Recipe"
        )
    return RECIPES[recipe]


def with_block(recipe: Recipe, block: int | str) -> Recipe:
    """The recipe with another block size. Raises ConfigError where it does not shard into blocks."""
    shard = recipe.step("shard")
    if shard is None or shard.name != "blocks":
        raise ConfigError(
            "block", block, f"recipe {recipe.name} does not shard into blocks", "leave --block out"
        )
    blocks = Step("shard", "blocks", {**shard.params, "block": block})
    return Recipe(recipe.name, tuple(blocks if step.step == "shard" else step for step in recipe))


def pipeline(recipe: Recipe) -> Pipeline:
    """The passes of a recipe. Raises UnknownNameError for a pass, ConfigError for a step or parameter."""
    known = (*PASSES, "reshuffle")
    for step in recipe:
        if step.step not in known:
            raise UnknownNameError(
                f"recipe.steps.{step.step}", step.name, f"the steps are {', '.join(known)}", "leave it out"
            )
    return Pipeline(
        **{name: _build(recipe, name) for name in PASSES}, reshuffle=_switched(recipe, "reshuffle")
    )


def _build(recipe: Recipe, step_name: str) -> Any:
    step, passes, where = recipe.step(step_name), PASSES[step_name], f"recipe.steps.{step_name}"
    if step is None:
        raise ConfigError(
            "recipe.steps", recipe.name, f"has no step {step_name}", f"add one of {', '.join(passes)}"
        )
    if step.name not in passes:
        raise UnknownNameError(where, step.name, f"the passes are {', '.join(passes)}", "name one of these")
    names = [field.name for field in fields(passes[step.name])]
    for parameter in step.params:
        if parameter not in names:
            rule = f"has the parameters {', '.join(names)}" if names else "has no parameters"
            raise ConfigError(f"{where}.{step.name}", parameter, rule, "leave it out or correct it")
    return passes[step.name](**step.params)


def _switched(recipe: Recipe, step_name: str) -> bool:
    step = recipe.step(step_name)
    if step is None:
        return False
    if step.name not in ("on", "off") or step.params:
        raise ConfigError(f"recipe.steps.{step_name}", step.name, "is a switch", "write true or false")
    return step.name == "on"

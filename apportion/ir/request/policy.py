"""Recipe and policy: the pass of each planning step, and limits for the plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from apportion.ir.errors import ConfigError
from apportion.ir.fields import choice, keep, known, load, mapping, name, plain
from apportion.ir.structs import Amount, Count, Natural, Positive, check, read, to_data

#: obsolete field of older plans, jobs and files: accepted with its only value, then ignored; never written
_OBSOLETE = "objective"

_SWITCH = {True: "on", False: "off"}


@dataclass(frozen=True)
class Step:
    """One step of a recipe: its pass and the parameters, plain data. A switch has the pass `on` or `off`. Raises
    ConfigError."""

    step: str
    name: str
    params: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        path = f"recipe.{name('recipe.steps', self.step)}"
        path = f"{path}.{name(path, self.name)}"
        object.__setattr__(self, "params", dict(mapping(path, plain(path, self.params))))


@dataclass(frozen=True, eq=False)
class Recipe:
    """A planning strategy as data: the pass of each step. The order of steps has no meaning: a plan sorts them, and
    recipes that differ only in it are equal.

    steps: a mapping step -> {pass: parameters}, or true or false for a switch, as in

        {"shard": {"blocks": {"block": "auto", "zigzag": True}}, "place": {"lpt": {}}, "reshuffle": False}

    Stored as a tuple of `Step`. The planner defines the available steps and passes. Raises ConfigError.
    """

    name: str
    steps: tuple[Step, ...] | Mapping[str, Any] = ()

    def __post_init__(self) -> None:
        keep(self, "recipe.name", name)
        object.__setattr__(self, "steps", _steps(self.steps))

    def __iter__(self) -> Any:
        return iter(self.steps)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Recipe) and self.name == other.name and {*self} == {*other}

    def __hash__(self) -> int:
        return hash((self.name, frozenset(self)))

    def step(self, step: str) -> Step | None:
        """The recipe's entry for a step, or None."""
        return next((item for item in self if item.step == step), None)

    @staticmethod
    def from_data(data: Any) -> Recipe:
        """Builds a recipe from plain data {"name": …, "steps": {…}}. Raises ConfigError."""
        data = known("recipe", data, ("name", "steps"), ("name", "steps"))
        return Recipe(data["name"], mapping("recipe.steps", data["steps"]))

    def to_data(self) -> dict[str, Any]:
        """Plain data in the form of `from_data`."""
        return {"name": self.name, "steps": {item.step: _step_data(item) for item in self}}

    @staticmethod
    def load(path: str | Path) -> Recipe:
        """Loads a recipe from a JSON or YAML file."""
        return Recipe.from_data(load(path))


#: default recipe of a request: no single recipe is near the best in every situation (benchmarks/situations.py)
DEFAULT_RECIPE = "auto"


@dataclass(frozen=True)
class Policy:
    """Limits and options of a plan.

    token_cap: largest number of tokens of any rank; None: 1.02 x each rank's share by cluster speed, rounded up.
    memory_cap_gib: None: the cluster's memory. tolerance: largest compute imbalance, max/mean - 1; None: no limit.
    budget: maximum number of search steps, for recipes that search, such as `auto`; None: the recipe's default. seed:
    part of the plan's identity, even if the recipe (such as `fcp`) uses no random numbers. Raises ConfigError.
    """

    recipe: Recipe
    token_cap: Count | None = None
    memory_cap_gib: Positive | None = None
    tolerance: Amount | None = None
    seed: Natural = 0
    budget: Count | None = None

    def __post_init__(self) -> None:
        check(self, "policy")

    @staticmethod
    def from_data(data: Any) -> Policy:
        """Builds a policy from plain data: a mapping of the fields above, `recipe` required. Raises ConfigError."""
        data = dict(mapping("policy", data))
        choice(f"policy.{_OBSOLETE}", data.pop(_OBSOLETE, "makespan"), ("makespan",))
        return read(Policy, "policy", data)

    def to_data(self) -> dict[str, Any]:
        """Plain data with every field."""
        return to_data(self)


def _steps(steps: Any) -> tuple[Step, ...]:
    if isinstance(steps, tuple) and all(isinstance(item, Step) for item in steps):
        names = [item.step for item in steps]
        for duplicate in (name for name in names if names.count(name) > 1):
            raise ConfigError("recipe.steps", duplicate, "occurs twice", "give each step one pass")
        return steps
    return tuple(_step(step, value) for step, value in mapping("recipe.steps", steps).items())


def _step(step: str, value: Any) -> Step:
    path = f"recipe.{name('recipe.steps', step)}"
    if isinstance(value, bool):
        return Step(step, _SWITCH[value])
    if len(mapping(path, value)) != 1:
        raise ConfigError(path, value, "must name one pass", "write {pass: {parameter: value}}")
    ((pass_name, params),) = value.items()
    return Step(step, pass_name, {} if params is None else params)


def _step_data(item: Step) -> Any:
    for value, switch in _SWITCH.items():
        if item.name == switch and not item.params:
            return value
    return {item.name: plain(f"recipe.{item.step}", item.params)}

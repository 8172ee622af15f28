"""Recipe and policy: which pass runs at each step, and what the plan must hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from apportion.ir.errors import ConfigError
from apportion.ir.fields import choice, keep, known, load, mapping, name, plain
from apportion.ir.structs import Amount, Count, Natural, Positive, check, read, to_data

#: plans, jobs and files of before may have it, with the one value that it could have; nothing reads or writes it
_GONE = "objective"

_SWITCH = {True: "on", False: "off"}


@dataclass(frozen=True)
class Step:
    """One step of a recipe: the pass that runs there and its parameters, plain data. A switch is a pass `on` or `off`.
    Raises ConfigError."""

    step: str
    name: str
    params: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        where = f"recipe.steps.{name('recipe.steps', self.step)}"
        where = f"{where}.{name(where, self.name)}"
        object.__setattr__(self, "params", dict(mapping(where, plain(where, self.params))))


@dataclass(frozen=True, eq=False)
class Recipe:
    """A strategy as data: the pass of each step. The order of steps is that given, and has no meaning: a plan sorts
    them, and recipes that differ in it alone are equal.

    steps: a mapping step -> {pass: parameters}, or true or false for a step that is only switched, as in

        {"shard": {"blocks": {"block": "auto", "zigzag": True}}, "place": {"lpt": {}}, "reshuffle": False}

    Kept as a tuple of `Step`. Which steps and passes exist is the planner's to say. Raises ConfigError.
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
        """What the recipe says of a step, None where it says nothing."""
        return next((item for item in self if item.step == step), None)

    @staticmethod
    def from_data(data: Any) -> Recipe:
        """The recipe of plain data {"name": …, "steps": {…}}. Raises ConfigError."""
        data = known("recipe", data, ("name", "steps"), ("name", "steps"))
        return Recipe(data["name"], mapping("recipe.steps", data["steps"]))

    def to_data(self) -> dict[str, Any]:
        """Plain data, in the form that `from_data` reads."""
        return {"name": self.name, "steps": {item.step: _step_data(item) for item in self}}

    @staticmethod
    def load(path: str | Path) -> Recipe:
        """The recipe of a JSON or YAML file."""
        return Recipe.from_data(load(path))


#: of a request that names none: no single recipe is near the best in every situation (benchmarks/situations.py)
DEFAULT_RECIPE = "auto"


@dataclass(frozen=True)
class Policy:
    """What a plan must hold.

    token_cap: most tokens of a rank, one number for all; None is 1.02 x each rank's share, rounded up. Shares are by
    the cluster's speeds: the mean where ranks are alike.
    memory_cap_gib: None is the cluster's memory. tolerance: largest compute imbalance, max/mean - 1; None promises
    nothing. budget (most steps; None is the recipe's own): for recipes that search, as `auto` does.
    seed: part of the plan's identity, although `fcp` draws nothing at random. Raises ConfigError.
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
        """The policy of plain data: a mapping of the fields above, `recipe` required. Raises ConfigError."""
        data = dict(mapping("policy", data))
        choice(f"policy.{_GONE}", data.pop(_GONE, "makespan"), ("makespan",))
        return read(Policy, "policy", data)

    def to_data(self) -> dict[str, Any]:
        """Plain data with every field."""
        return to_data(self)

    @staticmethod
    def load(path: str | Path) -> Policy:
        """The policy of a JSON or YAML file."""
        return Policy.from_data(load(path))


def _steps(steps: Any) -> tuple[Step, ...]:
    if isinstance(steps, tuple) and all(isinstance(item, Step) for item in steps):
        named = [item.step for item in steps]
        for twice in (name for name in named if named.count(name) > 1):
            raise ConfigError("recipe.steps", twice, "is there twice", "give each step one pass")
        return steps
    return tuple(_step(step, value) for step, value in mapping("recipe.steps", steps).items())


def _step(step: str, value: Any) -> Step:
    where = f"recipe.steps.{name('recipe.steps', step)}"
    if isinstance(value, bool):
        return Step(step, _SWITCH[value])
    if len(mapping(where, value)) != 1:
        raise ConfigError(where, value, "must name one pass", "write {pass: {parameter: value}}")
    ((chosen, params),) = value.items()
    return Step(step, chosen, {} if params is None else params)


def _step_data(item: Step) -> Any:
    for value, switch in _SWITCH.items():
        if item.name == switch and not item.params:
            return value
    return {item.name: plain(f"recipe.steps.{item.step}", item.params)}

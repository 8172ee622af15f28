"""Commands that list what there is: recipes, solvers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from apportion.cli import options
from apportion.cli.output import emit

if TYPE_CHECKING:
    from apportion.ir.policy import Recipe
    from apportion.planner.recipes import Entry
    from apportion.planner.solvers import registry


def recipes(
    name: Annotated[
        str | None, typer.Argument(help="Print this recipe as a recipe file.", metavar="[NAME]")
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """List the recipes: what each does, what it needs and where it comes from; or print one as YAML.

    What is printed of one recipe is a recipe file: change it, and give the file as --recipe or in --recipes.
    Comments in it name the parameters that its passes have, with their defaults; `docs/recipes.md` explains them.

    [bold]Examples[/bold]

      apportion recipes

      apportion recipes zeppelin

      apportion recipes fcp > mine.yaml
    """
    from apportion.cli import tables
    from apportion.planner.recipes import entries, find_recipe

    known = entries()
    if name is None:
        rows = [_recipe(entry) for entry in known.values()]
        emit({"recipes": rows}, as_json, lambda: tables.recipes_table(rows))
        return
    find_recipe(name)  # says what there is where the name is unknown
    record = _recipe(known[name])
    emit(record, as_json, lambda: tables.recipe_file(record))


def _recipe(entry: Entry) -> dict[str, Any]:
    facts = {"summary": entry.summary, "paper": entry.paper, "section": entry.section, "needs": entry.needs}
    return {**entry.recipe.to_data(), **facts, "parameters": _parameters(entry.recipe)}


def _parameters(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """Step -> what its pass may be told, with the defaults; switches have nothing."""
    from apportion.planner.registry import parameters

    passes = {step.step: step.name for step in recipe if step.name not in ("on", "off")}
    return {step: dict(parameters(step, held)) for step, held in passes.items()}


def solvers(as_json: options.AsJson = False) -> None:
    """List the solvers: which problem each solves and how, where it comes from, and whether it is installed.

    [bold]Example[/bold]

      apportion solvers --json
    """
    from apportion.cli import tables
    from apportion.planner.solvers.registry import list_solvers

    rows = [_solver(entry) for entry in list_solvers()]
    emit({"solvers": rows}, as_json, lambda: tables.solvers_table(rows))


def _solver(entry: registry.Entry) -> dict[str, Any]:
    package, extra = entry.needs or (None, None)
    facts = {"name": entry.name, "kind": entry.kind, "summary": entry.summary, "source": entry.source}
    return {**facts, "package": package, "extra": extra, "installed": entry.installed}

"""Commands that list recipes and solvers."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from apportion.cli import options
from apportion.cli.output import emit, note, progress

if TYPE_CHECKING:
    from apportion.ir.request.policy import Recipe
    from apportion.planner.recipe.built_in import RecipeEntry
    from apportion.planner.solvers import registry


def recipes(
    name: Annotated[
        str | None, Argument(help="Print this recipe as a recipe file.", metavar="[NAME]")
    ] = None,
    as_json: options.AsJson = False,
    schema: Annotated[
        bool, Option("--schema", help="Print the JSON Schema of recipe files, plug-ins included.")
    ] = False,
) -> None:
    """List the recipes with purpose, requirements and origin, or print one as YAML.

    `apportion recipes NAME` prints a recipe file: change it and pass it as
    --recipe or in --recipes. Its comments list the parameters of its passes with
    defaults and ranges; docs/reference/recipes.md explains them. Editors use the
    JSON Schema to complete and check recipe files.

    [bold]Examples[/bold]

      apportion recipes

      apportion recipes zeppelin

      apportion recipes fcp > mine.yaml

      apportion recipes --schema > recipe.schema.json
    """
    from apportion.cli.printed import recipes as printed
    from apportion.planner.recipe import recipes
    from apportion.planner.recipe.recipes import entries, find_recipe

    if schema and name is not None:
        raise typer.BadParameter("covers all recipes; leave the name out", param_hint="--schema")
    if schema:
        print(json.dumps(recipes.schema(), indent=None if as_json else 2))
        return
    by_name = entries()
    if name is None:
        rows = [_recipe(entry) for entry in by_name.values()]
        emit({"recipes": rows}, as_json, lambda: printed.recipes_table(rows))
        return
    find_recipe(name)  # for an unknown name, raises an error that lists all recipes
    record = _recipe(by_name[name])
    emit(record, as_json, lambda: printed.recipe_file(record))


def _recipe(entry: RecipeEntry) -> dict[str, Any]:
    facts = {"summary": entry.summary, "paper": entry.paper, "section": entry.section, "needs": entry.needs}
    return {**entry.recipe.to_data(), **facts, "parameters": _parameters(entry.recipe)}


def _parameters(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """Step -> the parameters of its pass, with defaults and allowed values; switches have none."""
    from apportion.planner.options import parameters
    from apportion.planner.recipe.registry import find_pass

    passes = {step.step: step.name for step in recipe if step.name not in ("on", "off")}
    return {
        step: {
            parameter.name: {"default": parameter.default, "takes": parameter.takes}
            for parameter in parameters(find_pass(step, setting))
        }
        for step, setting in passes.items()
    }


solvers = typer.Typer(name="solvers")


@solvers.callback(invoke_without_command=True)
def list_all(context: typer.Context, as_json: options.AsJson = False) -> None:
    """List the solvers with problem, method, steps, origin, and whether they are installed.

    A pass takes a solver as its parameter `solver`, by name or with limits: in a
    recipe file `place: {lpt: {solver: ilp}}`, or
    `place: {lpt: {solver: {ilp: {steps: 500, gap: 0.01}}}}`.

    [bold]Examples[/bold]

      apportion solvers --json

      apportion solvers compare
    """
    if context.invoked_subcommand is not None:
        if as_json:
            raise typer.BadParameter("write it after compare", param_hint="--json")
        return
    from apportion.cli.printed import recipes as printed
    from apportion.planner.recipe.registry import users_of
    from apportion.planner.solvers.registry import list_solvers

    rows = [_solver(entry) | {"steps": users_of(entry.kind)} for entry in list_solvers()]
    emit({"solvers": rows}, as_json, lambda: printed.solvers_table(rows))


def _solver(entry: registry.Entry) -> dict[str, Any]:
    package, extra = entry.needs or (None, None)
    facts = {"name": entry.name, "kind": entry.kind, "summary": entry.summary, "source": entry.source}
    limits = {"heuristic": entry.heuristic, "limits": asdict(entry.budget)}
    return {**facts, **limits, "package": package, "extra": extra, "installed": entry.installed}


@solvers.command()
def compare(
    problem: Annotated[str | None, Option(help="Only solvers for this problem.")] = None,
    count: Annotated[int, Option(help="Small instances of each problem.", min=1)] = 50,
    as_json: options.AsJson = False,
) -> None:
    """Compare the solvers with the optimum, on problems small enough to enumerate all answers.

    [bold]Examples[/bold]

      apportion solvers compare

      apportion solvers compare --problem partition --count 200 --json
    """
    from apportion.cli.printed import recipes as printed
    from apportion.cli.solver_comparison import compare as compare_solvers
    from apportion.ir.fields import choice
    from apportion.planner.solvers.contracts import KINDS
    from apportion.planner.solvers.registry import list_solvers

    if problem is not None:
        choice("--problem", problem, KINDS)
    selected = [entry for entry in list_solvers() if problem in (None, entry.kind)]
    installed = [entry for entry in selected if entry.installed]
    with progress("solving", count * len(installed)) as step:
        rows = compare_solvers(installed, count, step)
    missing = [f"{entry.kind} {entry.name}" for entry in selected if not entry.installed]
    if missing:
        note(f"not installed: {', '.join(missing)}: pip install '.[solvers]'")
    emit({"solvers": rows, "not_installed": missing}, as_json, lambda: printed.solver_comparison_table(rows))

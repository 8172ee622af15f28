"""Values of options: model, hardware, mask, recipe, lists of integers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apportion.cli.output import note
from apportion.ir.errors import ConfigError, MissingDependencyError

if TYPE_CHECKING:
    from apportion.ir.bytes.codec import Plan
    from apportion.ir.request.cluster import Cluster
    from apportion.ir.request.hardware import Hardware
    from apportion.ir.request.model import Model
    from apportion.ir.request.policy import Recipe
    from apportion.ir.request.sampling import MaskSpec


def refuse(options: Mapping[str, Any], rule: str, remedy: str) -> None:
    """Raise ConfigError for the first of these options that is given (not None): none of them is allowed here."""
    for option, value in options.items():
        if value is not None:
            raise ConfigError(option, str(value), rule, f"{remedy} {option}")


def need(package: str, extra: str, purpose: str) -> None:
    """Raise MissingDependencyError if a package is not installed."""
    from importlib.util import find_spec

    if find_spec(package) is None:
        raise MissingDependencyError(package, extra, purpose)


def hardware_of(name: str | None) -> Hardware | None:
    """The hardware with this name or from this file; None if there is no name."""
    if name is None:
        return None
    from apportion.ir.request.hardware import Hardware

    return Hardware.load(name)


def hardware_for(name: str | None, plan: Plan) -> Hardware | None:
    """Like `hardware_of`; warns on stderr if its links or its kernels' dtype do not match the plan."""
    hardware, request = hardware_of(name), plan.request
    warn_of_mismatch(hardware, request.cluster)
    warn_of_dtype(hardware, request.model)
    return hardware


def warn_of_mismatch(hardware: Hardware | None, cluster: Cluster) -> None:
    """Warn on stderr if the hardware's links differ from the cluster's."""
    for difference in [] if hardware is None else hardware.mismatch(cluster):
        note(f"warning: {difference}")


def warn_of_dtype(hardware: Hardware | None, model: Model) -> None:
    """Warn on stderr if the model's dtype differs in width from the kernels' dtype (hardware None: `h100`'s)."""
    from apportion.ir.request.hardware import Hardware
    from apportion.ir.request.model import ELEMENT_BYTES

    used = hardware or Hardware.load("h100")
    if ELEMENT_BYTES[used.dtype] != model.element_bytes:
        mismatch_text = f"model.dtype is {model.dtype}, but hardware {used.name} has {used.dtype}"
        note(f"warning: {mismatch_text}: times are for {used.dtype} kernels, bytes for {model.dtype} numbers")


def model_of(file: Path | None) -> Model:
    from apportion.ir.request.model import Model

    return Model() if file is None else Model.load(file)


def config_of(file: Path | None) -> Mapping[str, Any] | None:
    """The data of a Hugging Face `config.json`; None if the model file has another format. Raises ConfigError."""
    from apportion.ir import fields
    from apportion.ir.request.hf_fields import is_config

    data = None if file is None else fields.load(file)
    return data if is_config(data) else None


def token_of(file: Path | None) -> str | None:
    """The token from a file, else from the environment; None if there is none."""
    import os

    from apportion.ir.fields import read_text

    return os.environ.get("APPORTION_TOKEN") if file is None else read_text(file).strip()


def masks_of(text: str | None) -> MaskSpec | None:
    """Parse a mask: a name, YAML as in batch files, or {kind: mask} in YAML; None if there is no text.
    Raises ConfigError."""
    import yaml

    from apportion.ir.masks import specs as masks

    if text is None:
        return None
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError:
        remedy = "write a name or '{sliding_window: {window: 1024}}'"
        raise ConfigError("--mask", text, "is not YAML", remedy) from None
    if isinstance(data, Mapping) and data and all(map(masks.is_data, data.values())):
        return {kind: masks.from_data(spec, f"--mask.{kind}") for kind, spec in data.items()}
    return masks.from_data({data: {}} if isinstance(data, str) else data, "--mask")


def recipes_of(text: str, option: str = "--recipes") -> list[Recipe]:
    """The recipes of a comma-separated list of names and files, each once; `all` for all recipes."""
    from apportion.planner.recipe.recipes import entries

    names = list(entries()) if text == "all" else [name.strip() for name in text.split(",")]
    parsed = list(dict.fromkeys(recipe_of(name) for name in names))
    recipe_names = [recipe.name for recipe in parsed]
    for duplicate in (name for name in recipe_names if recipe_names.count(name) > 1):
        raise ConfigError(option, duplicate, "two of the recipes have this name", "rename one in its file")
    return parsed


def recipe_of(name: str, block: str | None = None, pods: str | None = None) -> Recipe:
    """The recipe with this name or from this file, with the block size and the pods if they are given."""
    from apportion.ir import fields
    from apportion.planner.recipe import recipes

    is_file = Path(name).suffix in (".yaml", ".yml", ".json")
    recipe = recipes.find_recipe(fields.load(name) if is_file else name)
    if block is not None:
        recipe = recipes.with_block(recipe, _number_or_auto("--block", block, 2048))
    return recipe if pods is None else recipes.with_pods(recipe, _number_or_auto("--pods", pods, 1024))


def is_search(recipe: Recipe) -> bool:
    """True if the recipe searches for the best of several."""
    return recipe.step("search") is not None


def _number_or_auto(option: str, text: str, example: int) -> int | str:
    if text == "auto":
        return text
    if not (text.isascii() and text.isdigit() and 0 < len(text.lstrip("0")) < 10):
        remedy = f"write {option} {example} or {option} auto"
        raise ConfigError(option, text, "must be one positive whole number, or auto", remedy)
    return int(text)


def integers(option: str, text: str, low: int, high: int) -> list[int]:
    """The integers in [low, high] of a comma-separated list."""
    from apportion.ir.fields import integer

    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        rule = "must be whole numbers, separated by commas"
        raise ConfigError(option, text, rule, f"write {option} 8,64") from None
    return [integer(option, number, low, high) for number in numbers]

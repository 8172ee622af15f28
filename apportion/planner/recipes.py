"""Named strategies as data, and the passes that their steps may name.

    recipe = [pack] · [inner] · shard · place · [route] · schedule · [reshuffle] · [remap]
           | [pack] · search, which finds the other steps

Third parties add passes and recipes through the entry points `apportion.passes` ("step.pass" = a pass class) and
`apportion.recipes` (a name = a `Recipe` or an `Entry`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint
from typing import Any

from apportion.ir.errors import ConfigError, UnknownNameError
from apportion.ir.policy import Recipe, Step
from apportion.planner import plugins
from apportion.planner.passes.groups import Ulysses
from apportion.planner.passes.route import Route, Star

#: step -> pass name -> where its class is; the fields of the class are the pass's parameters
_PASSES = {
    "pack": {"sequential": "pack:Sequential", "balanced": "pack:Balanced", "wlb": "pack:Wlb"},
    "inner": {"ulysses": "groups:Ulysses", "upipe": "upipe:UPipe"},
    "shard": {"blocks": "shard:Blocks", "sequences": "sequences:Sequences"},
    "place": {
        "lpt": "place:Lpt",
        "zigzag": "zigzag:ZigZag",
        "contiguous": "contiguous:Contiguous",
        "whole": "whole:Whole",
        "hybrid_dp": "hybrid:HybridDp",
        "megatron_hybrid": "hybrid:MegatronHybrid",
        "wlb": "wlb:Wlb",
        "flexsp": "flexsp:FlexSp",
        "zeppelin": "zeppelin.placement:Zeppelin",
        "distca": "distca.placement:Distca",
        "dcp": "dcp.placement:Dcp",
        "blend": "blend.placement:Blend",
    },
    "route": {"star": "route:Star", "node": "route:Node", "tree": "route:Tree", "ring": "route:Ring"},
    "schedule": {
        "matchings": "schedule:Matchings",
        "ring": "schedule:Ring",
        "gather": "schedule:Gather",
        "queues": "queues:Queues",
        "divisions": "divisions:Divisions",
    },
    "remap": {"flow": "remap:Flow"},
    "search": {"portfolio": "search:Portfolio"},
}
_REQUIRED = ("shard", "place", "schedule")
_SWITCHES = ("reshuffle",)


@dataclass(frozen=True)
class Entry:
    """A recipe with what people want to know of it: in short, where it comes from, and what it needs ("": nothing)."""

    recipe: Recipe
    summary: str
    paper: str
    section: str = ""
    needs: str = ""

    @property
    def name(self) -> str:
        return self.recipe.name


def _entry(name: str, summary: str, paper: str, section: str = "", needs: str = "", **steps: Any) -> Entry:
    return Entry(Recipe(name, steps), summary, paper, section, needs)


_GROUPS = "query heads that the degree divides"

#: by default the attention layout is the loader's own: `reshuffle: true` moves rows inside the program
_ENTRIES = (
    _entry(
        "fcp",
        "fixed blocks, longest processing time first under a token cap, congestion-free rounds",
        "FCP",
        "3, 4",
        shard={"blocks": {"block": "auto", "zigzag": True}},
        place={"lpt": {}},
        schedule={"matchings": {"coalesce": "auto", "buffers": 3}},
        reshuffle=False,
    ),
    _entry(
        "ring",
        "every sequence cut zig-zag over all ranks, KV passed around the ring",
        "Ring Attention (Liu et al., 2023); zig-zag as in TransformerEngine",
        shard={"sequences": {}},
        place={"zigzag": {"over": "sequence"}},
        schedule={"ring": {"over": "ranks"}},
    ),
    _entry(
        "allgather",
        "every sequence cut zig-zag over all ranks, KV gathered at once",
        "Llama 3 (2024)",
        "3.3.2",
        shard={"sequences": {}},
        place={"zigzag": {"over": "sequence"}},
        route={"node": {}},
        schedule={"gather": {"whole": True}},
    ),
    _entry(
        "ulysses",
        "whole sequences in groups of ranks that split heads, all-to-all in and out",
        "DeepSpeed-Ulysses (Jacobs et al., 2023)",
        "3",
        _GROUPS,
        inner={"ulysses": {"degree": "auto"}},
        shard={"sequences": {}},
        place={"whole": {}},
        schedule={"gather": {}},
    ),
    _entry(
        "usp",
        "a ring over nodes, heads split inside a node",
        "USP (Fang and Zhao, 2024)",
        "3",
        _GROUPS,
        inner={"ulysses": {"degree": "node"}},
        shard={"sequences": {}},
        place={"zigzag": {"over": "sequence"}},
        schedule={"ring": {"over": "ranks"}},
    ),
    _entry(
        "hybrid_dp",
        "as many ranks for a sequence as its length asks for, a ring in each group",
        "ByteScale (Ge et al., 2025); Zeppelin's baseline Hybrid DP",
        "Zeppelin 5",
        shard={"sequences": {}},
        place={"hybrid_dp": {}},
        schedule={"ring": {"over": "holders"}},
    ),
    _entry(
        "megatron_hybrid",
        "a power of two of ranks for each sequence, groups of one size after another",
        "Megatron-Core, hybrid context parallelism",
        shard={"sequences": {}},
        place={"megatron_hybrid": {}},
        schedule={"ring": {"over": "holders", "turns": True}},
    ),
    _entry(
        "wlb",
        "cut per sequence or per document, whichever is predicted faster; variable-length packing of microbatches",
        "WLB-LLM (Wang et al., 2025)",
        "as described in DistCA 3.2 and 7",
        pack={"wlb": {}},
        shard={"sequences": {}},
        place={"wlb": {"shard": "auto"}},
        route={"node": {}},
        schedule={"gather": {"whole": True}},
    ),
    _entry(
        "flexsp",
        "groups of unequal size, each with a share of the sequences, heads split inside a group",
        "FlexSP (Wang et al., 2025)",
        "4",
        f"{_GROUPS}; pip install 'apportion[solvers]'",
        shard={"sequences": {}},
        place={"flexsp": {}},
        schedule={"gather": {}},
    ),
    _entry(
        "distca",
        "equal tokens in order, attention sent to other ranks where that costs the fewest bytes a pair",
        "DistCA",
        "4, A, B; tasks take parts of their rows' keys: 8",
        shard={"sequences": {}},
        place={"distca": {"kv_ranges": True}},
        route={"node": {}},
        schedule={"gather": {"local": "first"}},
    ),
    _entry(
        "distca_paper",
        "DistCA as printed: tasks with all keys of their rows, one-sided tolerance, keys charged even where they are",
        "DistCA",
        "4, A, B",
        shard={"sequences": {}},
        place={"distca": {"form": "paper", "two_sided": False, "kv_free": False}},
        schedule={"gather": {"local": "first"}},
    ),
    _entry(
        "dcp",
        "blocks and their computation placed by hypergraph partitioning, nodes before ranks, in divisions that overlap",
        "DCP",
        "4, 5",
        "solver mtkahypar needs pip install 'apportion[solvers]'",
        shard={"blocks": {"block": 1024, "zigzag": False}},
        place={"dcp": {"solver": "greedy", "divisions": 4}},
        schedule={"divisions": {"count": 4}},
    ),
    _entry(
        "upipe",
        "heads of a group in stages of as many as ranks, projected stage by stage into rows that are used again",
        "UPipe",
        "3.3, 4.1",
        _GROUPS,
        inner={"upipe": {"degree": "auto", "heads": "auto", "project": True}},
        shard={"sequences": {}},
        place={"whole": {}},
        schedule={"gather": {}},
    ),
    _entry(
        "upipe_ring",
        "upipe inside a node, a ring of KV across nodes",
        "UPipe",
        "5.2.1",
        _GROUPS,
        inner={"upipe": {"degree": "node", "project": True}},
        shard={"sequences": {}},
        place={"zigzag": {"over": "sequence"}},
        schedule={"ring": {"over": "ranks"}},
    ),
    _entry(
        "zeppelin",
        "sequences by zones: whole on a rank, rings inside a node, rings over nodes; tokens evened for linear layers",
        "Zeppelin",
        "3",
        shard={"sequences": {}},
        place={"zeppelin": {}},
        schedule={"queues": {}},
        remap={"flow": {}},
    ),
    _entry(
        "blend",
        "the densest and the sparsest documents mixed on each rank: equal tokens and equal work at once",
        "ours",
        shard={"sequences": {}},
        place={"blend": {}},
        schedule={"matchings": {"coalesce": "auto", "buffers": 4}},
    ),
    _entry(
        "contiguous",
        "no planning: the token axis in equal shares, the KV that is missing gathered",
        "the floor to compare with",
        shard={"sequences": {}},
        place={"contiguous": {}},
        schedule={"gather": {}},
    ),
    _entry(
        "auto",
        "several recipes and variations of the best, compared by the simulator",
        "ours",
        search={"portfolio": {}},
    ),
)

_BUILT_IN: Mapping[str, Entry] = {entry.name: entry for entry in _ENTRIES}


@dataclass(frozen=True)
class Pipeline:
    """The passes of a recipe, ready to run. pack: None where the recipe does not say how to. search: finds the other
    passes itself, which then are None."""

    pack: Any
    inner: Ulysses | None
    shard: Any
    place: Any
    route: Route
    schedule: Any
    reshuffle: bool
    remap: Any = None
    search: Any = None


def entries() -> dict[str, Entry]:
    """All recipes by name: the built-in ones in their order, then those of plug-ins. Raises ConfigError for a broken
    plug-in."""
    return {**_BUILT_IN, **_plugged_recipes()}


@cache
def _plugged_recipes() -> Mapping[str, Entry]:
    added = {}
    for name, point in plugins.found("apportion.recipes").items():
        held = plugins.load(point, (Entry, Recipe))
        entry = held if isinstance(held, Entry) else Entry(held, "", plugins.distribution(point))
        if entry.name in _BUILT_IN or entry.name != name:
            raise _misnamed(
                point, f"brings a recipe {entry.name!r}", "give it a name that is free, and the same here"
            )
        added[name] = entry
    return added


@cache
def _plugged_passes() -> Mapping[str, Mapping[str, EntryPoint]]:
    added: dict[str, dict[str, EntryPoint]] = {step: {} for step in _PASSES}
    for name, point in plugins.found("apportion.passes").items():
        step, _, short = name.partition(".")
        if step not in _PASSES or not short or short in _PASSES[step]:
            raise _misnamed(point, f"brings {name!r}, which is not step.pass or is taken", "name it anew")
        added[step][short] = point
    return added


def _misnamed(point: EntryPoint, rule: str, remedy: str) -> ConfigError:
    return ConfigError(
        f"entry point {point.group}", point.name, f"{plugins.distribution(point)} {rule}", remedy
    )


def passes(step: str) -> list[str]:
    """Names of the passes of a step."""
    return [*_PASSES[step], *_plugged_passes()[step]]


def find_pass(step: str, name: str) -> type[Any]:
    """The class of a pass. Raises UnknownNameError, ConfigError."""
    if name in _PASSES[step]:
        module, _, held = _PASSES[step][name].partition(":")
        found: type[Any] = getattr(import_module(f"apportion.planner.passes.{module}"), held)
        return found
    plugged = _plugged_passes()[step]
    if name not in plugged:
        raise UnknownNameError(
            f"recipe.steps.{step}", name, f"the passes are {', '.join(passes(step))}", "name one of these"
        )
    added: type[Any] = plugins.load(plugged[name], type)
    if not is_dataclass(added):
        raise _misnamed(plugged[name], f"brings {added.__name__}, which is no dataclass", "make it one")
    return added


def find_recipe(recipe: str | Mapping[str, Any] | Recipe) -> Recipe:
    """The recipe of that name, or the one given as data. Raises UnknownNameError, ConfigError."""
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, Mapping):
        return Recipe.from_data(recipe)
    if not isinstance(recipe, str):
        rule = "must be a name, a Recipe or its data"
        raise ConfigError("recipe", recipe, rule, "use fcp")
    known = _BUILT_IN if recipe in _BUILT_IN else entries()
    if recipe not in known:
        raise UnknownNameError(
            "recipe", recipe, f"there is {', '.join(known)}", "name one of these, or give a Recipe"
        )
    return known[recipe].recipe


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
    known = (*_PASSES, *_SWITCHES)
    for step in recipe:
        if step.step not in known:
            raise UnknownNameError(
                f"recipe.steps.{step.step}", step.name, f"the steps are {', '.join(known)}", "leave it out"
            )
    if recipe.step("search") is not None:
        _check_search(recipe)
    built = {step: _build(recipe, step) for step in _PASSES}
    built["route"] = _route(recipe, built["route"], built["schedule"])
    return Pipeline(**built, reshuffle=_switched(recipe, "reshuffle"))


def is_deterministic(recipe: Recipe) -> bool:
    """Whether equal requests give equal plans on every machine: not where a wall clock ends a search. Raises as
    `pipeline` does."""
    built = pipeline(recipe)
    return all(getattr(getattr(built, field.name), "deterministic", True) for field in fields(built))


def _check_search(recipe: Recipe) -> None:
    for step in recipe:
        if step.step not in ("pack", "search"):
            rule = "cannot stand beside a search, which chooses it itself"
            raise ConfigError(
                f"recipe.steps.{step.step}", step.name, rule, "put it into a recipe among the candidates"
            )


def _route(recipe: Recipe, given: Route | None, schedule: Any) -> Route:
    """Some schedules are routes themselves; else tiles go straight to where they are needed."""
    own: Route | None = getattr(schedule, "route", None)
    if own is not None and given is not None:
        rule = "the schedule has a route of its own"
        raise ConfigError("recipe.steps.route", type(given).__name__.lower(), rule, "leave the route out")
    return own or given or Star()


def _build(recipe: Recipe, step_name: str) -> Any:
    step, where = recipe.step(step_name), f"recipe.steps.{step_name}"
    if step is None:
        if step_name not in _REQUIRED or recipe.step("search") is not None:
            return None
        rule = f"has no step {step_name}"
        raise ConfigError("recipe.steps", recipe.name, rule, f"add one of {', '.join(passes(step_name))}")
    found = find_pass(step_name, step.name)
    names = [field.name for field in fields(found)]
    for parameter in step.params:
        if parameter not in names:
            rule = f"has the parameters {', '.join(names)}" if names else "has no parameters"
            raise ConfigError(f"{where}.{step.name}", parameter, rule, "leave it out or correct it")
    return found(**step.params)


def parameters(step: str, name: str) -> Iterator[tuple[str, Any]]:
    """The parameters of a pass and their defaults."""
    for field in fields(find_pass(step, name)):
        yield field.name, field.default


def _switched(recipe: Recipe, step_name: str) -> bool:
    step = recipe.step(step_name)
    if step is None:
        return False
    if step.name not in ("on", "off") or step.params:
        raise ConfigError(f"recipe.steps.{step_name}", step.name, "is a switch", "write true or false")
    return step.name == "on"

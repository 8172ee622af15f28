"""docs/reference/recipes.md has every recipe, every parameter with its default, and current pictures."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from apportion.planner import options
from apportion.planner.recipe import built_in, recipes, registry
from apportion.planner.solvers.contracts import KINDS
from apportion.planner.solvers.registry import SOLVERS
from benchmarks import pictures

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/reference/recipes.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
ROWS = re.findall(r"^\| (\w+ \w+) \| `(\w+)` \| `([^|]+)` \| \S", PAGE, re.MULTILINE)
BUILT_IN = [name for name, entry in built_in.BUILT_IN.items() if entry is recipes.entries()[name]]


def default_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def test_every_parameter_is_listed_once_with_its_default() -> None:
    expected = Counter(
        (f"{step} {name}", one.name, default_text(one.default))
        for step, names in registry._BUILT_IN.items()
        for name in names
        for one in options.parameters(registry.find_pass(step, name))
    )
    listed_rows = Counter(ROWS)
    assert {"missing or changed": expected - listed_rows, "gone or twice": listed_rows - expected} == {
        "missing or changed": Counter(),
        "gone or twice": Counter(),
    }


def test_the_design_lists_every_pass_and_solver() -> None:
    design = (ROOT / "docs/design.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\w+) \| [^|]+ \| ([\w, ()`]+) \|", design, re.MULTILINE)
    listed = {name: re.sub(r" \(.*?\)", "", names).split(", ") for name, names in rows}
    for step, passes in registry._BUILT_IN.items():
        assert sorted(listed[step]) == sorted(passes)
    for kind in KINDS:
        assert sorted(listed[kind]) == sorted(name for of, name in SOLVERS if of == kind)


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_recipe_has_a_section_with_its_summary(name: str) -> None:
    section = SECTIONS[name]
    assert pictures.facts(name) in section, "run python benchmarks/pictures.py"
    assert f"[{name}](#{name})" in PAGE


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_picture_is_small_and_shows_its_recipe(name: str) -> None:
    data = (ROOT / f"docs/pictures/{name}.svg").read_bytes()
    assert len(data) <= pictures.MOST_BYTES
    title = ElementTree.fromstring(data).findtext("{http://www.w3.org/2000/svg}title")
    assert re.fullmatch(rf"{name}( \(\S+\))?: forward of kind default on 8 ranks", str(title))


def test_no_picture_is_unused() -> None:
    assert {path.stem for path in (ROOT / "docs/pictures").iterdir()} == set(BUILT_IN)


def test_drawing_a_picture_again_changes_nothing() -> None:
    assert pictures.picture("contiguous") == (ROOT / "docs/pictures/contiguous.svg").read_text(
        encoding="utf-8"
    )

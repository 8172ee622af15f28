"""Modules: no import cycles, even by imports in functions; at most two classes share a name; modules that docstrings
and documents name in backticks exist, as files or dotted names such as `ir.isa`."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "apportion"
FOLDERS = ("apportion", "benchmarks", "docs", "examples", "tests")
SOURCES = {
    path.relative_to(ROOT).as_posix(): path
    for name in FOLDERS
    for path in (ROOT / name).rglob("*.py*")
    if path.suffix in (".py", ".pyi")
}
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "apportion/schemas").rglob("*.md")]
FILE = re.compile(r"`([\w./-]+\.py)`")
DOTTED = re.compile(r"`(\w+(?:\.\w+)+)(?:\(.*?\))?`")
#: folders of the package, which begin dotted module names, except folders whose names are also used for variables
FIRST = {path.parent.name for path in (ROOT / "apportion").rglob("__init__.py")}
FIRST -= {"bytes", "inner", "iteration", "masks", "plan", "request", "torch"}
#: not modules of this package: another project's, and names of formats and entry points
OTHERS = {"coverage.py", "apportion.plan", "apportion.slice", "apportion.request", "apportion.iteration"}
OTHERS |= {"apportion.iteration.slice", "apportion.passes", "apportion.solvers", "apportion.recipes"}


EXEMPT = {"Config"}  # TorchTitan requires nested classes of this name
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}


class Source(NamedTuple):
    """What the tests need of a file; its syntax tree, kept, would slow every later test of the process."""

    imports: set[str]
    classes: list[str]
    docstrings: list[str]


@cache
def source(path: Path) -> Source:
    found = Source(set(), [], [])
    holders = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, holders) and (text := ast.get_docstring(node)):
            found.docstrings.append(text)
        if isinstance(node, ast.ClassDef):
            found.classes.append(node.name)
        elif isinstance(node, ast.ImportFrom):  # from x import y: y if it is a module, else x
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            found.imports.update(one if one in MODULES else str(node.module) for one in names)
        elif isinstance(node, ast.Import):
            found.imports.update(alias.name for alias in node.names)
    return found


def test_no_modules_import_each_other() -> None:
    graph = {name: source(path).imports & MODULES.keys() - {name} for name, path in MODULES.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(" <- ".join(error.args[1])) from None


def test_no_three_classes_share_a_name() -> None:
    places = defaultdict(list)
    for path in MODULES.values():
        for name in source(path).classes:
            places[name.lstrip("_")].append(str(path))
    assert not {name: paths for name, paths in places.items() if len(paths) > 2 and name not in EXEMPT}


@cache
def texts() -> list[tuple[Path, str]]:
    return list(_texts())


def _texts() -> Iterator[tuple[Path, str]]:
    yield from ((path, path.read_text(encoding="utf-8")) for path in DOCUMENTS)
    yield from ((path, text) for path in SOURCES.values() for text in source(path).docstrings)


def names_matching(pattern: re.Pattern[str]) -> set[tuple[str, str]]:
    """(path, name) of all names that match a pattern."""
    return {
        (path.relative_to(ROOT).as_posix(), name)
        for path, text in texts()
        for name in pattern.findall(text)
        if name not in OTHERS
    }


def module_exists(name: str) -> bool:
    """Whether a module has this name, or one named by a prefix mentions each remaining part."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        whole = "/".join(parts[:length])
        ends = (f"/{whole}.py", f"/{whole}/__init__.py", f"/{whole}/__init__.pyi")
        found = [path for place, path in SOURCES.items() if f"/{place}".endswith(ends)]
        if found:
            texts = [path.read_text(encoding="utf-8") for path in found]
            return all(any(re.search(rf"\b{part}\b", text) for text in texts) for part in parts[length:])
    return False


def test_named_files_exist() -> None:
    places = [f"/{place}" for place in SOURCES]
    missing = {
        (at, name)
        for at, name in names_matching(FILE)
        if not any(place.endswith(f"/{name}") for place in places)
    }
    assert missing == set()


def test_named_modules_exist() -> None:
    dotted = {(at, name) for at, name in names_matching(DOTTED) if name.split(".")[0] in FIRST}
    assert {
        (at, name) for at, name in dotted if not name.endswith(".py") and not module_exists(name)
    } == set()

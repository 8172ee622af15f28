"""No import cycles among modules; imports in functions and for annotations count too."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "apportion"
FILES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}


def imported(name: str) -> Iterator[str]:
    """The modules of the package that a module imports; a package's own `__init__`, which comes first, is left out."""
    for node in ast.walk(ast.parse(FILES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            whole = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (one if one in FILES else str(node.module) for one in whole)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_no_modules_import_each_other() -> None:
    graph = {name: {other for other in imported(name) if other in FILES and other != name} for name in FILES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(" <- ".join(error.args[1])) from None

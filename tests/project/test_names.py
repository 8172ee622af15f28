"""A class name has at most two meanings, so that readers need not look up which class is meant."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "apportion"
THEIRS = {"Config"}  # TorchTitan looks for a class of that name within others


def test_no_class_name_has_three_meanings() -> None:
    found = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found[node.name.lstrip("_")].append(str(path.relative_to(PACKAGE)))
    many = {name: places for name, places in found.items() if len(places) > 2 and name not in THEIRS}
    assert not many

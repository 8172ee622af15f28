"""At most two classes share a name, so that readers need not look up which class is meant."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "apportion"
EXEMPT = {"Config"}  # TorchTitan requires nested classes of this name


def test_no_three_classes_share_a_name() -> None:
    places_by_name = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places_by_name[node.name.lstrip("_")].append(str(path.relative_to(PACKAGE)))
    repeated = {
        name: places for name, places in places_by_name.items() if len(places) > 2 and name not in EXEMPT
    }
    assert not repeated

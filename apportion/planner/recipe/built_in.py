"""The built-in recipes by name, with one-line descriptions: `recipes.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from apportion.ir.request.policy import Recipe


@dataclass(frozen=True)
class RecipeEntry:
    """A recipe with its description: summary, source, and requirements ("": none)."""

    recipe: Recipe
    summary: str
    paper: str
    section: str = ""
    needs: str = ""

    @property
    def name(self) -> str:
        return self.recipe.name


def _entry(name: str, steps: Mapping[str, Any], **facts: str) -> RecipeEntry:
    return RecipeEntry(Recipe(name, steps), **facts)


_FILE = tomllib.loads(Path(__file__).with_name("recipes.toml").read_text(encoding="utf-8"))
BUILT_IN: Mapping[str, RecipeEntry] = {name: _entry(name, **entry) for name, entry in _FILE.items()}

"""Draws the pictures of docs/reference/recipes.md: each recipe's plan of one small batch, as by `apportion show --svg`.

Run: python benchmarks/pictures.py (seconds). Writes docs/pictures/RECIPE.svg for every recipe with markers in the page;
between the markers, it writes the picture, the recipe's source, its steps and its requirements.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from apportion.cli.pictures.draw import draw
from apportion.ir.request.batch import Batch
from apportion.ir.request.cluster import Cluster
from apportion.ir.request.hardware import Hardware
from apportion.ir.request.model import Model
from apportion.ir.request.policy import Recipe
from apportion.planner.api import plan
from apportion.planner.recipe.recipes import entries, find_recipe

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs/pictures"
PAGE = ROOT / "docs/reference/recipes.md"
MARKED = re.compile(r"<!-- recipe: (\w+) -->\n(.*?)<!-- end -->", re.DOTALL)

#: long, medium and short documents, 8K tokens per rank, in a loader's order
LENGTHS = (3000, 24000, 900, 12000, 1600, 7000, 5000, 4000, 2800, 2200, 1300, 1736)
CLUSTER = Cluster(nodes=2, ranks_per_node=4)
MODEL = Model(q_heads=32, kv_heads=8, head_dim=128, dtype="bf16", layers=32)
MOST_BYTES = 60_000


def picture(name: str) -> str:
    """The SVG of a recipe."""
    recipe: Recipe = find_recipe(name)
    batch = Batch.from_lengths(LENGTHS)
    return draw(plan(batch, CLUSTER, MODEL, recipe, seed=0), hardware=Hardware.load("h100"))


def facts(name: str) -> str:
    """The text between the markers of a recipe."""
    entry = entries()[name]
    section = (
        f", section {entry.section}"
        if entry.section[:1].isdigit()
        else entry.section and f", {entry.section}"
    )
    sentences = [f"From: {entry.paper}{section}.", f"Steps: {steps(entry.recipe)}."]
    sentences += [f"Needs: {entry.needs}."] if entry.needs else []
    return f"![{entry.summary}](../pictures/{name}.svg)\n\n" + "\n".join(sentences) + "\n"


def steps(recipe: Recipe) -> str:
    """The steps of a recipe, on one line."""
    return ", ".join(f"`{one.step} {one.name}{_caption(one.params)}`" for one in recipe if one.name != "off")


def _caption(params: Any) -> str:
    texts = (
        f"{key}: {value if isinstance(value, str) else json.dumps(value)}" for key, value in params.items()
    )
    return f" {{{', '.join(texts)}}}" if params else ""


def main() -> None:
    """Draws all pictures and writes the page."""
    FOLDER.mkdir(exist_ok=True)
    page = PAGE.read_text(encoding="utf-8")
    for name, _ in MARKED.findall(page):
        path, data = FOLDER / f"{name}.svg", picture(name).encode()
        if len(data) > MOST_BYTES:
            raise SystemExit(f"{path} would have {len(data)} bytes, more than {MOST_BYTES}")
        path.write_bytes(data)
        print(f"{path.relative_to(ROOT)}: {len(data):,} bytes")
    text = MARKED.sub(lambda match: f"<!-- recipe: {match[1]} -->\n{facts(match[1])}<!-- end -->", page)
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

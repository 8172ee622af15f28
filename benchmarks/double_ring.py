"""Rings of one and of two levels: the table of docs/recipes.md, in the section of `loongtrain`.

Run: python benchmarks/double_ring.py (half a minute). 64 H100s in nodes of eight, the README's model; every plan is
verified.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from apportion.ir.request.batch import Batch
from apportion.ir.request.cluster import Cluster
from apportion.ir.request.hardware import Hardware
from apportion.ir.request.policy import Recipe
from apportion.planner.api import plan
from apportion.planner.recipe.recipes import find_recipe
from apportion.planner.simulate import simulate
from benchmarks.comparison import LLAMA_8B, lognormal, one_document

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/recipes.md"
BEGIN, END = "<!-- double rings -->\n", "<!-- end of double rings -->"
NODES, PER_NODE = 8, 8
#: as the table says it -> how the batch is drawn, and tokens of a rank
BATCHES = {
    "one document, 2M": (one_document, 32768),
    "one document, 128K": (one_document, 2048),
    "log-normal documents, 2M": (lognormal, 32768),
}


def changed(name: str, **parameters: Any) -> Recipe:
    """A recipe with other parameters: `degree` of its inner step, `window` of its ring."""
    steps: dict[str, Mapping[str, Any]] = find_recipe(name).to_data()["steps"]
    if "degree" in parameters:
        steps["inner"] = {"ulysses": {"degree": parameters["degree"]}}
    if "window" in parameters:
        steps["schedule"] = {"ring": {"over": "ranks", "window": parameters["window"]}}
    return Recipe(name, steps)


#: as the table says it -> the recipe
RECIPES = {
    "`ring`": find_recipe("ring"),
    "`ring`, `window: node`": changed("ring", window="node"),
    "`ring`, `window: 16`": changed("ring", window=16),
    "`usp`, `degree: 2`": changed("usp", degree=2),
    "`loongtrain`, `degree: 2`": changed("loongtrain", degree=2),
    "`usp`, `degree: 4`": changed("usp", degree=4),
    "`loongtrain` (`degree` 4)": find_recipe("loongtrain"),
    "`usp` (`degree` 8)": find_recipe("usp"),
}


def rows() -> Iterator[str]:
    """The lines of the table."""
    yield f"| | {' | '.join(f'{name}: forward | backward | between nodes' for name in BATCHES)} |"
    yield "|---|" + "--:|" * 3 * len(BATCHES)
    cluster, hardware = Cluster(NODES, PER_NODE), Hardware.load("h100")
    batches: list[Batch] = [draw(cluster.ranks * tokens, 0) for draw, tokens in BATCHES.values()]
    for told, recipe in RECIPES.items():
        cells = []
        for batch in batches:
            made = plan(batch, cluster, LLAMA_8B, recipe, seed=0)
            found = simulate(made, hardware)
            crossing = made.report["bytes"]["inter_node"] / 1e9
            cells += [f"{found.forward_ms:.1f}", f"{found.backward_ms:.1f}", f"{crossing:.0f} GB"]
        yield f"| {told} | {' | '.join(cells)} |"


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    behind = rest.split(END)[1]
    table = "\n".join(rows())
    PAGE.write_text(f"{before}{BEGIN}{table}\n{END}{behind}", encoding="utf-8")
    print(table)


if __name__ == "__main__":
    main()

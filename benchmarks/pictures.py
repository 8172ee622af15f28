"""The pictures of docs/recipes.md: each recipe plans one small batch, and `apportion show --svg` draws the plan.

Run: python benchmarks/pictures.py (seconds). Writes docs/pictures/RECIPE.svg; equal programs give equal files.
"""

from __future__ import annotations

from pathlib import Path

from apportion.cli.pictures import draw
from apportion.ir.batch import Batch
from apportion.ir.cluster import Cluster
from apportion.ir.hardware import Hardware
from apportion.ir.model import Model
from apportion.ir.policy import Recipe
from apportion.planner.api import plan
from apportion.planner.recipes import entries, find_recipe

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs/pictures"
PAGE = (ROOT / "docs/recipes.md").read_text(encoding="utf-8")

#: long, middling and short documents, 8K tokens a rank, in the order in which a loader might bring them
LENGTHS = (3000, 24000, 900, 12000, 1600, 7000, 5000, 4000, 2800, 2200, 1300, 1736)
CLUSTER = Cluster(nodes=2, ranks_per_node=4)
MODEL = Model(q_heads=32, kv_heads=8, head_dim=128, dtype="bf16", layers=32)
MOST_BYTES = 60_000


def picture(name: str) -> str:
    """The SVG of a recipe."""
    recipe: Recipe = find_recipe(name)
    batch = Batch.from_lengths(LENGTHS)
    return draw(plan(batch, CLUSTER, MODEL, recipe, seed=0), hardware=Hardware.load("h100"))


def main() -> None:
    """Draws all of them."""
    FOLDER.mkdir(exist_ok=True)
    for name in [name for name in entries() if f"pictures/{name}.svg" in PAGE]:
        path, data = FOLDER / f"{name}.svg", picture(name).encode()
        if len(data) > MOST_BYTES:
            raise SystemExit(f"{path} would have {len(data)} bytes, more than {MOST_BYTES}")
        path.write_bytes(data)
        print(f"{path.relative_to(ROOT)}: {len(data):,} bytes")


if __name__ == "__main__":
    main()

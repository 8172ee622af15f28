"""How planning times changed from commit to commit: every committed benchmarks/results/targets.json, as one picture.

Run: python -m benchmarks.history [--json]. Draws docs/planning_history.svg, a panel for each number of ranks and a line
for each recipe: medians of milliseconds, over the time of the commits. Machines were not always the same or quiet: a
step that all recipes take together says little. Needs the whole history of the repository.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from statistics import median

from apportion.cli.pictures import svg

ROOT = Path(__file__).resolve().parents[1]
MEASURED = "benchmarks/results/targets.json"
PICTURE = ROOT / "docs/planning_history.svg"
RANKS = (8, 64, 256, 1024)
WIDTH, HEIGHT, LEFT, TOP, GAP = 380, 210, 56, 58, 40


@dataclass(frozen=True)
class Point:
    """Median milliseconds of a recipe on so many ranks, as committed at `date`."""

    date: datetime
    commit: str
    recipe: str
    ranks: int
    ms: float


def points() -> Iterator[Point]:
    """Of all commits that changed the figures, oldest first. A figure that a commit left as it was is not one more."""
    last: dict[tuple[str, int], float] = {}
    for line in _git("log", "--format=%h %cI", "--reverse", "--", MEASURED).splitlines():
        commit, date = line.split()
        rows = json.loads(_git("show", f"{commit}:{MEASURED}"))["rows"]
        seeds: dict[tuple[str, int], list[float]] = {}
        for row in rows:
            seeds.setdefault((row["name"], row["ranks"]), []).append(row["planning_ms"]["p50"])
        for (recipe, ranks), found in seeds.items():
            ms = median(found)
            if last.get((recipe, ranks)) != ms:
                last[recipe, ranks] = ms
                yield Point(datetime.fromisoformat(date), commit, recipe, ranks, ms)


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"git {arguments[0]}: {done.stderr.strip()}; run it in a clone with its history")
    return done.stdout


def drawn(found: Sequence[Point]) -> str:
    """The picture, as SVG."""
    recipes = sorted({point.recipe for point in found})
    fills = {name: svg.colour(i, len(recipes)) for i, name in enumerate(recipes)}
    parts = [svg.text(LEFT, 24, "Milliseconds of planning, as committed", 16, rest='font-weight="600"')]
    for number, ranks in enumerate(RANKS):
        x = LEFT + number % 2 * (WIDTH + LEFT + GAP)
        y = TOP + number // 2 * (HEIGHT + TOP)
        parts += _panel(x, y, ranks, [point for point in found if point.ranks == ranks], fills)
    bottom = TOP + 2 * (HEIGHT + TOP)
    for place, (name, fill) in enumerate(fills.items()):
        x, y = LEFT + place % 5 * 165, bottom + place // 5 * 20
        parts += [svg.rect(x, y - 9, 18, 3, fill), svg.text(x + 24, y - 3, name)]
    height = bottom + (len(fills) + 4) // 5 * 20 + 10
    said = f"{len(found)} medians of {len(recipes)} recipes on {', '.join(map(str, RANKS))} ranks"
    return svg.document(2 * (WIDTH + LEFT + GAP), height, "History of planning times", said, parts)


def _panel(x: float, y: float, ranks: int, found: Sequence[Point], fills: Mapping[str, str]) -> Iterator[str]:
    """Lines over time, milliseconds on a logarithmic axis. x, y: the upper left corner."""
    yield svg.text(x, y - 10, f"{ranks:,} ranks", 13, rest='font-weight="600"')
    if not found:
        return
    first, last = (pick(point.date.timestamp() for point in found) for pick in (min, max))
    low, high = (pick(point.ms for point in found) for pick in (min, max))
    least, most = math.floor(math.log10(low)), math.ceil(math.log10(high * 1.001))

    def at(point: Point) -> tuple[float, float]:
        share = (point.date.timestamp() - first) / max(last - first, 1.0)
        up = (math.log10(point.ms) - least) / (most - least)
        return round(x + share * WIDTH, 1), round(y + HEIGHT - up * HEIGHT, 1)

    for power in range(least, most + 1):
        level = y + HEIGHT - (power - least) / (most - least) * HEIGHT
        yield svg.lines([(x, level, x + WIDTH, level)])
        yield svg.text(x - 6, level + 4, f"{10**power:g}", 11, "end")
    for when, anchor, place in ((first, "start", x), (last, "end", x + WIDTH)):
        yield svg.text(place, y + HEIGHT + 16, datetime.fromtimestamp(when, UTC).date(), 11, anchor)
    for name, fill in fills.items():
        ends = [at(point) for point in found if point.recipe == name]
        yield svg.lines([(*start, *stop) for start, stop in pairwise(ends)], fill)
        yield from (svg.rect(a - 2, b - 2, 4, 4, fill) for a, b in ends)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="the points as JSON instead of the picture")
    found = list(points())
    if parser.parse_args().json:
        rows = [vars(point) | {"date": point.date.isoformat()} for point in found]
        sys.stdout.write(json.dumps(rows, indent=1) + "\n")
        return
    PICTURE.write_text(drawn(found))
    print(f"{PICTURE.relative_to(ROOT)}: {len(found)} medians")


if __name__ == "__main__":
    main()

"""Reports of plans: their size, the time that writing one takes, and when a headless Chromium has drawn it.

python -m benchmarks.pages        the table of docs/performance.md, on stdout; needs `pip install '.[browser]'`
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from apportion import bench
from apportion.ir.request.model import Model
from apportion.ir.request.workload import read_workload, sample
from apportion.planner.api import plan
from apportion.report import report_html

if TYPE_CHECKING:
    from playwright.sync_api import Browser

ROOT = Path(__file__).resolve().parents[1]
RECIPES = (
    "fcp",
    "ring",
    "allgather",
    "ulysses",
    "usp",
    "loongtrain",
    "distca",
    "dcp",
    "zeppelin",
    "magi",
    "auto",
)
CASES = [*((recipe, 64) for recipe in RECIPES), ("fcp", 1024)]
TOKENS, TIMES = 32768, 3


def main() -> None:
    sys.path.insert(0, str(ROOT))  # the tests are not installed
    from tests.browser.screens import chromium

    lengths = read_workload(ROOT / "examples/code_lengths.json")
    print("| recipe | ranks | MB | written in, s | drawn after, ms |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        for recipe, ranks in CASES:
            tokens = ranks * TOKENS
            batch, _ = sample(lengths, tokens, tokens, 0)
            made = plan(
                batch, bench.cluster_of(ranks, None, None), Model(), recipe=recipe, seed=0, verify=False
            )
            start = time.perf_counter()
            text = report_html([(recipe, made)])
            took = time.perf_counter() - start
            path = Path(folder, "page.html")
            path.write_text(text, encoding="utf-8")
            print(
                f"| {recipe} | {ranks} | {path.stat().st_size / 1e6:.2f} | {took:.2f} | {_drawn(browser, path):.0f} |"
            )


def _drawn(browser: Browser, path: Path) -> float:
    """Milliseconds from navigation to the end of drawing, the least of some."""
    found = []
    for _ in range(TIMES):
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.goto(path.as_uri())
        page.wait_for_selector("#content[aria-busy=false]")
        found.append(page.evaluate("performance.getEntriesByName('ready')[0].startTime"))
        page.close()
    return min(found)


if __name__ == "__main__":
    main()

"""Draws docs/report.jpg, a report in a browser, for `make picture`; needs chromium and playwright.

It uses shipped data, so that anyone can draw it again: 64 ranks on source files.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from apportion import cli

DOCS = Path(__file__).parent
PLAN = "--workload examples/code_lengths.json --ranks 64 --recipe auto --seed 0 --json"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]


def main(folder: Path) -> None:
    plan, page = folder / "auto.plan", folder / "auto.html"
    assert cli.main(["plan", *PLAN.split(), "-o", str(plan)]) == cli.OK
    assert cli.main(["report", str(plan), "-o", str(page), "--json"]) == cli.OK
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        tab = browser.new_page(viewport={"width": 1120, "height": 1560})
        tab.goto(page.as_uri())
        tab.wait_for_selector("#content[aria-busy=false]")
        tab.wait_for_timeout(500)
        tab.screenshot(path=DOCS / "report.jpg", type="jpeg", quality=72)
        browser.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        sys.exit(main(Path(name)))

"""Debian's Chromium, without a screen, and pictures of its pages: SCREENSHOTS=FOLDER keeps them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

ROOT = Path(__file__).resolve().parents[2]
WORKLOAD = str(ROOT / "examples/code_lengths.json")
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
)
WIDE, NARROW = (1440, 900), (390, 844)


@contextmanager
def chromium() -> Iterator[Browser]:
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    assert program, "install chromium: apt-get install chromium"
    with sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=program, args=list(FLAGS))
        yield opened
        opened.close()


def keep(page: Page, name: str) -> None:
    """A picture of the whole page, where somebody wants pictures."""
    if "SCREENSHOTS" in os.environ:
        page.screenshot(path=Path(os.environ["SCREENSHOTS"]) / f"{name}.png", full_page=True)


def violations(page: Page) -> list[Any]:
    """What axe-core finds, [rule, how often, the first place]; run as the browser's own so that the page's policy
    stays."""
    axe = (files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf-8")
    session = page.context.new_cdp_session(page)
    session.send("Runtime.evaluate", {"expression": axe})
    asked = (
        "axe.run({ resultTypes: ['violations'] }).then((found) => JSON.stringify(found.violations.map"
        "(({ id, nodes }) => [id, nodes.length, nodes[0].html])))"
    )
    answer = session.send("Runtime.evaluate", {"expression": asked, "awaitPromise": True})
    return list(json.loads(answer["result"]["value"]))

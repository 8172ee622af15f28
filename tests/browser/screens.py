"""Debian's Chromium, without a screen, and pictures of its pages: SCREENSHOTS=FOLDER keeps them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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

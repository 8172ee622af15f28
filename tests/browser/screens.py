"""Headless Chromium from Debian, and comparison of screenshots.

SCREENSHOTS=FOLDER stores them; each is compared loosely with the committed `looks.json`, which UPDATE=1 rewrites.
"""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

ROOT = Path(__file__).resolve().parents[2]
WORKLOAD = str(ROOT / "examples/code_lengths.json")
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
)
LOOKS = Path(__file__).with_name("looks.json")
CELLS, FAR = 24, 14.0  # parts of a picture along each axis; their largest mean difference, of 255
WIDE, NARROW = (1440, 900), (390, 844)


@contextmanager
def chromium() -> Iterator[Browser]:
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    assert program, "install chromium: apt-get install chromium"
    with sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=program, args=list(FLAGS))
        yield opened
        opened.close()


def check_screenshot(page: Page, name: str) -> None:
    """Takes a screenshot of the whole page and compares its height and the brightness of its parts. Fonts and figures
    may differ; a part that is missing, or has moved or changed colour, fails."""
    data = page.screenshot(full_page=True)
    if "SCREENSHOTS" in os.environ:
        folder = Path(os.environ["SCREENSHOTS"])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.png").write_bytes(data)
    picture = Image.open(io.BytesIO(data)).convert("L")
    height, light = picture.height, np.asarray(picture.resize((CELLS, CELLS), Image.Resampling.BOX))
    looks = json.loads(LOOKS.read_text(encoding="utf-8")) if LOOKS.exists() else {}
    if "UPDATE" in os.environ:
        looks[name] = {"height": height, "light": light.tolist()}
        text = ",\n".join(f"{json.dumps(key)}: {json.dumps(looks[key])}" for key in sorted(looks))
        LOOKS.write_text(f"{{\n{text}\n}}\n", encoding="utf-8")
        return
    expected = looks[name]
    assert abs(height / expected["height"] - 1) < 0.15, (name, height, expected["height"])
    off = np.abs(light.astype(float) - np.array(expected["light"], float)).mean()
    assert off < FAR, (
        f"{name} differs by {off:.1f} of 255 on average: look at it; if it is right, run with UPDATE=1"
    )


def violations(page: Page) -> list[Any]:
    """axe-core's violations, [rule, count, first place]. It runs through DevTools, so that the page's content security
    policy stays in force."""
    axe = (files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf-8")
    session = page.context.new_cdp_session(page)
    session.send("Runtime.evaluate", {"expression": axe})
    script = (
        "axe.run({ resultTypes: ['violations'] }).then((found) => JSON.stringify(found.violations.map"
        "(({ id, nodes }) => [id, nodes.length, nodes[0].html])))"
    )
    answer = session.send("Runtime.evaluate", {"expression": script, "awaitPromise": True})
    return list(json.loads(answer["result"]["value"]))

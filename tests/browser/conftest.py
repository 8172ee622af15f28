"""Fixtures: a headless Chromium, and plans and reports made by the command line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from apportion import cli
from tests.browser.screens import WIDE, WORKLOAD, chromium


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages")


@pytest.fixture(scope="session")
def planned(folder: Path) -> Callable[..., Path]:
    """Returns a function that makes plan files by recipe, with a cache."""

    def make(recipe: str = "fcp", ranks: int = 64) -> Path:
        path = folder / f"{recipe}{ranks}.plan"
        if not path.exists():
            words = ["plan", "--workload", WORKLOAD, "--ranks", str(ranks), "--recipe", recipe, "--json"]
            assert cli.main([*words, "-o", str(path)]) == cli.OK
        return path

    return make


@pytest.fixture(scope="session")
def reported(planned: Callable[..., Path]) -> Callable[..., Path]:
    """Returns a function that makes reports of these plans, with a cache."""

    def make(recipe: str = "fcp", ranks: int = 64) -> Path:
        plan = planned(recipe, ranks)
        path = plan.with_suffix(".html")
        if not path.exists():
            assert cli.main(["report", str(plan), "-o", str(path)]) == cli.OK
        return path

    return make


@pytest.fixture
def visit(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Returns a function that opens a page and waits until it is drawn. Fails at the end if a page logged to the
    console or made a request."""
    problems: list[str] = []
    contexts = []

    def open_(path: Path, size: tuple[int, int] = WIDE, **options: Any) -> Page:
        context = browser.new_context(viewport={"width": size[0], "height": size[1]}, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: request.url.startswith("file:") or problems.append(request.url))
        page.goto(path.as_uri())
        page.wait_for_selector("#content[aria-busy=false]")
        page.wait_for_timeout(200)
        return page

    yield open_
    for context in contexts:
        context.close()
    assert problems == []

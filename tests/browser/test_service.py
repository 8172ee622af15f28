"""The server's page in a real browser, on a real server that plans."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from apportion.ir.bytes.job import Job, encode_request
from apportion.ir.request.batch import Batch
from apportion.ir.request.cluster import Cluster
from apportion.ir.request.model import Model
from apportion.ir.request.policy import Policy
from apportion.planner.recipe.recipes import find_recipe
from apportion.service.client import Client
from apportion.service.http.serve import Server, serving
from tests.browser.screens import NARROW, WIDE, check_screenshot, violations

JOB = Job(Cluster(1, 4), Model(8, 2, 64), Policy(find_recipe("fcp")), 8192)
TOKEN = "token-of-this-test-0123456789"
SHOWN = ".shown:not([hidden])"
UNANSWERED = "Failed to load resource"  # the browser's message for a 401 or an unreachable server
Watch = Callable[..., Page]


def plan(server: Server, length: int, token: str | None = None) -> bytes:
    """Submits a request, waits for its plan and returns its key."""
    batch = [Batch.from_lengths([length, 900, 12000])]
    with closing(Client(server.url, token, timeout_s=60)) as client:
        key = JOB.request_key(batch)
        client.submit(key, encode_request(JOB, batch))
        client.fetch(key, 0, 60)
    return key


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server without a token, which has planned one request."""
    with serving(None) as found:
        plan(found, 3000)
        yield found


@pytest.fixture
def watch(browser: Browser) -> Iterator[Watch]:
    """Returns a function that opens the page. At the end its console must be empty, and it must have contacted no other
    server."""
    problems: list[str] = []
    contexts = []

    def open_(url: str, size: tuple[int, int] = WIDE, **options: Any) -> Page:
        context = browser.new_context(viewport={"width": size[0], "height": size[1]}, **options)
        contexts.append(context)
        context.on(
            "console", lambda message: message.text.startswith(UNANSWERED) or problems.append(message.text)
        )
        context.on("weberror", lambda error: problems.append(str(error.error)))
        context.on(
            "request",
            lambda request: request.url.startswith((url, f"blob:{url}")) or problems.append(request.url),
        )
        page = context.new_page()
        page.goto(url)
        page.wait_for_selector("#content[aria-busy=false]")
        return page

    yield open_
    for context in contexts:
        context.close()
    assert problems == []


def test_the_page_updates_as_plans_are_made(server: Server, watch: Watch) -> None:
    page = watch(server.url)
    expect(page.locator(".lamp")).to_have_text(re.compile("^ready"))
    before = int(page.locator(".card b").first.inner_text())
    key = plan(server, 3001)
    expect(page.locator(".card b").first).to_have_text(str(before + 1))
    expect(page.locator(".plans tbody tr").first).to_contain_text(key.hex()[:12])
    for title in ("planning, median", "planning, 99th percentile"):
        expect(page.locator(".card", has_text=title)).to_contain_text(re.compile(r"^[\d.]+ m?s"))
    # the rows of all tenants and of the only tenant
    expect(page.locator(".tenants tbody tr")).to_have_count(2)
    planned = page.locator(".chart", has_text="plans made").get_by_role("img")
    expect(planned).to_have_attribute(
        "aria-label", re.compile(r"over the last hour: \d+ now, [1-9]\d* at most")
    )
    assert page.locator(".chart").first.locator("i").count() == 60
    expect(page.locator(".store")).to_contain_text(re.compile(r"Memory of the server\s*[\d.]+ MB"))


def test_a_click_or_a_key_opens_the_report(server: Server, watch: Watch) -> None:
    page = watch(server.url)
    button = page.locator(".plans button").last
    button.focus()
    for press in (lambda: page.keyboard.press("Enter"), button.click):
        with page.context.expect_page() as opened:
            press()
        report = opened.value
        report.wait_for_selector("#content[aria-busy=false]", timeout=60_000)
        assert report.title() == "fcp on 4 ranks"
        assert report.locator("canvas.time").is_visible()
        report.close()


def test_the_page_asks_for_a_token_and_keeps_it_in_the_tab(watch: Watch) -> None:
    with serving(None, token=TOKEN) as server:
        plan(server, 3000, TOKEN)
        page = watch(server.url)
        assert page.locator("input[name=token]").evaluate("(field) => field === document.activeElement")
        check_screenshot(page, "service-token")
        page.keyboard.type("a-token-of-another-server-0123")
        page.keyboard.press("Enter")
        expect(page.locator(".wrong")).to_contain_text("token")
        page.keyboard.type(TOKEN)
        page.keyboard.press("Enter")
        page.wait_for_selector(SHOWN)
        with page.context.expect_page() as opened:
            page.locator(".plans button").first.click()
        opened.value.wait_for_selector("#content[aria-busy=false]", timeout=60_000)
        page.reload()
        page.wait_for_selector(SHOWN)
        assert page.evaluate("[localStorage.length, document.cookie, location.href]") == [
            0,
            "",
            f"{server.url}/",
        ]
        page.locator(".leave").click()
        page.wait_for_selector(".ask:not([hidden])")


def test_the_page_shows_why_a_request_was_refused_and_that_the_server_ended(watch: Watch) -> None:
    with serving(None) as server, closing(Client(server.url, timeout_s=60)) as client:
        job = Job(Cluster(1, 4), Model(8, 2, 64), Policy(find_recipe("fcp"), token_cap=1), 8192)
        batch = [Batch.from_lengths([100])]
        client.submit(job.request_key(batch), encode_request(job, batch))
        page = watch(server.url)
        expect(page.locator(".plans td.refused")).to_have_text("refused")
        expect(page.locator(".plans td.wide")).to_contain_text("token_cap")
        server.process.terminate()
        expect(page.locator(".lamp")).to_have_text(re.compile("no answer"))
        page.goto("about:blank")  # before the page polls again


@pytest.mark.parametrize(
    ("size", "scheme"), [(WIDE, "light"), (WIDE, "dark"), (NARROW, "light"), (NARROW, "dark")]
)
def test_the_page_fits_its_window_and_is_accessible(
    size: tuple[int, int], scheme: str, server: Server, watch: Watch
) -> None:
    page = watch(server.url, size, color_scheme=scheme)
    page.wait_for_selector(SHOWN)
    assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
    check_screenshot(page, f"service-{size[0]}-{scheme}")
    assert violations(page) == []

"""The server's page in a real browser, on a real server while a job runs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from apportion.ir.bytes.job import Job
from apportion.ir.request.batch import Batch
from apportion.ir.request.cluster import Cluster
from apportion.ir.request.model import Model
from apportion.ir.request.policy import Policy
from apportion.planner.recipe.recipes import find_recipe
from apportion.service.client import Client, create_job
from apportion.service.http.run.child import Serving, serving
from tests.browser.screens import NARROW, WIDE, keep, violations

JOB = Job(Cluster(1, 4), Model(8, 2, 64), Policy(find_recipe("fcp")), 8192)
ADMIN = "admin-key-of-this-test-0123456789"
SHOWN = ".shown:not([hidden])"
Watch = Callable[..., Page]


def submit(client: Client, epoch: int, *iterations: int) -> None:
    for number in iterations:
        client.submit(epoch, number, [Batch.from_lengths([3000 + number, 900, 12000])])


@contextmanager
def running(folder: Path, *options: str, admin: str | None = None) -> Iterator[tuple[Serving, Client, int]]:
    """A server with a job whose first three iterations are planned."""
    with (
        serving(folder, options=options) as server,
        closing(create_job(server.url, "run", JOB, admin_key=admin, lookahead=6)) as client,
    ):
        epoch = client.begin("first")
        submit(client, epoch, 0, 1, 2)
        client.plan(epoch, 0, 0)
        client.plan(epoch, 2, 0)
        yield server, client, epoch


@pytest.fixture(scope="module")
def keyless(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Serving, Client, int]]:
    with running(tmp_path_factory.mktemp("keyless"), "--insecure") as found:
        yield found


@pytest.fixture
def watch(browser: Browser) -> Iterator[Watch]:
    """Opens the page. In the end nothing may have been said on its console, nor asked of anybody else."""
    wrong: list[str] = []
    contexts = []

    def open_(url: str, size: tuple[int, int] = WIDE, **options: Any) -> Page:
        context = browser.new_context(viewport={"width": size[0], "height": size[1]}, **options)
        contexts.append(context)
        context.on("console", lambda said: "401" in said.text or wrong.append(said.text))
        context.on("weberror", lambda error: wrong.append(str(error.error)))
        context.on(
            "request", lambda asked: asked.url.startswith((url, f"blob:{url}")) or wrong.append(asked.url)
        )
        page = context.new_page()
        page.goto(url)
        page.wait_for_selector("#content[aria-busy=false]")
        return page

    yield open_
    for context in contexts:
        context.close()
    assert wrong == []


def test_it_follows_a_job_that_runs(keyless: tuple[Serving, Client, int], watch: Watch) -> None:
    server, client, epoch = keyless
    page = watch(server.url)
    expect(page.locator(".lamp")).to_have_text(re.compile("ready"))
    expect(page.locator(".strip .r")).to_have_count(3)
    submit(client, epoch, 3, 4)
    expect(page.locator(".strip .r")).to_have_count(5)
    expect(page.locator(".job")).to_contain_text("ranks are at iteration 3, 2 plans ahead")
    client.plan(epoch, 3, 1)
    expect(page.locator(".job")).to_contain_text("ranks are at iteration 4, 1 plan ahead")
    assert page.locator(".strip .front").get_attribute("title") == "iteration 4: ready; opens its report"
    assert page.locator(".spread b").count() >= 1


def test_a_click_opens_the_report_and_the_keyboard_does(
    keyless: tuple[Serving, Client, int], watch: Watch
) -> None:
    server, _, _ = keyless
    page = watch(server.url)
    page.wait_for_selector(".strip .r")
    page.locator(".strip .r").nth(1).focus()
    for press in (lambda: page.keyboard.press("Enter"), lambda: page.locator(".strip .r").nth(1).click()):
        with page.context.expect_page() as opened:
            press()
        report = opened.value
        report.wait_for_selector("#content[aria-busy=false]", timeout=60_000)
        assert report.title() == "fcp on 4 ranks"
        assert report.locator("canvas.time").is_visible()
        report.close()


def test_a_key_is_asked_for_and_kept_in_memory_alone(tmp_path: Path, watch: Watch) -> None:
    key_file = tmp_path / "admin.key"
    key_file.write_text(ADMIN)
    key_file.chmod(0o600)
    with running(tmp_path / "plans", "--admin-key-file", str(key_file), admin=ADMIN) as (server, _, _):
        page = watch(server.url)
        assert page.locator(".ask").is_visible()
        assert page.locator("input[name=key]").evaluate("(field) => field === document.activeElement")
        keep(page, "service-key")
        page.keyboard.type("a-key-of-another-server-0123")
        page.keyboard.press("Enter")
        expect(page.locator(".wrong")).to_contain_text("admin key")
        page.keyboard.type(ADMIN)
        page.keyboard.press("Enter")
        page.wait_for_selector(SHOWN)
        with page.context.expect_page() as opened:
            page.locator(".strip .r").first.click()
        opened.value.wait_for_selector("#content[aria-busy=false]", timeout=60_000)
        held = page.evaluate(
            "JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie, location.href])"
        )
        assert json.loads(held) == [{}, {}, "", server.url + "/"]
        assert page.context.cookies() == []
        page.locator(".leave").click()
        page.wait_for_selector(".ask:not([hidden])")
        page.wait_for_selector("#content[aria-busy=false]")


def test_a_server_that_ends_is_told(tmp_path: Path, watch: Watch) -> None:
    with running(tmp_path, "--insecure") as (server, _, _):
        page = watch(server.url)
        page.wait_for_selector(SHOWN)
        server.process.terminate()
        expect(page.locator(".lamp")).to_have_text(re.compile("ended the stream|no answer"))
        server.process.wait()
        page.goto("about:blank")  # before it asks again


@pytest.mark.parametrize(
    ("size", "scheme"), [(WIDE, "light"), (WIDE, "dark"), (NARROW, "light"), (NARROW, "dark")]
)
def test_it_fits_its_window_and_is_accessible(
    size: tuple[int, int], scheme: str, keyless: tuple[Serving, Client, int], watch: Watch
) -> None:
    page = watch(keyless[0].url, size, color_scheme=scheme)
    page.wait_for_selector(SHOWN)
    assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
    keep(page, f"service-{size[0]}-{scheme}")
    assert violations(page) == []


def test_texts_from_outside_are_texts(tmp_path: Path, watch: Watch) -> None:
    """A run may be called what its trainer likes; a batch that fails says why in words of the planner."""
    with running(tmp_path, "--insecure") as (server, client, _):
        epoch = client.begin("second")
        client.submit(epoch, 0, [Batch.from_lengths([100])])
        page = watch(server.url)
        page.wait_for_selector(SHOWN)
        assert page.locator("img, iframe, script[src]").count() == 0
        assert "epoch 2" in page.locator(".job").inner_text()

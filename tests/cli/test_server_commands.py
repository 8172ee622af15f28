"""Commands around a planning server: serve, plan --server, report of a URL, store."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from apportion import cli
from apportion.service.http.serve import Server, Settings, serving
from apportion.service.store import Folder
from tests.service.requests import TOKEN, Request, client_of

Run = Callable[..., Any]
PLAN = ("plan", "--workload", "examples/doc_lengths.json", "--ranks", "4", "--tokens-per-rank", "1024")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("APPORTION_SERVE_WORKERS", "1")
        patched.setenv("APPORTION_SERVE_PLAN_S", "100")
        with serving(folder, token=TOKEN) as running:
            yield running


@pytest.fixture
def run_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setenv("APPORTION_TOKEN", TOKEN)

    def run(*args: str, ends: int = cli.OK) -> Any:
        assert cli.main([*args, "--json"]) == ends
        return json.loads(capsys.readouterr().out)

    return run


def test_a_server_makes_the_same_plan_as_the_command(server: Server, run_json: Run, tmp_path: Path) -> None:
    remote_file, local_file = tmp_path / "remote.plan", tmp_path / "local.plan"
    remote = run_json(*PLAN, "--server", server.url, "-o", str(remote_file))
    local = run_json(*PLAN, "-o", str(local_file))
    assert remote_file.read_bytes() == local_file.read_bytes()
    assert remote.keys() == local.keys()
    assert remote["id"] == local["id"]
    assert run_json("verify", str(remote_file))["ok"]


def test_a_wrong_token_and_an_invalid_url_are_reported(server: Server, run_json: Run, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("another-token-0123456\n")
    options = "--server", server.url, "--token-file", str(tmp_path / "token")
    wrong = run_json(*PLAN, *options, ends=cli.BAD_INPUT)
    assert "unauthorized" in wrong["error"]["message"]
    assert "https" in run_json(*PLAN, "--server", "planner:8321", ends=cli.BAD_INPUT)["error"]["message"]


def test_report_reads_plans_of_a_server_and_of_a_folder(
    server: Server, folder: Path, run_json: Run, tmp_path: Path
) -> None:
    request, page = Request(1), tmp_path / "r.html"
    with client_of(server.url) as client:
        request.put(client)
        assert client.get(f"/v1/plans/{request.hex}/ranks/0?wait_s=60").status_code == 200
    for plan in (f"{server.url}/v1/plans/{request.hex}", str(Folder(folder).path(request.key))):
        run_json("report", plan, "-o", str(page))
        assert "fcp on 4 ranks" in page.read_text(encoding="utf-8")
        page.unlink()
    for wrong in (f"{server.url}/v1/plans/{'0' * 64}", f"{server.url}/v1/plans/x"):
        run_json("report", wrong, "-o", str(page), ends=cli.BAD_INPUT)
    assert not page.exists()
    url = f"{server.url}/v1/plans/{request.hex}"
    refused = run_json("report", url, "--hardware", "h100", ends=cli.BAD_INPUT)
    assert refused["error"]["field"] == "--hardware"


def test_a_store_is_checked_and_pruned(run_json: Run, tmp_path: Path) -> None:
    store = Folder(tmp_path)
    for number in range(3):
        store.put(Request(number).pack())
    report = run_json("store", "check", str(tmp_path), "--verify", "--workers", "1")
    assert (report["ok"], report["plans"], report["bad"]) == (True, 3, [])
    path = store.path(Request(1).key)
    path.write_bytes(path.read_bytes()[:-1])
    report = run_json("store", "check", str(tmp_path), ends=cli.FAILED)
    assert [item["path"] for item in report["bad"]] == [str(path)]
    assert run_json("store", "prune", str(tmp_path), "--gb", "0")["evicted"] == 3
    assert run_json("store", "prune", str(tmp_path), "--days", "1")["kept"] == 0
    run_json("store", "prune", str(tmp_path), ends=cli.BAD_INPUT)
    for nothing in (tmp_path, tmp_path / "none"):
        assert run_json("store", "check", str(nothing), ends=cli.BAD_INPUT)["error"]["field"] == "FOLDER"


def test_serve_takes_its_limits_in_gb_and_days(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = list[Settings]()
    monkeypatch.setattr("apportion.service.http.serve.run", captured.append)
    assert cli.main(["serve", "--store-gb", "1.5", "--store-days", "2", "--worker-gb", "0.5"]) == cli.OK
    settings = captured[0]
    assert (settings.store_bytes, settings.store_age_s) == (1_500_000_000, 2 * 24 * 3600.0)
    assert settings.worker_bytes == 500_000_000


def test_serve_names_the_invalid_option(run_json: Run, tmp_path: Path) -> None:
    for option in ("--plan-s", "--worker-gb", "--store-gb", "--store-days"):
        assert option in run_json("serve", option, "inf", ends=cli.BAD_INPUT)["error"]["message"]
    assert "--workers" in run_json("serve", "--workers", "99999", ends=cli.BAD_INPUT)["error"]["message"]
    assert run_json("serve", "--host", "", ends=cli.BAD_INPUT)["error"]["field"] == "--host"
    short = tmp_path / "token"
    short.write_text("short")
    for words in (("--token-file", str(short)), ("--host", "256.1.1.1"), ("--store", "redis://:x:y/z")):
        assert "error" in run_json("serve", *words, ends=cli.BAD_INPUT)

"""`apportion job` against a server: what a user types, and what comes back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from apportion import cli
from apportion.service.http.run.child import Serving, serving

SMALL = ("--ranks", "2", "--tokens-per-rank", "512")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving(tmp_path_factory.mktemp("jobs") / "store", options=("--store", "memory")) as server:
        yield server


def test_jobs_are_made_listed_and_deleted(
    server: Serving, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def job(*args: str) -> str:
        assert cli.main(["job", *args, "--server", server.url]) == cli.OK
        return capsys.readouterr().out

    key = tmp_path / "run.key"
    key.write_text("a-key-of-sixteen-characters\n")
    key.chmod(0o600)
    for _ in range(2):  # the launcher of a run may create its job whenever it starts
        made = json.loads(job("create", "run", *SMALL, "--key-file", str(key), "--json"))
    assert made == {"name": "run", "url": f"{server.url}/v1/jobs/run", "key": "a-key-of-sixteen-characters"}
    assert f"{server.url}/v1/jobs/other\nkey " in job("create", "other", *SMALL)
    (listed,) = [own for own in json.loads(job("list", "--json"))["jobs"] if own["name"] == "run"]
    assert listed == {
        "name": "run",
        "url": made["url"],
        "ranks": 2,
        "lookahead": 8,
        "epoch": 0,
        "streams": {},
    }
    assert made["url"] in job("list")
    job("delete", "run")
    assert json.loads(job("delete", "other", "--json")) == {"deleted": "other"}
    assert json.loads(job("list", "--json")) == {"jobs": []}


def test_what_is_wrong_is_said(server: Serving, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["job", "delete", "nobody", "--server", server.url]) == cli.BAD_INPUT
    assert "there is no job 'nobody'" in capsys.readouterr().err
    assert cli.main(["job", "create", "a/b", "--server", server.url]) == cli.BAD_INPUT
    assert "name = 'a/b'" in capsys.readouterr().err

"""`apportion store check`: what it finds in a folder, and says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from apportion import cli
from apportion.service.precompute import precompute
from apportion.service.store import open_store
from apportion.service.workers import Planner
from tests.service.precomputing import lengths, work_of


@pytest.fixture(scope="module")
def planner() -> Iterator[Planner]:
    with Planner(1) as held:
        yield held


@pytest.fixture
def folder(planner: Planner, tmp_path: Path) -> Path:
    path = tmp_path / "plans"
    precompute(work_of(lengths(30, 5), 5), path, planner)
    return path


def check(
    folder: Path, capsys: pytest.CaptureFixture[str], *options: str, code: int = cli.OK
) -> dict[str, Any]:
    capsys.readouterr()
    assert cli.main(["store", "check", str(folder), *options, "--json"]) == code
    return dict(json.loads(capsys.readouterr().out))


@pytest.mark.parametrize("options", [(), ("--verify",)])
def test_a_whole_folder_passes(
    options: tuple[str, ...], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = check(folder, capsys, *options)
    assert found["ok"]
    assert found["bad"] == []
    assert found["iterations"] == {"asked": 5, "there": 5, "lost": []}
    assert cli.main(["store", "check", str(folder)]) == cli.OK
    assert "5 plans" in capsys.readouterr().out


def test_compact_plans_are_verified(
    planner: Planner, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    precompute(work_of(lengths(60, 5), 2, ranks=16), tmp_path, planner)
    assert check(tmp_path, capsys, "--verify")["verified"]


def test_a_changed_byte_is_found_and_its_file_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = next(folder.glob("packs/*/*.pack"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    (bad,) = check(folder, capsys, code=cli.FAILED)["bad"]
    assert bad["path"] == str(path)
    assert cli.main(["store", "check", str(folder)]) == cli.FAILED
    assert str(path) in capsys.readouterr().out


def test_a_lost_plan_is_named_by_its_iteration(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    next(folder.glob("packs/*/*.pack")).unlink()
    found = check(folder, capsys, code=cli.FAILED)
    assert len(found["iterations"]["lost"]) == 1
    assert found["iterations"]["lost"][0].startswith("iteration ")


def test_what_is_not_planned_yet_is_counted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with closing(open_store(folder)) as store:
        names = [name for name, _ in store.records("iteration/")]
        store.commit({}, names[-2:])
    found = check(folder, capsys, code=cli.FAILED)
    assert found["bad"] == []
    assert found["iterations"]["there"] == 3
    assert cli.main(["store", "check", str(folder)]) == cli.FAILED
    assert "same precompute command" in capsys.readouterr().out


def test_a_server_s_store_has_no_iterations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    open_store(tmp_path).close()
    assert check(tmp_path, capsys)["iterations"] is None


def test_a_folder_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(tmp_path, capsys, code=cli.BAD_INPUT)["error"]["type"] == "ConfigError"

"""`apportion store prune, compact, export, import`: on folders, and on a server at work."""

from __future__ import annotations

import io
import json
import tarfile
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import pytest

from apportion import cli
from apportion.ir.errors import ApportionError, ConfigError, DecodeError, VersionError
from apportion.service.client import Client, ServiceProblem, create_job
from apportion.service.http.run.child import serving
from apportion.service.store import open_store
from apportion.service.store.archive import archive, unpack
from apportion.service.store.memory import MemoryStore
from tests.service.engines import JOB, batch
from tests.service.stores import key_of, pack_bytes

KEY = "key-of-the-job-0123456789"


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*args: str, ends: int = cli.OK) -> Any:
        assert cli.main([*args, "--json"]) == ends
        return json.loads(capsys.readouterr().out)

    return run


def plans(client: Client, epoch: int, iterations: int) -> list[bytes]:
    for number in range(iterations):
        client.submit(epoch, number, batch(number))
    return [client.plan(epoch, number, 0, timeout_s=60).id for number in range(iterations)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[bytes]]:
    """(a server's folder, a copy that was made while it worked, ids of the plans that ranks had)."""
    place = tmp_path_factory.mktemp("store")
    with serving(place / "live") as server, create_job(server.url, "run", JOB, key=KEY) as client:
        ids = plans(client, client.begin("first"), 4)
        assert cli.main(["store", "export", server.url, str(place / "backup.tar"), "--json"]) == cli.OK
        ids += plans(client, client.begin("second"), 6)[4:]
    return place / "live", place / "backup.tar", ids


def test_a_copy_of_a_server_at_work_goes_on_with_new_epochs(
    folder: tuple[Path, Path, list[bytes]], tmp_path: Path, said: Any
) -> None:
    _, backup, ids = folder
    assert said("store", "import", str(backup), str(tmp_path / "new")) == {
        "store": str(tmp_path / "new"),
        "records": 2,
        "packs": 4,
        "live": True,
    }
    with serving(tmp_path / "new") as server, Client(f"{server.url}/v1/jobs/run", KEY) as client:
        with pytest.raises(ServiceProblem) as over:
            client.plan(1, 0, 0)
        assert over.value.status == 410
        epoch = client.begin("first")
        assert epoch > 2  # that the other one began since
        assert plans(client, epoch, 4) == ids[:4]


def test_a_folder_that_moves_goes_on(
    folder: tuple[Path, Path, list[bytes]], tmp_path: Path, said: Any
) -> None:
    """Everything: a run's epoch, too."""
    live, _, ids = folder
    moved = tmp_path / "moved.tar"
    size = said("store", "export", str(live), str(moved))["bytes"]
    assert size == moved.stat().st_size
    said("store", "import", str(moved), str(tmp_path / "new"))
    assert said("store", "check", str(tmp_path / "new"))["ok"]
    with serving(tmp_path / "new") as server, Client(f"{server.url}/v1/jobs/run", KEY) as client:
        assert client.begin("second") == 2
        assert [client.plan(2, number, 0).id for number in range(6)] == ids


def test_a_job_that_is_there_is_not_overwritten(
    folder: tuple[Path, Path, list[bytes]], tmp_path: Path, said: Any
) -> None:
    _, backup, _ = folder
    said("store", "import", str(backup), str(tmp_path))
    refused = said("store", "import", str(backup), str(tmp_path), ends=cli.BAD_INPUT)
    assert refused["error"]["value"] == "run"
    assert "a job that the store has" in refused["error"]["rule"]


def test_plans_that_nobody_needs_are_dropped(
    folder: tuple[Path, Path, list[bytes]], tmp_path: Path, said: Any
) -> None:
    _, backup, _ = folder
    place = str(tmp_path / "store")
    said("store", "import", str(backup), place)
    assert said("store", "prune", place, "--days", "1")["dropped"] == 0
    assert said("store", "prune", place, "--gb", "1")["dropped"] == 0
    kept = said("store", "prune", place, "--days", "0")
    assert (kept["dropped"], kept["kept"]) == (4, 0)
    assert said("store", "check", place)["packs"] == 0


def test_plans_that_are_needed_stay(
    folder: tuple[Path, Path, list[bytes]], tmp_path: Path, said: Any
) -> None:
    live, _, _ = folder
    moved, place = str(tmp_path / "moved.tar"), str(tmp_path / "store")
    said("store", "export", str(live), moved)
    said("store", "import", moved, place)
    assert said("store", "prune", place, "--days", "0", "--gb", "0")["kept"] == 6


def test_an_index_is_compacted(tmp_path: Path, said: Any) -> None:
    with closing(open_store(tmp_path)) as store:
        store.commit({f"record/{number}": bytes(100) for number in range(10_000)})
        store.commit({}, [f"record/{number}" for number in range(10_000) if number % 2])
    found = said("store", "compact", str(tmp_path))
    assert found["bytes_after"] < 0.8 * found["bytes_before"]
    with closing(open_store(tmp_path, read_only=True)) as store:
        assert len(list(store.records())) == 5000


@pytest.mark.parametrize("command", ["prune", "compact"])
def test_no_store_is_made(command: str, tmp_path: Path, said: Any) -> None:
    refused = said("store", command, str(tmp_path / "none"), ends=cli.BAD_INPUT)
    assert "index.sqlite" in refused["error"]["rule"]
    assert not (tmp_path / "none").exists()


# ---------------------------------------------------------------------------------------------- hostile archives


def filled() -> MemoryStore:
    store = MemoryStore()
    store.commit({f"job/{number}": bytes([number]) * 50 for number in range(3)})
    for number in range(3):
        store.put_pack(key_of(number), pack_bytes(number))
    return store


def contents(store: MemoryStore) -> Any:
    return dict(store.records()), {key: store.read_pack(key) for key, _ in store.packs()}


def test_an_archive_is_what_was_stored(tmp_path: Path) -> None:
    file, store = tmp_path / "a.tar", MemoryStore()
    file.write_bytes(b"".join(archive(filled())))
    unpack(file, store)
    assert contents(store) == contents(filled())
    with tarfile.open(file) as tar:  # which others read, too
        assert tar.getnames()[0] == "apportion.json"


def test_damaged_archives_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    """Cut anywhere, or a byte changed: an error of ours, or, in padding and names of users, what was stored."""
    whole, rng, file = b"".join(archive(filled())), Random(0), tmp_path / "a.tar"
    refused = 0
    for _ in range(400):
        data = bytearray(whole[: rng.choice((len(whole), rng.randrange(len(whole))))])
        if len(data) == len(whole):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        file.write_bytes(data)
        store = MemoryStore()
        try:
            unpack(file, store)
        except ApportionError:
            assert contents(store) == ({}, {})
            refused += 1
        else:
            assert contents(store) == contents(filled())
    assert refused > 200


@pytest.mark.parametrize(
    ("name", "kind", "error"),
    [
        ("/etc/passwd", tarfile.REGTYPE, DecodeError),
        ("packs/../../x", tarfile.REGTYPE, DecodeError),
        ("records/00000000", tarfile.SYMTYPE, DecodeError),
        ("apportion.json", tarfile.REGTYPE, VersionError),
    ],
)
def test_archives_of_others_are_refused(
    tmp_path: Path, name: str, kind: bytes, error: type[Exception]
) -> None:
    file = tmp_path / "a.tar"
    with tarfile.open(file, "w") as tar:
        data = b'{"format": "apportion.store", "version": 9, "release": "9", "live": false}'
        member = tarfile.TarInfo(name)
        member.type, member.size = kind, len(data) if kind == tarfile.REGTYPE else 0
        tar.addfile(member, io.BytesIO(data))
    with pytest.raises(error):
        unpack(file, MemoryStore())


def test_folders_of_precompute_are_not_pruned(tmp_path: Path, said: Any) -> None:
    with closing(open_store(tmp_path)) as store:
        store.commit({"offline": b"facts"})
    refused = said("store", "prune", str(tmp_path), "--days", "0", ends=cli.BAD_INPUT)
    assert refused["error"]["type"] == ConfigError.__name__

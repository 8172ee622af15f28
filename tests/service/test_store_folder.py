"""The store in a folder: what lasts, who may open it, what a full disk, a foreign or damaged file does."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from apportion.ir.bytes.job import Job
from apportion.ir.errors import VersionError
from apportion.ir.request.batch import Batch
from apportion.ir.request.cluster import Cluster
from apportion.ir.request.model import Model
from apportion.ir.request.policy import Policy
from apportion.planner.iteration.jobs import plan_job
from apportion.planner.recipe.recipes import find_recipe
from apportion.service.errors import StoreError
from apportion.service.packs import Pack
from apportion.service.store import check_store, finish, open_store
from apportion.service.store.sqlite import SqliteStore, pack_path
from tests.service.stores import contents, key_of, opened, pack_bytes

ROOT = Path(__file__).parents[2]


def filled(folder: Path, packs: int = 5) -> Path:
    """A store with some records and packs."""
    with opened(folder) as store:
        store.commit({f"r/{number}": bytes([number]) * 100 for number in range(10)})
        for number in range(packs):
            store.put_pack(key_of(number), pack_bytes(number))
    return folder


def tree(folder: Path) -> dict[str, bytes]:
    """The files of a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@contextmanager
def child(program: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A Python process that was given `arguments`; killed at the end."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{program}"
    command = [sys.executable, "-c", code, *map(str, arguments)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


# ---------------------------------------------------------------------------------------------- what lasts


def test_files_and_their_names_are_flushed_before_a_put_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power cut a name that was flushed has its bytes, since these were flushed before."""
    happened: list[str] = []

    def noting(name: str, call: Callable[..., object], place: Callable[..., object]) -> None:
        def noted(*args: object, **named: object) -> object:
            happened.append(f"{name} {place(*args)}")
            return call(*args, **named)

        monkeypatch.setattr(os, name, noted)

    def kind(path: object) -> str:
        return Path(str(path)).suffix or "folder"

    with opened(tmp_path / "store") as store:
        noting("fsync", os.fsync, lambda file: kind(os.readlink(f"/proc/self/fd/{file}")))
        noting("replace", os.replace, lambda old, new: f"{kind(old)} {kind(new)}")
        noting("mkdir", os.mkdir, lambda path, *mode: kind(path))
        store.put_pack(key_of(1), pack_bytes(1))
        store.put_pack(key_of(2), pack_bytes(2))
        monkeypatch.undo()
    write = ["fsync .part", "replace .part .pack", "fsync folder"]
    folders = ["mkdir folder", "fsync folder"]
    assert happened == [*folders, *folders, *write, *folders, *write]


def test_commits_are_flushed(tmp_path: Path) -> None:
    """SQLite flushes the log with each transaction where `synchronous` is full (2)."""
    with closing(SqliteStore(tmp_path)) as store:
        store.put_pack(key_of(1), pack_bytes(1))
        store.commit({"a": b""})
        assert store._connection().execute("PRAGMA synchronous").fetchone() == (2,)
        assert store._connection().execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_what_killed_processes_left_is_put_in_order(tmp_path: Path) -> None:
    folder = filled(tmp_path)
    lost, strange = pack_path(folder, key_of(0)), folder / "packs" / "notes.txt"
    lost.unlink()
    strange.write_text("mine")
    torn = [pack_path(folder, key_of(1)).with_suffix(".pack.7.part"), folder / "index.sqlite.part"]
    for path in torn:
        path.write_bytes(b"half")
    unknown = pack_path(folder, key_of(99))
    unknown.parent.mkdir(exist_ok=True)
    unknown.write_bytes(pack_bytes(99))
    with opened(folder) as store:
        assert [key for key, _ in store.packs()] == [key_of(number) for number in (1, 2, 3, 4, 99)]
        assert store.read_pack(key_of(99)) == pack_bytes(99)
    assert not any(path.exists() for path in torn)
    assert strange.exists()


def test_a_pack_removed_by_hand_may_be_put_again(tmp_path: Path) -> None:
    with opened(filled(tmp_path)) as store:
        pack_path(tmp_path, key_of(1)).unlink()
        assert not store.has_pack(key_of(1))
        store.put_pack(key_of(1), pack_bytes(1))
        assert store.read_pack(key_of(1)) == pack_bytes(1)


def test_a_lost_index_finds_its_packs_again(tmp_path: Path) -> None:
    before = tree(filled(tmp_path))
    (tmp_path / "index.sqlite").unlink()
    with opened(tmp_path) as store:
        assert {key for key, _ in store.packs()} == {key_of(number) for number in range(5)}
    after = tree(tmp_path)
    assert {name for name in before if name.endswith(".pack")} <= after.keys()


def test_names_from_outside_never_name_files(tmp_path: Path) -> None:
    keys = ["../../outside", "/etc/passwd", "a/../../b", "\0", "CON", "x" * 1024]
    with opened(tmp_path / "store") as store:
        store.commit(dict.fromkeys(keys, b""))
        store.put_pack(b"../../../../../../../../etc/pass", b"data")
    files = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert files == {"index.sqlite", "lock", b"../../../../../../../../etc/pass".hex() + ".pack"}


# ---------------------------------------------------------------------------------------------- finishing


def test_equal_contents_are_equal_bytes(tmp_path: Path) -> None:
    """Whatever the order in which they were written, and whatever was written and dropped before."""
    straight, crooked = tmp_path / "a", tmp_path / "b"
    records = {f"iteration/{number:08}": key_of(number) for number in range(2000)}
    with opened(straight) as store:
        store.commit(records)
        for number in range(40):
            store.put_pack(key_of(number), pack_bytes(number))
    for number in reversed(range(40)):
        with opened(crooked) as store:
            store.put_pack(key_of(number + 5), pack_bytes(number + 5))
            store.put_pack(key_of(number), pack_bytes(number))
            store.commit(
                {f"iteration/{i:08}": key_of(i) for i in range(number, 2000, 40)} | {"old": b""}, ["older"]
            )
    with opened(crooked) as store:
        store.commit({}, ["old"])
        for number in range(40, 45):
            store.drop_pack(key_of(number))
    for folder in (straight, crooked):
        finish(folder)
    assert tree(straight) == tree(crooked)
    before = tree(straight)
    finish(straight)
    assert tree(straight) == before
    assert set(before) - {name for name in before if name.startswith("packs/")} == {"index.sqlite", "lock"}


def test_reading_a_finished_store_changes_nothing(tmp_path: Path) -> None:
    finish(filled(tmp_path))
    before, times = tree(tmp_path), {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    with opened(tmp_path, read_only=True) as store:
        contents(store)
    assert tree(tmp_path) == before
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == times


def test_a_finished_store_can_be_written_again(tmp_path: Path) -> None:
    finish(filled(tmp_path))
    with opened(tmp_path) as store:
        store.commit({"new": b"1"})
        store.put_pack(key_of(77), pack_bytes(77))
        assert [key for key, _ in store.packs()][-1] == key_of(77)


# ---------------------------------------------------------------------------------------------- who may open it

READ = """
from pathlib import Path
from tests.service.stores import contents, opened
for _ in range(5):
    with opened(Path(sys.argv[1]), read_only=True) as store:
        found = contents(store)
print(len(found[0]), len(found[1]), flush=True)
with opened(Path(sys.argv[1]), read_only=True) as store:
    print("open", flush=True)
    sys.stdin.read()
"""


def test_many_processes_read_while_nobody_writes(tmp_path: Path) -> None:
    finish(filled(tmp_path))
    with child(READ, tmp_path) as a, child(READ, tmp_path) as b, child(READ, tmp_path) as c:
        for process in (a, b, c):
            assert (answer(process), answer(process)) == ("10 5", "open")
        with pytest.raises(StoreError, match=r"in use: processes read it"):
            open_store(tmp_path)
    with opened(tmp_path) as store:
        store.commit({"a": b""})


def test_nobody_reads_while_another_process_writes(tmp_path: Path) -> None:
    with (
        opened(filled(tmp_path)),
        pytest.raises(StoreError, match=rf"in use: process {os.getpid()} .* writes it"),
    ):
        open_store(tmp_path, read_only=True)


WRITE = """
from pathlib import Path
from apportion.service.store import open_store
store = open_store(Path(sys.argv[1]))
store.commit({"written": b"yes"})
print("open", flush=True)
sys.stdin.read()
"""


def test_a_killed_writer_lets_others_in_at_once(tmp_path: Path) -> None:
    with child(WRITE, filled(tmp_path)) as process:
        assert answer(process) == "open"
        with pytest.raises(StoreError, match=rf"process {process.pid} on"):
            open_store(tmp_path)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert (tmp_path / "index.sqlite-wal").stat().st_size
        with opened(tmp_path, read_only=True) as store:  # what it committed is in the log still
            assert dict(store.records("written")) == {"written": b"yes"}
        with opened(tmp_path) as store:
            assert dict(store.records("written")) == {"written": b"yes"}
        assert {path.name for path in tmp_path.iterdir()} == {"index.sqlite", "lock", "packs"}


def test_a_copy_without_its_lock_file_can_be_read(tmp_path: Path) -> None:
    finish(filled(tmp_path / "store"))
    shutil.copytree(tmp_path / "store", tmp_path / "copy", ignore=shutil.ignore_patterns("lock"))
    with opened(tmp_path / "copy", read_only=True) as store:
        assert len(list(store.packs())) == 5


# ---------------------------------------------------------------------------------------------- what goes wrong

UNPRIVILEGED = """
import os
from pathlib import Path
from tests.service.stores import contents, key_of, opened, pack_bytes
from apportion.service.errors import StoreError
from apportion.service.store import open_store
if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
folder = Path(sys.argv[1])
with opened(folder / "store", read_only=True) as store:
    print(*map(len, contents(store)), flush=True)
for path in (folder / "store", folder / "new"):
    try:
        open_store(path)
    except StoreError as error:
        print(error, flush=True)
"""


def test_missing_permissions_name_the_path_and_what_to_do() -> None:
    with tempfile.TemporaryDirectory() as name:  # pytest's own folders let no other user in
        folder = Path(name)
        finish(filled(folder / "store"))
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)
        try:
            with child(UNPRIVILEGED, folder) as process:
                assert answer(process) == "10 5"
                for path in ("store/lock", "new"):
                    said = answer(process)
                    assert f"{folder / path}: Permission denied; this process runs as user" in said, said
                    assert said.endswith("let it write there, or choose another folder"), said
        finally:
            for path in (folder, *folder.rglob("*")):
                path.chmod(0o755)


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """The system refuses to make files larger, as a full disk does in the middle of a write."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_takes_no_more_loses_nothing(tmp_path: Path) -> None:
    with opened(filled(tmp_path)) as store:
        before = contents(store)
        with files_of_at_most(1 << 20):
            with pytest.raises(StoreError, match=r"cannot store a pack: .*MiB are free; make room"):
                store.put_pack(key_of(50), bytes(2 << 20))
            with pytest.raises(StoreError, match=r"cannot commit records: .*MiB are free; make room"):
                store.commit(dict.fromkeys(map(str, range(20)), bytes(1 << 17)))
            assert contents(store) == before
        assert not list(tmp_path.rglob("*.part"))
        store.put_pack(key_of(50), bytes(2 << 20))
        store.commit({"large": bytes(2 << 20)})
    with opened(tmp_path) as store:
        records, packs = contents(store)
        assert (len(records), len(packs)) == (11, 6)


def test_a_store_of_a_newer_release_is_left_alone(tmp_path: Path) -> None:
    finish(filled(tmp_path))
    with sqlite3.connect(tmp_path / "index.sqlite") as database:
        database.execute("PRAGMA user_version = 3")
    database.close()
    before = tree(tmp_path)
    for read_only in (True, False):
        with pytest.raises(
            VersionError, match=r"index.sqlite is a store of format version 3, this release reads 2: use"
        ):
            open_store(tmp_path, read_only=read_only)
    assert tree(tmp_path) == before


def test_a_store_of_version_1_is_taken_over(tmp_path: Path) -> None:
    """As releases up to 0.1.0 of November 2026 wrote it: an index that never shrinks."""
    finish(filled(tmp_path))
    index = tmp_path / "index.sqlite"
    with closing(sqlite3.connect(index, isolation_level=None)) as database:
        database.execute("PRAGMA auto_vacuum = NONE")
        database.execute("VACUUM")
        database.execute("PRAGMA user_version = 1")
    with closing(open_store(tmp_path, read_only=True)) as store:  # loaders read both
        before = contents(store)
    with closing(open_store(tmp_path)) as store:
        assert contents(store) == before
    with closing(sqlite3.connect(index)) as database:
        assert database.execute("PRAGMA user_version").fetchone() == (2,)
        assert database.execute("PRAGMA auto_vacuum").fetchone() == (2,)


def test_the_index_shrinks_when_records_go(tmp_path: Path) -> None:
    index = tmp_path / "index.sqlite"
    with closing(open_store(tmp_path)) as store:
        keys = [f"iteration/{number:06d}" for number in range(4000)]
        store.commit({key: os.urandom(2000) for key in keys})
    full = index.stat().st_size
    with closing(open_store(tmp_path)) as store:
        for start in range(0, len(keys), 500):
            store.commit({}, keys[start : start + 500])
        assert index.stat().st_size < full / 10  # at once, not at the next start
        assert not list(store.records())


def test_a_reserve_is_kept_and_given_up(tmp_path: Path) -> None:
    with closing(open_store(tmp_path)) as store:
        assert not (tmp_path / "reserve").exists()  # a folder of precompute has none
        store.keep_room()
        size = (tmp_path / "reserve").stat().st_size
        assert 0 < size <= 4 << 20
        store.make_room()
        assert (tmp_path / "reserve").stat().st_size == 0
        store.keep_room()
        assert (tmp_path / "reserve").stat().st_size > 0


def test_another_program_s_database_is_left_alone(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "index.sqlite") as database:
        database.execute("CREATE TABLE theirs (x)")
    database.close()
    with pytest.raises(StoreError, match="another program's database"):
        open_store(tmp_path)


def test_a_file_that_is_no_database_is_named(tmp_path: Path) -> None:
    filled(tmp_path)
    (tmp_path / "index.sqlite").write_bytes(b"hello" * 1000)
    for read_only in (True, False):
        with pytest.raises(StoreError, match=r"index.sqlite: .*not a database; .*move it away"):
            open_store(tmp_path, read_only=read_only)


def test_an_index_whose_making_was_interrupted(tmp_path: Path) -> None:
    (tmp_path / "index.sqlite").touch()
    with pytest.raises(StoreError, match="is empty: whoever made it was killed"):
        open_store(tmp_path, read_only=True)
    with opened(filled(tmp_path), read_only=True) as store:
        assert len(list(store.packs())) == 5


def test_a_path_through_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"cannot open the store: .*file"):
        open_store(tmp_path / "file" / "store")


# ---------------------------------------------------------------------------------------------- checking


@pytest.fixture
def planned_store(tmp_path: Path) -> Path:
    """A finished store of two planned iterations, one of them in its compact form."""
    job = Job(Cluster(1, 4), Model(), Policy(find_recipe("fcp")), 512)
    batches = (Batch.from_lengths([900, 300, 120]),)
    planned = plan_job(job, batches)
    bodies = tuple(planned.plan.slice_for(rank).encode() for rank in range(4))
    with opened(folder := tmp_path / "planned") as store:
        store.commit({"iteration/0": key_of(1)})
        key = job.request_key(batches)
        store.put_pack(key, Pack(key, planned.plan.id, "slices", 4, bodies).encode())
        assert planned.assignment is not None
        compact = Pack(key_of(0), planned.plan.id, "assignment", 4, (planned.assignment,))
        store.put_pack(key_of(0), compact.encode())
    finish(folder)
    return folder


def test_a_good_store_is_good(tmp_path: Path, planned_store: Path) -> None:
    steps: list[tuple[int, int]] = []
    report = check_store(planned_store, verify=True, progress=lambda done, all: steps.append((done, all)))
    assert (report.records, report.packs, report.bad) == (1, 2, ())
    assert report.bytes == sum(path.stat().st_size for path in planned_store.rglob("*.pack"))
    assert steps == [(0, 2), (1, 2), (2, 2)]


def test_each_bad_pack_is_named(tmp_path: Path, planned_store: Path) -> None:
    with opened(planned_store, read_only=True) as store:
        good = [Pack.decode(store.read_pack(key) or b"") for key, _ in store.packs()]
    slices = next(pack for pack in good if pack.form == "slices")
    swapped = slices.bodies[::-1]
    packs = {
        1: Pack(key_of(1), slices.id, "slices", slices.ranks, swapped).encode(),
        2: Pack(key_of(2), key_of(0), "slices", slices.ranks, slices.bodies).encode(),
        3: Pack(key_of(77), slices.id, "slices", slices.ranks, slices.bodies).encode(),
        4: b"not a pack",
        5: Pack(key_of(5), slices.id, "assignment", 4, (b"no assignment",)).encode(),
        6: slices.encode(),
        7: slices.encode(),
    }
    with opened(planned_store) as store:
        for number, data in packs.items():
            store.put_pack(key_of(number), data)
    pack_path(planned_store, key_of(6)).unlink()
    with pack_path(planned_store, key_of(7)).open("ab") as file:
        file.write(b"x")
    found = {bad.path: bad.why for bad in check_store(planned_store, verify=True).bad}
    said = [found[pack_path(planned_store, key_of(number))] for number in range(1, 8)]
    expected = [
        "that of rank",
        "a body is of plan",
        "not that of its name",
        "not a pack",
        "assignment",
        "no such file",
        "bytes, the index says",
    ]
    assert len(found) == 7
    for text, part in zip(said, expected, strict=True):
        assert part in text

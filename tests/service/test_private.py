"""Keys in files: made once, closed to others, found by clients of the same user while the server lives."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from apportion.ir.errors import ConfigError
from apportion.service.private import (
    ADMIN_KEY,
    RUNTIME,
    Shown,
    key_of_server,
    own_key,
    private_folder,
    read_secret,
)

KEY = "the-key-of-a-server-0123"


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(RUNTIME, str(tmp_path / "runtime"))
    return tmp_path / "runtime"


@pytest.fixture
def shown(runtime: Path) -> Iterator[Shown]:
    found = Shown("127.0.0.1", 8321, KEY)
    yield found
    found.close()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_key_is_made_once(tmp_path: Path) -> None:
    private_folder(tmp_path / "store")
    keys: list[str] = []
    threads = [threading.Thread(target=lambda: keys.append(own_key(tmp_path / "store"))) for _ in range(1)]
    for thread in threads:
        thread.start()
        thread.join()
    assert own_key(tmp_path / "store") == keys[0]
    assert len(keys[0]) == 43
    assert mode(tmp_path / "store") == 0o700
    assert mode(tmp_path / "store" / ADMIN_KEY) == 0o600
    assert [path.name for path in (tmp_path / "store").iterdir()] == [ADMIN_KEY]


def test_a_store_that_others_could_open_is_closed_to_them(tmp_path: Path) -> None:
    (folder := tmp_path / "store").mkdir(0o755)
    folder.chmod(0o755)
    (folder / "index.sqlite").touch()
    (folder / "packs").mkdir()
    private_folder(folder)
    assert mode(folder) == 0o700


def test_a_folder_of_other_things_is_not_closed_but_refused(tmp_path: Path) -> None:
    (folder := tmp_path / "project").mkdir()
    folder.chmod(0o755)
    (folder / "train.py").touch()
    with pytest.raises(ConfigError, match=r"--dir .*train\.py.*chmod 700"):
        private_folder(folder)
    assert mode(folder) == 0o755
    folder.chmod(0o700)
    private_folder(folder)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is no folder"):
        private_folder(tmp_path / "file")


@pytest.mark.parametrize("bits", [0o644, 0o640, 0o660, 0o604, 0o602])
def test_a_key_that_others_can_read_is_refused(tmp_path: Path, bits: int) -> None:
    (path := tmp_path / "key").write_text(KEY)
    path.chmod(bits)
    with pytest.raises(ConfigError, match=f"(?s)others can read.*{bits:04o}.*chmod 600") as told:
        read_secret(path)
    assert KEY not in str(told.value)
    path.chmod(0o400)
    assert read_secret(path) == KEY


@pytest.mark.parametrize("data", [b"", b" \n", b"\xff\xfe", b"x" * 5000])
def test_what_is_no_key_is_refused(tmp_path: Path, data: bytes) -> None:
    (path := tmp_path / "key").write_bytes(data)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="key"):
        read_secret(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_secret(tmp_path / "nothing")


def test_clients_find_the_key_while_the_server_lives(shown: Shown, runtime: Path) -> None:
    assert mode(runtime) == 0o700
    assert [mode(path) for path in runtime.iterdir()] == [0o600]
    assert key_of_server("127.0.0.1", 8321) == ("127.0.0.1", KEY)
    assert key_of_server("localhost", 8321) == ("127.0.0.1", KEY)
    for host, port in (("127.0.0.1", 8322), ("127.0.0.2", 8321), ("10.0.0.1", 8321), ("example.org", 8321)):
        assert key_of_server(host, port) is None
    shown.close()
    assert key_of_server("127.0.0.1", 8321) is None
    assert not list(runtime.iterdir())


def test_a_server_on_all_addresses_is_found_on_loopback(runtime: Path) -> None:
    found = Shown("0.0.0.0", 8321, KEY)
    assert key_of_server("127.0.0.1", 8321) == ("127.0.0.1", KEY)
    found.close()


def test_nobody_gets_the_key_of_a_server_that_died(runtime: Path) -> None:
    """A stranger may listen on its port now: what it left is no reason to send the key there."""
    pid = os.fork()
    if not pid:
        Shown("127.0.0.1", 8321, KEY)
        os._exit(0)
    os.waitpid(pid, 0)
    assert (runtime / "127.0.0.1-8321.key").read_text() == KEY
    assert key_of_server("127.0.0.1", 8321) is None
    again = Shown("127.0.0.1", 8321, "another-key-0123456789")
    assert key_of_server("127.0.0.1", 8321) == ("127.0.0.1", "another-key-0123456789")
    again.close()


def test_a_file_that_was_tidied_away_is_written_anew(shown: Shown, runtime: Path) -> None:
    (runtime / "127.0.0.1-8321.key").unlink()
    assert key_of_server("127.0.0.1", 8321) is None
    shown.refresh()
    assert key_of_server("127.0.0.1", 8321) == ("127.0.0.1", KEY)
    shown.refresh()
    assert key_of_server("127.0.0.1", 8321) == ("127.0.0.1", KEY)


def test_what_others_could_have_put_there_is_not_believed(
    shown: Shown, runtime: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = runtime / "127.0.0.1-8321.key"
    path.chmod(0o644)
    assert key_of_server("127.0.0.1", 8321) is None
    path.chmod(0o600)
    runtime.chmod(0o777)
    assert key_of_server("127.0.0.1", 8321) is None
    other = Shown("127.0.0.1", 8400, KEY)
    assert "not of this user alone" in caplog.text
    assert not (runtime / "127.0.0.1-8400.key").exists()
    other.close()
    runtime.chmod(0o700)
    path.rename(runtime / "real")
    path.symlink_to(runtime / "real")
    assert key_of_server("127.0.0.1", 8321) is None

"""`apportion serve` as a process of its own, with real workers."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import trustme
import urllib3

from apportion.cli import main
from apportion.service.http.child import ServerStartError, Serving, serving
from tests.service.servers import ADMIN, KEY, Caller, begin, make_job, plan_path, ready, submit, until

MINUTE_S = 60.0


def caller_of(server: Serving, key: str | None = None) -> Caller:
    return Caller(server.url, key, urllib3.PoolManager(maxsize=2, retries=False, timeout=MINUTE_S))


def test_a_server_goes_on_where_it_was(tmp_path: Path) -> None:
    log = tmp_path / "log"
    bodies = []
    for run in range(2):
        with serving(tmp_path / "store", options=["--log-format", "json"], log=log) as server:
            caller = caller_of(server)
            assert make_job(caller).status == (200 if run else 201)
            assert begin(caller) == 1
            assert submit(caller, 0).status == (200 if run else 201)
            bodies.append(ready(caller, 0).body)
            caller.http.clear()
        assert server.process.returncode == 0
    assert bodies[0] == bodies[1]
    events = [json.loads(line) for line in log.read_text().splitlines()]
    assert {"time", "level", "event"} <= set(events[0])
    put = next(event for event in events if event.get("method") == "PUT")
    assert put["path"] == "/v1/jobs/run/epochs/1/iterations/0"
    assert put["status"] == 201
    assert put["ms"] > 0
    assert put["request_id"]
    assert not [event for event in events if event["level"] not in ("INFO", "DEBUG")]
    assert KEY not in log.read_text()


def test_a_killed_server_loses_nothing(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        caller = caller_of(server)
        make_job(caller)
        begin(caller)
        assert [submit(caller, i).status for i in range(8)] == [201] * 8
        os.kill(server.pid, signal.SIGKILL)
        server.process.wait(MINUTE_S)
        caller.http.clear()
    began_s = time.monotonic()
    with serving(tmp_path) as server:
        assert time.monotonic() - began_s < MINUTE_S
        caller = caller_of(server)
        assert [ready(caller, i).status for i in range(8)] == [200] * 8
        caller.http.clear()


def test_sigterm_ends_it_in_time_and_stores_what_was_planned(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        caller = caller_of(server)
        make_job(caller)
        begin(caller)
        for i in range(16):
            submit(caller, i)
        waiting = socket.create_connection(_address(server), MINUTE_S)
        waiting.sendall(
            f"GET {plan_path(99)}?wait_s=60 HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n\r\n".encode()
        )
        idle = socket.create_connection(_address(server), MINUTE_S)
        began_s = time.monotonic()
        os.kill(server.pid, signal.SIGTERM)
        assert server.process.wait(MINUTE_S) == 0
        assert time.monotonic() - began_s < 50  # the one who waits would for 60
        assert b" 202 " in waiting.recv(1 << 16).split(b"\r\n")[0]  # who waits is told to ask again
        waiting.close()
        idle.close()
        caller.http.clear()
    with serving(tmp_path) as server:
        caller = caller_of(server)
        assert [ready(caller, i).status for i in range(16)] == [200] * 16
        caller.http.clear()


def test_it_ends_with_its_parent(tmp_path: Path) -> None:
    program = (
        "import os\n"
        "from apportion.service.http.child import serving\n"
        f"with serving({str(tmp_path)!r}) as server:\n"
        "    print(server.pid, flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=MINUTE_S)
    assert ended.returncode == -signal.SIGKILL
    until(lambda: not _is_alive(int(ended.stdout)))


def test_two_servers_cannot_share_a_store(tmp_path: Path) -> None:
    with (
        serving(tmp_path),
        pytest.raises(ServerStartError, match=r"(?i)process|holds|in use"),
        serving(tmp_path),
    ):
        pass


def test_a_port_that_is_taken_is_told(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(ServerStartError, match=r"(?i)address already in use"),
            serving(tmp_path, port=port),
        ):
            pass


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_beyond_loopback_it_wants_a_key(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--host", host, "--port", "0", "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["field"] == "--host"
    assert "--admin-key-file" in error["message"]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (["--workers", "0"], "--workers"),
        (["--workers", "many"], "--workers"),
        (["--store", "file:x"], "store"),
        (["--host", "no such host"], "--host"),
        (["--log-format", "xml"], "--log-format"),
        (["--ssl-keyfile", "key.pem"], "--ssl-keyfile"),
    ],
)
def test_wrong_options_are_named(
    options: list[str], field: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--dir", str(tmp_path), "--port", "0", "--json", *options]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["field"] == field


def test_a_short_admin_key_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "key").write_text("secret\n")
    assert main(["serve", "--admin-key-file", str(tmp_path / "key"), "--json"]) == 2
    told = capsys.readouterr().out
    assert json.loads(told)["error"]["field"] == "--admin-key-file"
    assert "secret" not in told


def test_it_serves_with_tls_and_an_admin_key(tmp_path: Path) -> None:
    ca, (key, certificate) = tmp_path / "ca.pem", (tmp_path / "key.pem", tmp_path / "cert.pem")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(ca)
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_pem.write_to_path(key)
    issued.cert_chain_pems[0].write_to_path(certificate)
    (tmp_path / "admin").write_text(ADMIN + "\n")
    options = ["--admin-key-file", str(tmp_path / "admin")]
    options += ["--ssl-keyfile", str(key), "--ssl-certfile", str(certificate)]
    with serving(tmp_path / "store", options=options) as server:
        assert server.url.startswith("https://127.0.0.1:")
        url = server.url
        http = urllib3.PoolManager(ca_certs=str(ca), retries=False, timeout=MINUTE_S)
        caller = Caller(url, ADMIN, http)
        assert make_job(caller).json["url"] == f"{url}/v1/jobs/run"
        assert caller.using(None)("GET", "/v1/jobs").status == 401
        begin(caller)
        submit(caller, 0)
        first = ready(caller, 0)
        again = caller.using(KEY)("GET", plan_path(0))
        assert (again.body, again.headers["etag"]) == (first.body, first.headers["etag"])
        http.clear()


def test_it_says_how_to_go_on(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "apportion", "serve", "--port", "0", "--dir", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline().decode() for _ in range(8)]
        process.send_signal(signal.SIGINT)
        assert process.wait(MINUTE_S) == 0
    text = "".join(lines)
    assert "Serving http://127.0.0.1:" in lines[0]
    assert str(tmp_path) in text
    assert "1 worker of this machine" in text
    assert "apportion job create run1 --server http://127.0.0.1:" in text


def _address(server: Serving) -> tuple[str, int]:
    host, port = server.url.removeprefix("http://").rsplit(":", 1)
    return host, int(port)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"

"""`apportion serve` as a process of its own, with real workers."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import pytest
import trustme
import urllib3

from apportion.cli import main
from apportion.service.client import Client, UnreachableError, create_job
from apportion.service.http.connection import RESERVE
from apportion.service.http.run import door
from apportion.service.http.run.child import ServerStartError, Serving, serving
from apportion.service.private import key_of_server
from tests.service.engines import JOB
from tests.service.servers import ADMIN, KEY, Caller, begin, live, make_job, plan_path, ready, submit, until

MINUTE_S = 60.0


def caller_of(server: Serving) -> Caller:
    """With the admin key that the server has made."""
    found = key_of_server(*_address(server))
    assert found is not None
    return Caller(server.url, found[1], urllib3.PoolManager(maxsize=2, retries=False, timeout=MINUTE_S))


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
        "from apportion.service.http.run.child import serving\n"
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
def test_beyond_loopback_it_wants_a_key(
    host: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--insecure", "--dir", str(tmp_path)]
    assert main(["serve", "--host", host, "--port", "0", "--json", *options]) == 2
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
    (tmp_path / "key").chmod(0o600)
    options = ["--admin-key-file", str(tmp_path / "key"), "--dir", str(tmp_path / "store")]
    assert main(["serve", *options, "--json"]) == 2
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
    (tmp_path / "admin").chmod(0o600)
    options = ["--admin-key-file", str(tmp_path / "admin")]
    options += ["--ssl-keyfile", str(key), "--ssl-certfile", str(certificate)]
    with serving(tmp_path / "store", options=options) as server:
        assert server.url.startswith("https://127.0.0.1:")
        url = server.url
        http = urllib3.PoolManager(ca_certs=str(ca), retries=False, timeout=MINUTE_S)
        caller = Caller(url, ADMIN, http)
        assert make_job(caller).json["url"] == "/v1/jobs/run"
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
        lines = [process.stdout.readline().decode() for _ in range(9)]
        process.send_signal(signal.SIGINT)
        assert process.wait(MINUTE_S) == 0
    text = "".join(lines)
    assert "Serving http://127.0.0.1:" in lines[0]
    assert str(tmp_path) in text
    assert "1 worker of this machine" in text
    assert "apportion job create run1 --server http://127.0.0.1:" in text


def test_nobody_has_to_read_what_it_logs(tmp_path: Path) -> None:
    """More than a pipe holds: it goes on answering, ends when told, and what found no room is counted."""
    command = [sys.executable, "-m", "apportion", "serve", "--port", "0", "--dir", str(tmp_path), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            url = json.loads(process.stdout.readline())["url"]
            caller = Caller(url, None, urllib3.PoolManager(retries=False, timeout=MINUTE_S))
            for number in range(300):
                assert caller("GET", f"/v1/{number}{'x' * 5000}").status == 404
            process.send_signal(signal.SIGTERM)
            assert process.wait(MINUTE_S) == 0
        finally:
            process.kill()
        told = process.stderr.read().decode()
    lines = [line for line in told.splitlines() if " request " in line]
    assert len(lines) > 20
    assert all(len(line) < 2000 for line in lines)
    assert "client=127.0.0.1:" in lines[0]
    assert "reason=" in lines[0]


def _address(server: Serving) -> tuple[str, int]:
    host, port = server.url.removeprefix("http://").rsplit(":", 1)
    return host, int(port)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_command_of_the_same_user_needs_no_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(tmp_path / "store", options=["--store", "memory"]) as server:
        assert stat.S_IMODE((tmp_path / "store").stat().st_mode) == 0o700
        assert main(["job", "create", "run", "--server", server.url, "--ranks", "2", "--json"]) == 0
        made = json.loads(capsys.readouterr().out)
        assert made["url"] == f"{server.url}/v1/jobs/run"
        assert main(["job", "key", "add", "run", "--role", "read", "--server", server.url, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["role"] == "read"
        nobody = Caller(server.url, None, urllib3.PoolManager(retries=False, timeout=MINUTE_S))
        assert nobody("GET", "/v1/jobs").status == 401
        assert nobody("DELETE", "/v1/jobs/run").status == 401
        nobody.http.clear()
        assert main(["job", "delete", "run", "--server", server.url.replace("127.0.0.1", "localhost")]) == 0
    told = [json.loads(line) for line in (tmp_path / "store" / "audit.log").read_text().splitlines()]
    assert {line["action"] for line in told} == {"create", "add-key", "refused", "delete"}
    assert stat.S_IMODE((tmp_path / "store" / "audit.log").stat().st_mode) == 0o600


def test_an_insecure_server_is_that_of_all_users(tmp_path: Path) -> None:
    with serving(tmp_path / "store", options=["--insecure"]) as server:
        assert key_of_server(*_address(server)) is None
        assert not (tmp_path / "store" / "admin.key").exists()
        nobody = Caller(server.url, None, urllib3.PoolManager(retries=False, timeout=MINUTE_S))
        assert make_job(nobody).status == 201
        assert nobody("DELETE", "/v1/jobs/run").status == 204
        nobody.http.clear()


def issue(authority: trustme.CA, folder: Path, name: str) -> tuple[Path, Path]:
    """Key and certificate of a server or a client."""
    key, certificate = folder / f"{name}.key", folder / f"{name}.pem"
    issued = authority.issue_cert(name)
    issued.private_key_pem.write_to_path(key)
    issued.cert_chain_pems[0].write_to_path(certificate)
    return key, certificate


def test_certificates_and_keys_are_read_anew(tmp_path: Path) -> None:
    """SIGHUP stops nothing: new connections get the new certificate, and the admin key is the new one."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    key, certificate = issue(authority, tmp_path, "127.0.0.1")
    (admin := tmp_path / "admin").write_text(ADMIN)
    admin.chmod(0o600)
    options = ["--ssl-keyfile", str(key), "--ssl-certfile", str(certificate), "--admin-key-file", str(admin)]
    with serving(tmp_path / "store", options=options, log=tmp_path / "log") as server:
        address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
        first = ssl.get_server_certificate(address)
        http = urllib3.PoolManager(ca_certs=str(tmp_path / "ca.pem"), retries=False, timeout=MINUTE_S)
        caller = Caller(server.url, ADMIN, http)
        assert make_job(caller).status == 201
        issue(authority, tmp_path, "127.0.0.1")
        admin.write_text("the-next-admin-key-0123")
        os.kill(server.pid, signal.SIGHUP)
        until(lambda: ssl.get_server_certificate(address) != first)
        assert caller("GET", "/v1/jobs").status == 401
        assert caller.using("the-next-admin-key-0123")("GET", "/v1/jobs").status == 200
        assert key_of_server(*address) == ("127.0.0.1", "the-next-admin-key-0123")
        second = ssl.get_server_certificate(address)
        certificate.write_text("not a certificate")
        os.kill(server.pid, signal.SIGHUP)
        until(lambda: "reload failed" in (tmp_path / "log").read_text())
        assert ssl.get_server_certificate(address) == second
        http.clear()


def test_connections_count_before_their_handshake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that say nothing take the room of one address, for a while, and no more of the server."""
    monkeypatch.setattr(door, "_HANDSHAKE_S", 2.0)
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    key, certificate = issue(authority, tmp_path, "127.0.0.1")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    http = urllib3.PoolManager(ca_certs=str(tmp_path / "ca.pem"), retries=False, timeout=MINUTE_S)
    with live(connections=8, tls=tls) as server, ExitStack() as opened:
        caller = replace(server.caller, http=http)
        with ThreadPoolExecutor(4) as several:  # as many as one address may have
            assert list(several.map(lambda _: caller("GET", "/v1/jobs").status, range(4))) == [200] * 4
        http.clear()
        until(lambda: not server.server.server_state.connections)
        idle = [opened.enter_context(closing(server.connect())) for _ in range(60)]
        until(
            lambda: sum(is_closed(client) for client in idle) >= 60 - 4 - RESERVE
        )  # half, and what probes may have
        assert not all(map(is_closed, idle))
        until(lambda: all(map(is_closed, idle)))
        assert caller("GET", "/v1/jobs").status == 200
        http.clear()


def is_closed(client: socket.socket) -> bool:
    """Whether the server has ended the connection."""
    client.setblocking(False)
    try:
        return client.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def test_clients_show_certificates_where_they_are_asked_to(tmp_path: Path) -> None:
    authority, stranger = trustme.CA(), trustme.CA()
    authority.cert_pem.write_to_path(ca := tmp_path / "ca.pem")
    key, certificate = issue(authority, tmp_path, "127.0.0.1")
    options = ["--ssl-keyfile", str(key), "--ssl-certfile", str(certificate), "--ssl-ca-certs", str(ca)]
    pems: dict[str, Path] = {}
    for name, issuer in (("rank", authority), ("stranger", stranger)):
        issued = issuer.issue_cert(f"{name}.example")
        issued.private_key_and_cert_chain_pem.write_to_path(pems.setdefault(name, tmp_path / f"{name}.both"))
    with serving(tmp_path / "store", options=options) as server:
        with create_job(server.url, "run", JOB, ca=ca, cert=pems["rank"]) as client:
            assert client.begin("first") == 1
        for cert in (None, pems["stranger"]):
            with (
                pytest.raises(UnreachableError),
                Client(client.url, client.key, ca=ca, cert=cert, timeout_s=1) as one,
            ):
                one.begin("first")


@pytest.mark.parametrize(
    ("flag", "text"), [("keyfile", None), ("certfile", None), ("ca-certs", None), ("keyfile", "x")]
)
def test_a_tls_file_that_is_not_there_is_named(
    flag: str, text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key, certificate = issue(trustme.CA(), tmp_path, "127.0.0.1")
    paths = {"keyfile": key, "certfile": certificate, "ca-certs": certificate}
    paths[flag] = tmp_path / "gone.pem"
    if text is not None:
        paths[flag].write_text(text)
    options = [word for name, path in paths.items() for word in (f"--ssl-{name}", str(path))]
    assert main(["serve", "--dir", str(tmp_path / "store"), "--port", "0", "--json", *options]) == 2
    told = json.loads(capsys.readouterr().out)["error"]
    assert str(paths[flag]) in told["message"]
    assert told["field"] == ("--ssl-certfile" if text else f"--ssl-{flag}")


def test_a_redis_password_is_nowhere_to_be_seen(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Nobody answers there; what is said about it has no password in it."""
    (file := tmp_path / "password").write_text("a-secret-of-redis")
    file.chmod(0o600)
    common = ["serve", "--dir", str(tmp_path / "store"), "--port", "0", "--json"]
    url = "redis://:a-secret-of-redis@127.0.0.1:1/0"
    assert main([*common, "--store", url]) == 2
    assert "--redis-password-file" in (told := capfd.readouterr().out)
    assert json.loads(told)["error"]["field"] == "--store"
    for options in (
        ["--store", "redis://127.0.0.1:1/0", "--redis-password-file", str(file)],
        ["--store", "redis://:a-secret-of-redis@127.0.0.1:x/0"],
        ["--store", "file:a-secret-of-redis@127.0.0.1"],
    ):
        assert main([*common, *options]) != 0
        printed = capfd.readouterr()
        assert "a-secret-of-redis" not in told + printed.out + printed.err

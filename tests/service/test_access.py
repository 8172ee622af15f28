"""Who may do what: keys of a job and their roles, what strangers learn, and what is written down about it."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.service.servers import (
    ADMIN,
    KEY,
    Caller,
    Live,
    begin,
    live,
    make_job,
    plan_path,
    ready,
    submit,
    until,
)

READER = "key-that-only-reads-0123"
KEYS = "/v1/jobs/run/keys"


@pytest.fixture
def server() -> Iterator[Live]:
    with live() as found:
        assert make_job(found.caller).status == 201
        yield found


@pytest.fixture
def admin(server: Live) -> Caller:
    return server.caller


def add(admin: Caller, key: str, role: str = "submit") -> str:
    made = admin("POST", KEYS, {"role": role, "key": key})
    assert made.status == 201
    return str(made.json["id"])


def test_a_jobs_key_is_rotated_while_it_runs(admin: Caller) -> None:
    begin(admin)
    submit(admin, 0)
    new = add(admin, "key-that-comes-next-0123")
    (old,) = [key["id"] for key in admin("GET", KEYS).json["keys"] if key["id"] != new]
    assert ready(admin, 0).status == 200  # both open it
    assert admin.using("key-that-comes-next-0123")("GET", plan_path(0)).status == 200
    assert admin("DELETE", f"{KEYS}/{old}").status == 204
    assert admin.using(KEY)("GET", plan_path(0)).status == 401
    assert admin.using("key-that-comes-next-0123")("GET", plan_path(0)).status == 200
    assert make_job(admin, key="key-that-comes-next-0123").status == 200  # what a launcher asks again
    last = admin("DELETE", f"{KEYS}/{new}")
    assert (last.status, last.json["field"]) == (409, "key")
    assert admin("DELETE", f"{KEYS}/{'0' * 16}").status == 404


def test_keys_are_told_once_and_kept_as_digests(admin: Caller, server: Live) -> None:
    made = admin("POST", KEYS, {"role": "read"})
    assert made.status == 201
    assert admin.using(made.json["key"])("GET", "/v1/jobs/run").status == 200
    told = admin("GET", KEYS)
    assert made.json["key"].encode() not in told.body
    assert [sorted(key) for key in told.json["keys"]] == [["id", "key", "role"]] * 2
    assert {key["key"] for key in told.json["keys"]} == {None}
    assert made.json["key"] not in repr(server.engine.job("run"))


def test_a_key_that_only_reads_changes_nothing(admin: Caller) -> None:
    add(admin, READER, "read")
    reader = admin.using(READER)
    early = reader("POST", "/v1/jobs/run/epochs", {"run": "first"})
    assert (early.status, early.problem) == (425, "too-early")
    assert begin(admin) == 1
    assert reader("POST", "/v1/jobs/run/epochs", {"run": "first"}).json["epoch"] == 1
    submit(admin, 0)
    assert ready(admin, 0).status == 200
    assert reader("GET", plan_path(0)).status == 200
    refused = reader("PUT", "/v1/jobs/run/epochs/1/iterations/1", {"batches": []})
    assert (refused.status, refused.problem) == (403, "forbidden")
    assert reader("DELETE", "/v1/jobs/run").status == 403
    assert reader("POST", KEYS, {}).status == 403
    assert reader("GET", KEYS).status == 403
    other = admin("POST", KEYS, {"role": "submit", "key": READER})
    assert (other.status, other.json["field"]) == (409, "role")


def test_keys_outlive_the_server(admin: Caller, server: Live) -> None:
    add(admin, READER, "read")
    record = server.engine.job("run").record()
    assert READER.encode() not in record
    from apportion.service.engine.kept.records import JobRecord, decode

    assert [key.role for key in decode("job/run", record, JobRecord).keys] == ["submit", "read"]


def test_two_authorization_headers_are_one_too_many(server: Live) -> None:
    paths = (
        "/v1/jobs",
        "/v1/jobs/run",
        plan_path(0),
        "/v1/jobs/run/epochs/1/ranks/0/stream",
        "/healthz",
        "/metrics",
    )
    for path in paths:
        for first, second in ((ADMIN, "x" * 20), ("x" * 20, ADMIN), (KEY, KEY)):
            with server.connect() as sock:
                lines = [f"GET {path} HTTP/1.1", "Host: x", f"Authorization: Bearer {first}"]
                lines += [f"authorization: Bearer {second}", "Connection: close", "", ""]
                sock.sendall("\r\n".join(lines).encode())
                head = sock.recv(1 << 16)
            assert head.startswith(b"HTTP/1.1 422 "), (path, head)


def test_strangers_are_told_nothing_about_the_server(admin: Caller) -> None:
    nobody = admin.using(None)
    for path in ("/metrics", "/docs", "/openapi.json", "/v1/jobs", "/v1/jobs/run", "/v1/jobs/run/keys"):
        for caller in (nobody, admin.using("x" * 20)):
            assert caller("GET", path).status == 401, path
    for path in ("/metrics", "/docs", "/openapi.json"):
        assert admin("GET", path).status == 200
        assert admin.using(KEY)("GET", path).status == 401
    for path in ("/healthz", "/readyz"):
        assert set(nobody("GET", path).json) == {"status", "reason"}


def test_what_a_client_writes_as_host_is_in_no_answer(admin: Caller) -> None:
    for path in ("/v1/jobs", "/v1/jobs/run"):
        assert b"evil.example" not in admin("GET", path, host="evil.example").body
    made = admin(
        "POST", "/v1/jobs", {"name": "run", "job": admin("GET", "/v1/jobs/run").json["job"], "key": KEY}
    )
    assert made.json["url"] == "/v1/jobs/run"


def audited(caplog: pytest.LogCaptureFixture) -> list[Any]:
    return [record for record in caplog.records if record.getMessage() == "audit"]


def test_it_is_written_down_who_did_what(admin: Caller, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "apportion.service"):
        id = add(admin, READER, "read")
        for _ in range(50):
            admin.using("x" * 20)("DELETE", "/v1/jobs/run")
        admin.using(READER)("GET", plan_path(0))
        admin("DELETE", f"{KEYS}/{id}")
        admin("DELETE", "/v1/jobs/run")
        until(
            lambda: "delete" in [record.facts["action"] for record in audited(caplog)]
        )  # logged after the answer
    found = [record.facts for record in audited(caplog)]
    told = [(facts["action"], facts.get("job"), facts.get("who")) for facts in found]
    assert told[0] == ("add-key", "run", "admin")
    assert told[1][0] == "refused"
    assert told[2:] == [("revoke-key", "run", "admin"), ("delete", "run", "admin")]
    assert found[2]["key"] == id
    assert all(re.fullmatch(r"127\.0\.0\.1:\d+", str(facts["client"])) for facts in found)
    assert not any(key in caplog.text for key in (READER, ADMIN, KEY))

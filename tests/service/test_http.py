"""The interface on a real server: every route, every problem, and connections that misbehave."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import msgspec
import pytest

from apportion import ConfigError, ExecutionError, Plan
from apportion.ir.bytes.iteration_slice import IterationSlice
from apportion.ir.bytes.transport import decompress
from apportion.service.frames import ALIVE, HEAD, PROBLEM_FRAME, SLICE
from apportion.service.http.openapi import EXAMPLE
from apportion.service.http.serve import Server, serving
from apportion.service.http.tokens import ANYONE, Tokens
from apportion.service.problems import KINDS
from tests.processes import descendants, running
from tests.service.requests import MSGPACK, RANKS, TOKEN, Request, client_of

ZSTD = {"accept-encoding": "zstd"}


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx.Client]:
    with client_of(server.url) as connected:
        yield connected


def slice_of(client: httpx.Client, request: Request, rank: int, **headers: str) -> httpx.Response:
    return client.get(f"/v1/plans/{request.hex}/ranks/{rank}?wait_s=30", headers=headers)


def ready(client: httpx.Client, request: Request) -> Request:
    assert request.put(client).status_code in (200, 202)
    assert slice_of(client, request, 0).status_code == 200
    return request


def frames(data: bytes) -> list[tuple[int, bytes]]:
    parsed = []
    while data:
        kind, size = HEAD.unpack_from(data)
        parsed.append((kind, data[HEAD.size : HEAD.size + size]))
        data = data[HEAD.size + size :]
    return parsed


# ---- plans by key


def test_slices_of_a_submitted_request_are_immutable(client: httpx.Client) -> None:
    request = Request(0)
    first = request.put(client, ahead=3)
    assert first.status_code == 202
    assert first.json()["key"] == request.hex
    for rank, expected in enumerate(request.slices()):
        answer = slice_of(client, request, rank, **{"accept-encoding": "identity"})
        assert answer.content == expected
        assert "immutable" in answer.headers["cache-control"]
        tag = answer.headers["etag"]
        again = slice_of(client, request, rank, **{"accept-encoding": "identity", "if-none-match": tag})
        assert (again.status_code, again.content) == (304, b"")
        with client.stream("GET", f"/v1/plans/{request.hex}/ranks/{rank}", headers=ZSTD) as packed:
            assert packed.headers["content-encoding"] == "zstd"
            assert packed.headers["etag"] != tag
            assert decompress(b"".join(packed.iter_raw())) == expected
    assert request.put(client).status_code == 200


def test_json_and_msgpack_are_the_same_request(client: httpx.Client) -> None:
    request = Request(1)
    data = {"job": request.job.to_data(), "batches": [batch.to_data() for batch in request.batches]}
    assert client.put(f"/v1/plans/{request.hex}", json=data).status_code == 202
    assert slice_of(client, request, 0).status_code == 200
    assert request.put(client).status_code == 200


def test_an_unfinished_plan_is_answered_with_202(client: httpx.Client) -> None:
    slow = [Request(number) for number in range(200, 220)]
    for request in slow:
        request.put(client)
    answer = client.get(f"/v1/plans/{slow[-1].hex}/ranks/0?wait_s=0")
    assert answer.status_code == 202
    assert answer.headers["retry-after"] == "1"
    assert client.get(f"/v1/plans/{slow[-1].hex}").json()["state"] in ("queued", "planning")


def test_state_report_and_list_of_plans(client: httpx.Client) -> None:
    request = ready(client, Request(2))
    state = client.get(f"/v1/plans/{request.hex}").json()
    assert (state["state"], state["ranks"], state["tenant"]) == ("ready", RANKS, ANYONE)
    assert state["report"]["tokens"] == 802
    assert state["id"] == IterationSlice.decode(request.slices()[0]).id.hex()
    assert request.hex in [plan["key"] for plan in client.get("/v1/plans?count=5").json()["plans"]]
    page = client.get(f"/v1/plans/{request.hex}", headers={"accept": "text/html"})
    assert page.text.startswith("<!doctype html>")
    hour = client.get("/v1/hour").json()
    assert hour["minutes"][-1]["planned"] + hour["minutes"][-2]["planned"] >= 1
    assert [row["tenant"] for row in hour["tenants"]] == ["", ANYONE]
    assert hour["tenants"][0]["planning_s"] > 0


def test_a_plan_can_be_requested_in_plain_json(client: httpx.Client) -> None:
    answer = client.post("/v1/plan", json=EXAMPLE)
    assert answer.status_code == 200
    assert answer.json()["report"]["ranks"] == 4
    whole = client.post("/v1/plan", json=EXAMPLE, headers={"accept": "application/vnd.apportion.plan"})
    assert Plan.decode(whole.content).id.hex() == answer.json()["report"]["plans"][0]


# ---- streams


def test_a_stream_has_slices_in_the_order_of_its_keys(client: httpx.Client) -> None:
    requests = [Request(number) for number in (10, 11, 12)]
    for request in reversed(requests):
        request.put(client)
    keys = [requests[0].hex, "00" * 32, requests[1].hex, requests[2].hex]
    answer = client.get("/v1/ranks/1/stream", params={"key": keys, "wait_s": 30})
    received = [frame for frame in frames(answer.content) if frame[0] != ALIVE]
    assert [kind for kind, _ in received] == [SLICE, PROBLEM_FRAME, SLICE, SLICE]
    assert msgspec.json.decode(received[1][1])["type"] == "unknown-plan"
    for (_, body), request in zip([received[0], *received[2:]], requests, strict=True):
        assert decompress(body) == request.slices()[1]


def test_a_stream_ends_where_a_slice_is_not_ready_in_time(client: httpx.Client) -> None:
    requests = [Request(number) for number in range(230, 260)]
    for request in requests:
        request.put(client)
    answer = client.get("/v1/ranks/1/stream", params={"key": [requests[-1].hex], "wait_s": 0})
    assert frames(answer.content) in ([], [(SLICE, frames(answer.content)[0][1])] if answer.content else [])


# ---- problems


@pytest.mark.parametrize(
    ("method", "path", "type", "field"),
    [
        ("GET", f"/v1/plans/{'00' * 32}/ranks/0", "unknown-plan", None),
        ("GET", f"/v1/plans/{'00' * 32}", "unknown-plan", None),
        ("GET", "/v1/plans/abc/ranks/0", "invalid", "key"),
        ("GET", f"/v1/plans/{'00' * 32}/ranks/a", "invalid", "rank"),
        ("GET", f"/v1/plans/{'00' * 32}/ranks/0?wait_s=nan", "invalid", "wait_s"),
        ("GET", f"/v1/plans/{'00' * 32}/ranks/0?wait_s=61", "invalid", "wait_s"),
        ("GET", f"/v1/plans/{'AA' * 32}/ranks/0", "invalid", "key"),
        ("GET", f"/v1/plans/{'00' * 32}/ranks/\N{ARABIC-INDIC DIGIT ONE}", "invalid", "rank"),
        ("GET", "/v1/ranks/0/stream", "invalid", "key"),
        ("GET", "/v1/plans?count=0", "invalid", "count"),
        ("DELETE", "/v1/plans", "method", None),
        ("GET", "/v2", "not-found", None),
        ("POST", "/v1/plan", "media-type", None),
    ],
)
def test_a_wrong_request_gets_a_problem(
    client: httpx.Client, method: str, path: str, type: str, field: str
) -> None:
    answer = client.request(method, path)
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert (problem["type"], problem["status"], problem.get("field")) == (type, answer.status_code, field)
    assert (problem["status"], problem["remedy"]) == (KINDS[type].status, KINDS[type].remedy)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"batches": []}, "batches"),
        ({"batches": [{"lengths": [-1]}]}, "lengths[0]"),
        ({"batches": [{"lengths": [[1]]}]}, "lengths"),
        ({"job": {**EXAMPLE["job"], "tokens_per_rank": 0}}, "job.tokens_per_rank"),
        ({"job": {**EXAMPLE["job"], "policy": {"recipe": "best"}}}, "recipe"),
        ({"more": 1}, None),
    ],
)
def test_a_wrong_field_is_named(client: httpx.Client, change: dict, field: str | None) -> None:
    problem = client.post("/v1/plan", json=EXAMPLE | change).json()
    assert problem["type"] == "invalid"
    assert field is None or problem["field"].startswith(field)


def test_a_wrong_key_and_an_unknown_rank_are_refused(client: httpx.Client) -> None:
    wrong = client.put(f"/v1/plans/{'00' * 32}", content=Request(3).data, headers=MSGPACK)
    assert (wrong.status_code, wrong.json()["type"]) == (409, "wrong-key")
    assert Request(3).hex in wrong.json()["detail"]
    request = ready(client, Request(3))
    assert client.get(f"/v1/plans/{request.hex}/ranks/{RANKS}").status_code == 404
    assert client.put(f"/v1/plans/{request.hex}", content=b"\xff", headers=MSGPACK).status_code == 422


def test_too_many_tokens_are_refused(client: httpx.Client) -> None:
    answer = client.post("/v1/plan", json=EXAMPLE | {"batches": [{"lengths": [10**6]}]})
    assert (answer.status_code, answer.json()["type"]) == (422, "refused")
    assert "raise tokens_per_rank" in answer.json()["detail"]


# ---- tokens


def test_without_the_token_only_open_paths_are_answered(server: Server) -> None:
    with client_of(server.url, None) as client:
        for path in ("/v1/plans", "/metrics", f"/v1/plans/{'00' * 32}/ranks/0", "/v1/ranks/0/stream"):
            assert client.get(path).status_code == 401
            assert client.get(path, headers={"authorization": "Bearer " + "0" * 32}).status_code == 401
        assert client.put(f"/v1/plans/{'00' * 32}", content=b"a" * 10**6).status_code == 401
        for path in ("/", "/healthz", "/readyz", "/docs", "/openapi.json"):
            assert client.get(path).status_code == 200


def test_tokens_are_read_from_lines(tmp_path: Path) -> None:
    file = tmp_path / "tenants"
    file.write_text("# two teams\none: 0123456789abcdef\n\ntwo: fedcba9876543210\n")
    tokens = Tokens.read(None, file)
    assert tokens.tenant(b"Bearer fedcba9876543210") == "two"
    assert tokens.tenant(b"Bearer fedcba987654321") is None
    assert tokens.tenant(b"") is None
    assert Tokens().tenant(b"") == ANYONE
    assert "0123" not in repr(tokens)
    for text, rule in (
        ("one", "line 1"),
        ("# nobody\n", "names no tenant"),
        ("one: short", "16"),
        ("a: 0123456789abcdef\nb: 0123456789abcdef", "same"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=rule):
            Tokens.read(None, file)
    with pytest.raises(ConfigError, match="16"):
        Tokens.read("", None)  # an empty file must not start a server without a token


# ---- connections

HOST = " HTTP/1.1\r\nHost: a\r\n"
ENDLESS = "X: a\r\n" * 1000


def send_raw(server: Server, data: bytes, limit_s: float = 5.0) -> bytes:
    """Sends bytes; returns the server's output until it closes the connection."""
    parts = urlsplit(server.url)
    received, until = b"", time.monotonic() + limit_s
    with socket.create_connection((parts.hostname, parts.port), timeout=limit_s) as line, suppress(OSError):
        line.sendall(data)
        while time.monotonic() < until and (part := line.recv(1 << 16)):
            received += part
    return received


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (f"GET /healthz{HOST}Transfer-Encoding: chunked\r\n\r\n0\r\n{ENDLESS}", b"411"),
        (f"PUT /v1/plans/a{HOST}Content-Length: 99999999\r\n\r\n", b"401"),
        (f"PUT /v1/plans/a{HOST}Content-Length: 9999999\r\nAuthorization: Bearer {TOKEN}\r\n\r\n", b"413"),
        (f"GET /{100_000 * 'a'}{HOST}\r\n", b"400"),
        (f"GET /healthz{HOST}X: {100_000 * 'a'}\r\n\r\n", b"400"),
    ],
    ids=["trailers", "no-token", "large", "url", "header"],
)
def test_oversized_and_endless_requests_are_not_read(server: Server, data: str, status: bytes) -> None:
    received = send_raw(server, data.encode())
    assert received.startswith(b"HTTP/1.1 " + status) or not received  # a reset may overtake the answer
    assert httpx.get(f"{server.url}/healthz").status_code == 200


def test_a_token_in_a_trailer_is_not_accepted(server: Server) -> None:
    head = f"POST /v1/plan{HOST}Trailer: authorization\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"
    received = send_raw(server, f"{head}Authorization: Bearer {TOKEN}\r\n\r\n".encode())
    assert b" 401 " in received.split(b"\r\n")[0]


# ---- the server


def test_openapi_has_every_route_and_metrics_count(client: httpx.Client) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    assert {"/v1/plans/{key}/ranks/{rank}", "/v1/ranks/{rank}/stream", "/v1/plan"} <= set(paths)
    ready(client, Request(4))
    text = client.get("/metrics").text
    assert 'apportion_plans_total{state="ready"}' in text
    assert "apportion_planning_seconds_bucket" in text


def test_a_server_ends_its_workers_when_it_stops(tmp_path: Path) -> None:
    with serving(tmp_path, options=["--workers", "1"]) as server:
        with client_of(server.url, None) as client:
            ready(client, Request(5))
        children = descendants(server.pid)
        assert children
    assert not running(children, 10.0)


def test_a_killed_server_leaves_its_plans_and_no_workers(tmp_path: Path) -> None:
    with serving(tmp_path, options=["--workers", "1"]) as server, client_of(server.url, None) as client:
        ready(client, Request(6))
        time.sleep(0.3)
        children = descendants(server.pid)
        server.process.kill()
        server.process.wait()
    assert not running(children, 10.0)
    with serving(tmp_path, options=["--workers", "1"]) as server, client_of(server.url, None) as client:
        assert Request(6).put(client).status_code == 200
        answer = slice_of(client, Request(6), 2, **{"accept-encoding": "identity"})
        assert answer.content == Request(6).slices()[2]


def test_a_port_in_use_is_named(server: Server) -> None:
    port = urlsplit(server.url).port
    with pytest.raises(ExecutionError, match="--host, --port"), serving(None, options=["--port", str(port)]):
        pass

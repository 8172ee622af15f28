"""Every route and every status of protocol v1, on a real server."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest

from apportion.ir.bytes.iteration_slice import IterationSlice
from apportion.service.engine import Engine
from apportion.service.http.auth import key_digest
from apportion.service.limits import Limits
from apportion.service.protocol import FRAMES, PLAN, PLAN_VERSION
from tests.service.engines import JOB, LocalPool
from tests.service.servers import (
    KEY,
    Caller,
    Live,
    begin,
    live,
    make_job,
    plan_path,
    ready,
    submit,
    thread,
    until,
)

JOBS = "/v1/jobs"
RUN = f"{JOBS}/run"


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live() as found:
        make_job(found.caller)
        begin(found.caller)
        submit(found.caller, 0)
        ready(found.caller, 0)
        yield found


@pytest.fixture
def admin(server: Live) -> Caller:
    return server.caller


@pytest.fixture
def member(server: Live) -> Caller:
    return server.caller.using(KEY)


# ---------------------------------------------------------------------------------------------- jobs


def test_a_job_is_created_once(admin: Caller) -> None:
    first, again = make_job(admin, "once"), make_job(admin, "once")
    assert (first.status, again.status) == (201, 200)
    assert first.json == again.json == {"name": "once", "key": KEY, "url": "/v1/jobs/once"}
    other = make_job(admin, "once", lookahead=3)
    assert (other.status, other.problem, other.json["field"]) == (409, "conflict", "lookahead")
    assert make_job(admin, "once", key="another-key-0123456789").json["field"] == "key"


def test_a_job_gets_a_random_key(admin: Caller) -> None:
    made = make_job(admin, "random", key=None)
    assert made.status == 201
    key = made.json["key"]
    assert len(key) == 43
    assert admin.using(key)("GET", f"{JOBS}/random").status == 200
    assert make_job(admin, "random", key=None).status == 409  # nobody who does not know the key gets it


def test_jobs_are_read_listed_and_deleted(admin: Caller, member: Caller) -> None:
    made = make_job(admin, "brief")
    told = member("GET", f"{JOBS}/brief").json
    assert told["job"] == JOB.to_data()
    assert (told["ranks"], told["lookahead"], told["epoch"]) == (2, 8, 0)
    names = [job["name"] for job in admin("GET", JOBS).json["jobs"]]
    assert "brief" in names
    assert names == sorted(names)
    assert made.json["url"] == told["url"]
    assert admin("DELETE", f"{JOBS}/brief").status == 204
    gone = member("GET", f"{JOBS}/brief")
    assert (gone.status, gone.problem, gone.json["field"]) == (404, "not-found", "job")
    assert admin("DELETE", f"{JOBS}/brief").status == 404


# ---------------------------------------------------------------------------------------------- epochs, iterations


def test_equal_runs_are_one_epoch(admin: Caller, member: Caller) -> None:
    make_job(admin, "epochs")
    path = f"{JOBS}/epochs/epochs"
    first = member("POST", path, {"run": "a"})
    assert (first.status, first.json) == (201, {"epoch": 1, "stream": "train", "run": "a"})
    assert member("POST", path, {"run": "a"}).status == 200
    assert member("GET", f"{path}/1").json == {
        "epoch": 1, "stream": "train", "run": "a", "front": 0, "floor": 0, "held": 0, "queued": 0,
    }  # fmt: skip
    assert member("GET", f"{path}/2").status == 404
    assert member("POST", path, {"run": "b"}).json["epoch"] == 2
    assert member("GET", f"{path}/1").problem == "gone"
    for answer in (
        submit(admin, 0, name="epochs"),
        member("GET", plan_path(0, name="epochs")),
        member("GET", f"{path}/1/ranks/0/stream"),
        member("GET", f"{path}/1/iterations/0"),
    ):
        assert answer.status == 410
    beside = member("POST", path, {"run": "a", "stream": "eval"})
    assert (beside.status, beside.json) == (201, {"epoch": 3, "stream": "eval", "run": "a"})
    assert member("GET", f"{path}/2").json["stream"] == "train"
    told = member("GET", f"{JOBS}/epochs").json
    assert (told["epoch"], told["streams"]) == (3, {"train": 2, "eval": 3})
    assert member("POST", path, {"run": "a", "stream": ""}).json["field"] == "stream"


def test_an_iteration_is_submitted_once(admin: Caller, member: Caller) -> None:
    assert (submit(admin, 5).status, submit(admin, 5).status) == (201, 200)
    other = submit(admin, 5, number=6)
    assert (other.status, other.problem, other.json["field"]) == (409, "conflict", "batches")
    plan = ready(admin, 5)
    told = member("GET", f"{RUN}/epochs/1/iterations/5").json
    assert (told["iteration"], told["state"]) == (5, "ready")
    assert told["id"] == IterationSlice.decode(plan.body).id.hex()
    assert told["planned_ms"] > 0
    assert told["ready_at"] <= time.time()
    assert member("GET", f"{RUN}/epochs/1/iterations/999").status == 404


def test_iterations_that_no_rank_takes_are_limited() -> None:
    limits = Limits(pending=2, queue_total=3, drain_s=2.0)
    with live(LocalPool(held=True), limits) as server:
        for name in ("run", "other"):
            make_job(server.caller, name)
            begin(server.caller, name)
        assert [submit(server.caller, i).status for i in range(3)] == [201, 201, 429]
        refused = submit(server.caller, 2)
        assert refused.problem == "quota"
        assert int(refused.headers["retry-after"]) >= 1
        assert [submit(server.caller, i, number=9 + i, name="other").status for i in range(2)] == [201, 503]
        full = submit(server.caller, 1, number=10, name="other")
        assert full.problem == "overload"
        assert full.headers["retry-after"] == "1"


def test_batches_that_cannot_be_planned_are_named() -> None:
    pool = LocalPool()
    pool.deadly, pool.slow = {1}, {2}
    with live(pool) as server:
        make_job(server.caller)
        begin(server.caller)
        for iteration, problem in ((1, "quarantined"), (2, "refused")):
            assert submit(server.caller, iteration).status == 201
            answer = ready(server.caller, iteration)
            assert (answer.status, answer.problem) == (409, problem)
            told = server.caller.using(KEY)("GET", f"{RUN}/epochs/1/iterations/{iteration}").json
            assert told["state"] == problem
            assert told["detail"] == answer.json["detail"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"batches": []}, "batches"),
        ({"batches": [{"lengths": [0]}]}, "lengths"),
        ({"batches": [{"lengths": [5000]}]}, None),  # more tokens than the job's ranks hold
        ({"batches": [{"lengths": [1], "colour": 1}]}, "colour"),
        ({"batches": [{"lengths": [1]}] * 2}, "batches"),
        ({"batch": [{"lengths": [1]}]}, "batch"),
        ({}, "batches"),
        ([], "body"),
        (None, None),
    ],
)
def test_wrong_batches_name_the_field(member: Caller, body: object, field: str | None) -> None:
    answer = member("PUT", f"{RUN}/epochs/1/iterations/77", body)
    if body is None:
        assert answer.status == 415
        return
    assert answer.status == 422, answer
    assert answer.problem == "invalid"
    assert field is None or field in answer.json["field"]


def with_steps(**steps: object) -> dict[str, object]:
    """A job with other steps in its recipe."""
    data = JOB.to_data()
    recipe = data["policy"]["recipe"]
    return data | {"policy": data["policy"] | {"recipe": recipe | {"steps": recipe["steps"] | steps}}}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"name": "../etc"}, "name"),
        ({"name": ".."}, "name"),
        ({"name": "a" * 65}, "name"),
        ({"name": "naïve"}, "name"),
        ({"key": "short"}, "key"),
        ({"key": "with a space in between"}, "key"),
        ({"lookahead": 0}, "lookahead"),
        ({"lookahead": "8"}, "lookahead"),
        ({"job": {}}, "cluster"),
        ({"job": JOB.to_data() | {"tokens_per_rank": -1}}, "tokens_per_rank"),
        ({"job": JOB.to_data() | {"hardware": "/etc/passwd"}}, "hardware"),
        ({"job": with_steps(place={"lptt": {}})}, "recipe.steps.place"),
        ({"job": with_steps(place={"lpt": {"solver": "nope"}})}, "solver of kind partition"),
        ({"job": with_steps(place={"lpt": {"cap": 1}})}, "recipe.place.lpt"),
        ({"job": with_steps(schedule={"matchings": {"buffers": 0}})}, "recipe.schedule.matchings.buffers"),
        ({"jobs": 1}, "jobs"),
    ],
)
def test_wrong_jobs_name_the_field(admin: Caller, change: dict[str, object], field: str) -> None:
    answer = make_job(admin, **{"name": "wrong", **change})
    assert (answer.status, answer.problem) == (422, "invalid")
    assert field in answer.json["field"]


# ---------------------------------------------------------------------------------------------- plans


def test_a_plan_is_the_same_for_ever(member: Caller) -> None:
    first, again = member("GET", plan_path(0)), member("GET", plan_path(0))
    assert first.status == 200
    assert first.body == again.body
    assert first.headers["etag"] == again.headers["etag"]
    assert re.fullmatch('"[0-9a-f]{64}"', first.headers["etag"])
    assert first.headers["content-type"] == PLAN_VERSION
    assert IterationSlice.decode(first.body).rank == 0
    assert member("GET", plan_path(0, 1)).headers["etag"] != first.headers["etag"]


def counted(admin: Caller, name: str) -> str:
    """What the server tells of it."""
    (line,) = re.findall(
        rf"^apportion_{name}_total (.*)$", admin("GET", "/metrics").body.decode(), re.MULTILINE
    )
    return str(line)


def test_head_is_get_without_the_body(admin: Caller, member: Caller) -> None:
    whole, before = member("GET", plan_path(0)), counted(admin, "deliveries")
    head = member("HEAD", plan_path(0))
    assert counted(admin, "deliveries") == before  # no rank has it by that
    assert (head.status, head.body) == (200, b"")
    for name in ("etag", "content-length", "content-type"):
        assert head.headers[name] == whole.headers[name]
    assert member("HEAD", plan_path(888)).status == 202
    assert member("HEAD", plan_path(0, 9)).status == 404


def test_errors_of_streams_are_not_counted_as_plans(admin: Caller, member: Caller) -> None:
    def plans() -> list[str]:
        return re.findall(
            r"^apportion_plan_requests_total.*$", admin("GET", "/metrics").body.decode(), re.MULTILINE
        )

    before = plans()
    assert member("GET", "/v1/jobs/run/epochs/1/ranks/99/stream").status == 404
    assert plans() == before


@pytest.mark.parametrize("form", ["{}", "W/{}", '"x", {}', "*", '"x" ,W/{}'])
def test_who_has_the_plan_is_not_sent_it(member: Caller, form: str) -> None:
    etag = member("GET", plan_path(0)).headers["etag"]
    answer = member("GET", plan_path(0), if_none_match=form.format(etag))
    assert (answer.status, answer.body, answer.headers["etag"]) == (304, b"", etag)
    assert member("GET", plan_path(0), if_none_match='"x"').status == 200


@pytest.mark.parametrize(
    ("accept", "status"),
    [
        ("*/*", 200),
        (PLAN, 200),
        (f"{PLAN};version=2", 200),
        (f'{PLAN}; version="2"; q=0.5', 200),
        (f"{PLAN}; version=3, {PLAN}; version=2", 200),
        (f"{PLAN}; version=3, */*; q=0.1", 200),
        ("application/json", 200),
        (f"{PLAN}; version=3", 406),
        (f"{PLAN}; version=3, {PLAN}; version=2; q=0", 406),
        (f"{PLAN}; version=3, text/html; q=x", 406),
    ],
)
def test_versions_have_to_meet(member: Caller, accept: str, status: int) -> None:
    answer = member("GET", plan_path(0), accept=accept)
    assert answer.status == status
    if status == 406:
        assert (answer.problem, answer.json["field"]) == ("not-acceptable", "Accept")


def test_versions_of_streams_have_to_meet(member: Caller) -> None:
    path = f"{RUN}/epochs/1/ranks/0/stream?window=1"
    for version, status in (("2", 200), ("3", 406)):
        assert member("GET", path, accept=f"{FRAMES}; version={version}").status == status


def test_who_asks_too_early_waits(server: Live, admin: Caller, member: Caller) -> None:
    early = member("GET", plan_path(30))
    assert (early.status, early.headers["retry-after"]) == (202, "1")
    assert early.json == {"iteration": 30, "state": "waiting"}
    assert member("GET", plan_path(30) + "?wait_s=0.01").headers["retry-after"] == "0"
    answers: list[int] = []
    waiting = thread(lambda: answers.append(member("GET", plan_path(30) + "?wait_s=60").status))
    until(lambda: server.engine.snapshot().waiting > 0)
    submit(admin, 30)
    waiting.join(60)
    assert answers == [200]


def test_who_goes_no_longer_waits(server: Live) -> None:
    with server.connect() as client:
        head = f"GET {plan_path(40)}?wait_s=60 HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n\r\n"
        client.sendall(head.encode())
        until(lambda: server.engine.snapshot().waiting == 1)
    until(lambda: server.engine.snapshot().waiting == 0)


@pytest.mark.parametrize(
    ("path", "field"),
    [
        (plan_path(0) + "?wait_s=-1", "wait_s"),
        (plan_path(0) + "?wait_s=nan", "wait_s"),
        (plan_path(0) + "?wait_s=3601", "wait_s"),
        (plan_path(0) + "?wait_s=1&wait_s=2", "query"),
        (plan_path(0) + "?wait=1", "query.wait"),
        (f"{RUN}/epochs/1/iterations/x/ranks/0/plan", "iteration"),
        (f"{RUN}/epochs/1/iterations/0/ranks/-1/plan", "rank"),
        (f"{RUN}/epochs/1/iterations/0/ranks/1e9/plan", "rank"),
        (f"{RUN}/epochs/1/iterations/{10**15}/ranks/0/plan", "iteration"),
        (f"{RUN}/epochs/١/iterations/0/ranks/0/plan", "epoch"),
        (f"{JOBS}/a%20b/epochs/1/iterations/0/ranks/0/plan", "job"),
        (f"{JOBS}/%2e%2e/epochs/1/ranks/0/stream", "job"),
        (f"{RUN}/epochs/1/ranks/0/stream?from=x", "from"),
        (f"{RUN}/epochs/1/ranks/0/stream?window=0", "window"),
        (f"{RUN}/epochs/1/ranks/0/stream?window=1&windows=2", "query.windows"),
        (f"{RUN}/epochs/x/iterations/0", "epoch"),
        (f"{RUN}/epochs/1/iterations/+1", "iteration"),
        (f"{JOBS}/a%00b", "job"),
    ],
)
def test_what_cannot_be_is_named(member: Caller, path: str, field: str) -> None:
    answer = member("GET", path)
    assert (answer.status, answer.json["field"]) == (422, field)
    assert answer.problem


@pytest.mark.parametrize(
    "path",
    [
        plan_path(0, 9),
        plan_path(0, epoch=7),
        f"{RUN}/epochs/1/ranks/2/stream",
        f"{RUN}/epochs/7/ranks/0/stream",
        f"{JOBS}/../../etc/passwd",
        f"{JOBS}/%2e%2e%2f%2e%2e%2fetc%2fpasswd",
        f"{JOBS}/run%2Fnothing",
        f"{RUN}/epochs/1/iterations/0/ranks/0",
        "/nothing",
        "//v1/jobs",
        f"{JOBS}/",
    ],
)
def test_what_is_not_there(member: Caller, path: str) -> None:
    answer = member("GET", path)
    assert (answer.status, answer.problem) == (404, "not-found")


def test_only_the_admin_is_told_that_there_is_no_such_job(admin: Caller, member: Caller) -> None:
    """A stranger gets the same answer for a job that there is and for one that there is not."""
    make_job(admin, "other", key="key-of-another-job-0123")
    for tail in ("", "/epochs/1", "/epochs/1/iterations/0/ranks/0/plan", "/epochs/1/ranks/0/stream"):
        told = [member("GET", f"{JOBS}/{name}{tail}", x_request_id="one") for name in ("other", "nobody")]
        assert [(answer.status, answer.problem) for answer in told] == [(401, "auth")] * 2
        assert told[0].body == told[1].body
        assert admin("GET", f"{JOBS}/nobody{tail}").status == 404
    told = [
        admin.using("x" * 20)("DELETE", f"{JOBS}/{name}", x_request_id="one") for name in ("other", "nobody")
    ]
    assert (told[0].status, told[0].body) == (401, told[1].body)


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("PUT", JOBS, "GET, POST"),
        ("PATCH", RUN, "DELETE, GET"),
        ("OPTIONS", f"{RUN}/epochs/1/iterations/0", "GET, PUT"),
        ("POST", plan_path(0), "GET, HEAD"),
        ("DELETE", f"{RUN}/epochs/1/ranks/0/stream", "GET"),
        ("POST", "/metrics", "GET"),
    ],
)
def test_methods_that_there_are_not(admin: Caller, method: str, path: str, allow: str) -> None:
    answer = admin(method, path)
    assert (answer.status, answer.problem, answer.headers["allow"]) == (405, "method-not-allowed", allow)


def test_an_iteration_far_behind_is_gone() -> None:
    with live(limits=Limits(keep=1, drain_s=2.0)) as server:
        make_job(server.caller)
        begin(server.caller)
        for iteration in range(4):
            submit(server.caller, iteration)
            ready(server.caller, iteration)
        member = server.caller.using(KEY)
        assert member("GET", plan_path(0)).problem == "gone"
        assert member("GET", f"{RUN}/epochs/1/ranks/0/stream?from=0").problem == "gone"
        assert submit(server.caller, 0).status == 410


# ---------------------------------------------------------------------------------------------- keys

PATHS = [
    ("GET", RUN),
    ("POST", f"{RUN}/epochs"),
    ("GET", f"{RUN}/epochs/1"),
    ("PUT", f"{RUN}/epochs/1/iterations/0"),
    ("GET", f"{RUN}/epochs/1/iterations/0"),
    ("GET", plan_path(0)),
    ("HEAD", plan_path(0)),
    ("GET", f"{RUN}/epochs/1/ranks/0/stream?window=1"),
]
ADMIN_PATHS = [("POST", JOBS), ("GET", JOBS), ("DELETE", RUN)]
WRONG = [None, "", "Bearer", "Basic cnVuOnJ1bg==", "Bearer " + "x" * 24, f"bearer{KEY}", "Bearer " + KEY[:-1]]


@pytest.mark.parametrize("sent", WRONG)
@pytest.mark.parametrize(("method", "path"), PATHS + ADMIN_PATHS)
def test_nothing_without_a_key(admin: Caller, method: str, path: str, sent: str | None) -> None:
    headers = {} if sent is None else {"authorization": sent}
    answer = admin.using(None)(method, path, b"{}" if method in ("POST", "PUT") else None, **headers)
    assert answer.status == 401
    assert answer.headers["www-authenticate"] == 'Bearer realm="apportion"'
    if method != "HEAD":
        assert answer.problem == "auth"


@pytest.mark.parametrize(("method", "path"), PATHS)
def test_what_a_jobs_key_opens(admin: Caller, method: str, path: str) -> None:
    for key in (KEY, admin.key):
        answer = admin.using(key)(method, path, b"{}" if method in ("POST", "PUT") else None)
        assert answer.status in (200, 422)
    make_job(admin, "stranger", key="key-of-a-stranger-0123")
    stranger = admin.using("key-of-a-stranger-0123")
    assert stranger(method, path).status == 401


def test_what_a_jobs_key_does_not_open(member: Caller) -> None:
    assert [member(method, path).status for method, path in ADMIN_PATHS] == [401, 401, 403]


def test_a_server_without_an_admin_key_trusts_its_machine() -> None:
    with live(admin=None) as server:
        nobody = server.caller
        assert make_job(nobody).status == 201
        assert nobody("GET", JOBS).status == 200
        assert nobody("GET", RUN).status == 401  # a job's own key is needed all the same
        assert nobody("DELETE", RUN).status == 204


def test_only_digests_of_keys_are_kept(server: Live) -> None:
    assert isinstance(server.engine, Engine)
    assert [key.digest for key in server.engine.job("run").keys] == [key_digest(KEY)]
    assert KEY not in repr(server.engine.job("run"))


# ---------------------------------------------------------------------------------------------- the server itself


def test_health_and_readiness(admin: Caller) -> None:
    nobody = admin.using(None)
    for path in ("/healthz", "/readyz"):
        answer = nobody("GET", path)
        assert (answer.status, answer.json) == (200, {"status": "ok", "reason": ""})


def test_a_server_without_workers_is_not_ready() -> None:
    pool = LocalPool()
    with live(pool) as server:
        pool.alive = 0
        for restarts, reason in ((0, "its workers are starting"), (1, "none of its 1 workers is alive")):
            pool.restarts = restarts
            answer = server.caller("GET", "/readyz")
            assert answer.status == 503
            assert answer.json == {"status": "not ready", "reason": reason}


def test_metrics_tell_what_happened(admin: Caller, member: Caller) -> None:
    member("GET", plan_path(0))
    text = admin("GET", "/metrics").body.decode()
    names = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    assert all(name.startswith("apportion_") for name in names)
    for line in (
        r'apportion_plan_requests_total\{status="200"\} [1-9]',
        r'apportion_job_epoch\{job="run",stream="train"\} 1\.0',
        r'apportion_requests_total\{method="POST",route="/v1/jobs",status="201"\} [1-9]',
        r"apportion_workers_alive 1\.0",
        r"apportion_request_seconds_count [1-9]",
        r"apportion_process_resident_memory_bytes [1-9]",
    ):
        assert re.search(line, text), line


def test_docs_need_nothing_from_elsewhere(admin: Caller) -> None:
    answer = admin("GET", "/docs")
    page = answer.body.decode()
    assert answer.status == 200
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "<script" not in page
    assert "http://" not in page.replace(admin.url, "")
    assert "https://" not in page
    for path in admin("GET", "/openapi.json").json["paths"]:
        assert path in page


def test_requests_have_ids(admin: Caller) -> None:
    assert re.fullmatch("[0-9a-f]{16}", admin("GET", "/healthz").headers["x-request-id"])
    assert admin("GET", "/healthz", x_request_id="mine-1").headers["x-request-id"] == "mine-1"
    refused = admin("GET", plan_path(0, 9), x_request_id="mine-2")
    assert refused.json["request_id"] == refused.headers["x-request-id"] == "mine-2"
    assert admin("GET", "/healthz", x_request_id='a" b').headers["x-request-id"] != 'a" b'

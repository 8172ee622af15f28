"""One loader over three sources: a service, a folder of plans made before, and a process beside this one."""

from __future__ import annotations

import dataclasses
import multiprocessing
import shutil
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import trustme

from apportion.ir.errors import ConfigError
from apportion.ir.loops.jit import compiling
from apportion.ir.request.batch import Batch
from apportion.ir.request.cluster import Cluster
from apportion.ir.request.model import Model
from apportion.ir.request.sampling import Sampling
from apportion.service.client import PlanTimeoutError, ServiceProblem, UnreachableError, create_job
from apportion.service.http.run.child import Serving, serving
from apportion.service.offline import FACTS, read_facts
from apportion.service.precompute import Work, precompute
from apportion.service.store import open_store
from apportion.service.workers import Planner
from apportion.trainer.loading.loader import PlannedLoader
from apportion.trainer.loading.sources import local
from apportion.trainer.loading.sources.folder import FolderSource
from apportion.trainer.loading.sources.service import ServiceSource
from apportion.trainer.loading.sources.told import check_model
from tests.ranks import jobs_loader, jobs_seam
from tests.ranks.loading import LENGTHS, MODEL, HereSource, Recorded, job, seen
from tests.ranks.rank_pool import Pool

KEY = "a key of the tests".replace(" ", "-")
WAIT_S = 300
JOBS = {"plain": job(2, 66, microbatches=2), "packing": job(2, 66, microbatches=2, recipe="wlb")}
FOUR = job(4, 64, microbatches=2)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture(scope="module")
def urls(server: Serving) -> dict[str, str]:
    """Of a job on the server, by name."""
    for name, own in JOBS.items():
        create_job(server.url, name, own, key=KEY).close()
    for name, own in (("single", job()), ("four", FOUR)):
        create_job(server.url, name, own, key=KEY).close()
    return {name: f"{server.url}/v1/jobs/{name}" for name in (*JOBS, "single", "four")}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of two epochs of a job, by name."""
    made = {}
    with Planner(workers=1) as planner:
        for name, own in {**JOBS, "single": job()}.items():
            made[name] = tmp_path_factory.mktemp("plans") / name
            sampling = Sampling(LENGTHS, own.tokens, own.microbatches, own.policy.seed)
            iterations = 2 * len(sampling.epoch(0))
            precompute(Work(own, LENGTHS, None, iterations), made[name], planner)
    return made


@pytest.fixture(params=["service", "folder"])
def single(request: pytest.FixtureRequest, urls: dict[str, str], folders: dict[str, Path]) -> str | Path:
    """A source of one rank's job, as an argument of the loader."""
    return urls["single"] if request.param == "service" else folders["single"]


def loader_of(
    source: str | HereSource | Path, dataset: Recorded | Broken | None = None, **options: Any
) -> PlannedLoader | None:
    return PlannedLoader(dataset or Recorded(), source=source, key=key_for(source), **options)


def key_for(source: str | HereSource | Path) -> str | None:
    return KEY if isinstance(source, str) and source.startswith("http") else None


# --- one behaviour


@pytest.mark.parametrize("name", JOBS)
def test_batches_and_plans_are_the_same_whoever_plans(
    pool: Pool, urls: dict[str, str], folders: dict[str, Path], name: str
) -> None:
    own = JOBS[name]
    local = {
        "cluster": own.cluster,
        "model": own.model,
        "tokens_per_rank": own.tokens_per_rank,
        "microbatches": own.microbatches,
        "recipe": own.policy.recipe,
    }
    options = {"timeout_s": WAIT_S}
    service = pool.run(jobs_loader.passes, 2, urls[name], 2, options | {"key": KEY})
    folder = pool.run(jobs_loader.passes, 2, folders[name], 2, options)
    here = pool.run(jobs_loader.passes, 2, "local", 2, options | local)
    assert service == folder == here
    (first, _), (second, _) = service
    assert [batch[:5] for batch in first[0]] == [batch[:5] for batch in second[0]]
    assert sum(len(batch[5]) for passes, _ in service for batch in passes[0]) == sum(LENGTHS)


def test_a_job_says_all_that_the_caller_leaves_out(single: str | Path) -> None:
    want = [seen(batch) for batch in loader_of(HereSource(job()))]
    assert [seen(batch) for batch in loader_of(single)] == want
    assert [
        seen(batch) for batch in loader_of(single, cluster=Cluster(1, 1), model=MODEL, tokens_per_rank=64)
    ] == want
    with pytest.raises(ConfigError, match="the job says it"):
        loader_of(single, microbatches=2)


def test_data_loader_processes_read_what_threads_read(single: str | Path) -> None:
    want = [seen(batch) for batch in loader_of(single)]
    dataset = Recorded()
    for workers in (1, 2):
        assert [seen(batch) for batch in loader_of(single, dataset, workers=workers)] == want
    assert dataset.read == []  # each process has its own


class Broken(Recorded):
    def __getitem__(self, index: int) -> None:
        raise OSError("the disk is gone")


def test_an_error_in_a_data_loader_process_leaves_none_behind(folders: dict[str, Path]) -> None:
    before = multiprocessing.active_children()
    with pytest.raises(OSError, match="the disk is gone") as caught:
        list(loader_of(folders["single"], Broken(), workers=2))
    assert caught.tb is not None  # it holds what torch would wait for
    assert set(multiprocessing.active_children()) <= set(before)


def test_epochs_and_middles(single: str | Path) -> None:
    loader, here = loader_of(single), loader_of(HereSource(job()))
    for epoch, start in [(0, 0), (1, 2), (1, 0)]:
        for one in (loader, here):
            one.set_epoch(epoch, start)
        assert [seen(batch) for batch in loader] == [seen(batch) for batch in here]


def test_leaving_early_ends_threads_and_processes(single: str | Path) -> None:
    for options in ({}, {"workers": 2}):
        with closing(iter(loader_of(single, **options))) as batches:
            next(batches)
        assert not [thread for thread in threading.enumerate() if thread.name == "apportion-plans"]
    with closing(iter(PlannedLoader(Recorded(), Cluster(1, 1), MODEL, 64))) as batches:
        next(batches)
    assert not [thread for thread in threading.enumerate() if "apportion" in thread.name]


def test_an_iterator_that_is_still_held_does_not_keep_the_process() -> None:
    for source in ("local", "HereSource(job())"):
        told = "Cluster(1, 1), MODEL, 64, source='local'" if source == "local" else f"source={source}"
        program = (
            "from tests.ranks.loading import MODEL, HereSource, Recorded, job\n"
            "from apportion.ir.request.cluster import Cluster\n"
            "from apportion.trainer.loading.loader import PlannedLoader\n"
            f"batches = iter(PlannedLoader(Recorded(), {told}))\n"
            "print(next(batches).iteration)"
        )
        done = subprocess.run(
            [sys.executable, "-c", program],
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            timeout=WAIT_S,
        )
        assert (done.stdout, done.returncode) == ("0\n", 0), done.stderr


# --- the service


def test_a_wrong_key_or_job_is_named(urls: dict[str, str]) -> None:
    with pytest.raises(ServiceProblem, match="401"):
        PlannedLoader(Recorded(), source=urls["single"], key="another")
    with pytest.raises(ServiceProblem, match=r"40[14]"):
        loader_of(urls["single"].replace("single", "nobody"))
    with pytest.raises(ConfigError, match="url"):
        loader_of("http://127.0.0.1:9/jobs")


def test_an_equal_run_gets_its_plans_again_and_another_one_is_refused(urls: dict[str, str]) -> None:
    want = [seen(batch) for batch in loader_of(urls["single"], run="again")]
    assert [seen(batch) for batch in loader_of(urls["single"], run="again")] == want
    with pytest.raises((ServiceProblem, ConfigError, RuntimeError), match=r"409|not of this batch"):
        list(loader_of(urls["single"], run="again", seed=1))


def test_another_rank_submits_what_nobody_has(pool: Pool, urls: dict[str, str]) -> None:
    first, second = pool.run(jobs_loader.without_rank_0, 2, urls["plain"], KEY)
    assert first == second
    assert len(first) == 4


class Gateway(socketserver.StreamRequestHandler):
    """A proxy that buffers: what answers a stream does not come through."""

    def handle(self) -> None:
        buffers = threading.Event()
        with socket.create_connection(self.server.target) as far:  # type: ignore[attr-defined]
            back = threading.Thread(target=self.back, args=(far, buffers))
            back.start()
            with suppress(OSError):
                while data := self.request.recv(1 << 16):
                    if b"/stream?" in data.partition(b"\r\n")[0]:
                        buffers.set()
                    far.sendall(data)
            with suppress(OSError):
                far.shutdown(socket.SHUT_RDWR)
            back.join()

    def back(self, far: socket.socket, buffers: Any) -> None:
        with suppress(OSError):
            while data := far.recv(1 << 16):
                if not buffers.is_set():
                    self.request.sendall(data)


@contextmanager
def gateway(url: str) -> Iterator[str]:
    """The url of a gateway to the job at `url`."""
    host, port = url.split("/")[2].split(":")
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Gateway) as proxy:
        proxy.target, proxy.daemon_threads = (host, int(port)), True  # type: ignore[attr-defined]
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        yield url.replace(port, str(proxy.server_address[1]))
        proxy.shutdown()


def test_plans_come_one_by_one_where_streams_do_not_come_through(urls: dict[str, str]) -> None:
    with gateway(urls["single"]) as url:
        loader = loader_of(url, timeout_s=WAIT_S)
        begin = time.monotonic()
        assert [seen(batch) for batch in loader] == [seen(batch) for batch in loader_of(urls["single"])]
        assert time.monotonic() - begin < WAIT_S / 2


def test_a_plan_that_does_not_come_says_what_the_network_said(tmp_path: Path) -> None:
    with serving(tmp_path / "server") as server:
        create_job(server.url, "single", job(), key=KEY).close()
        loader = loader_of(f"{server.url}/v1/jobs/single", timeout_s=12.0, lookahead=1)
        batches = iter(loader)
        next(batches)
    with pytest.raises(PlanTimeoutError, match="Connection refused"):
        list(batches)


def test_a_server_s_certificate_is_checked_against_ca(tmp_path: Path) -> None:
    authority = trustme.CA()
    files = {name: tmp_path / f"{name}.pem" for name in ("ca", "key", "cert")}
    own = authority.issue_cert("127.0.0.1")
    authority.cert_pem.write_to_path(files["ca"])
    own.private_key_pem.write_to_path(files["key"])
    own.cert_chain_pems[0].write_to_path(files["cert"])
    options = ("--ssl-keyfile", str(files["key"]), "--ssl-certfile", str(files["cert"]))
    with serving(tmp_path / "server", options=options) as server:
        create_job(server.url, "single", job(), key=KEY, ca=files["ca"]).close()
        url = f"{server.url}/v1/jobs/single"
        with pytest.raises(UnreachableError, match="pass ca="):
            loader_of(url)
        for workers in (0, 1):
            assert len(list(loader_of(url, ca=files["ca"], workers=workers))) == 4


def test_a_source_does_not_show_its_key(urls: dict[str, str]) -> None:
    assert KEY not in repr(ServiceSource.open(urls["single"], KEY))


def test_a_server_that_comes_back_is_waited_for(tmp_path: Path) -> None:
    with serving(tmp_path / "server") as server:
        create_job(server.url, "single", job(), key=KEY).close()
        port, url = int(server.url.rsplit(":", 1)[1]), f"{server.url}/v1/jobs/single"
        loader = loader_of(url, lookahead=1, timeout_s=WAIT_S)
        batches = iter(loader)
        came = [next(batches)]
    later = threading.Thread(target=lambda: came.extend(batches))
    later.start()
    with serving(tmp_path / "server", port=port):
        later.join(WAIT_S)
        assert not later.is_alive()
    want = [seen(batch) for batch in loader_of(HereSource(job()))]
    assert [seen(batch) for batch in came] == want


def test_without_its_server_a_run_plans_itself_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(tmp_path / "server") as server:
        create_job(server.url, "single", job(), key=KEY).close()
        loader = loader_of(f"{server.url}/v1/jobs/single", on_timeout="local", timeout_s=2.0, lookahead=1)
        batches = iter(loader)
        came = [next(batches)]
    begin = time.monotonic()
    came.extend(batches)
    assert time.monotonic() - begin < 2.0 * (len(came) - 1)  # one time-out, not one an iteration
    assert [seen(batch) for batch in came] == [seen(batch) for batch in loader_of(HereSource(job()))]
    assert loader.fallbacks >= 1
    assert "plans it itself" in caplog.text


def test_ranks_agree_where_their_server_stalls(pool: Pool, tmp_path: Path) -> None:
    with serving(tmp_path / "server") as server:
        create_job(server.url, "plain", JOBS["plain"], key=KEY).close()
        url = f"{server.url}/v1/jobs/plain"
        (first, fallbacks), second = pool.run(jobs_loader.stalled, 2, url, KEY, server.pid)
    assert (first, fallbacks) == second
    assert len(first) == 3
    assert fallbacks == 2


# --- folders


def test_a_folder_refuses_other_samples_and_ends_where_it_ends(folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="seed"):
        loader_of(folders["single"], seed=5)
    with pytest.raises(ConfigError, match="lengths"):
        loader_of(folders["single"], Recorded([41, *LENGTHS[1:]]))
    loader = loader_of(folders["single"])
    loader.set_epoch(2)
    with pytest.raises(ConfigError, match="not among the first 8 iterations"):
        list(loader)
    with pytest.raises(ConfigError, match="not a folder of plans"):
        loader_of(folders["single"] / "packs")


def test_a_folder_of_another_release_is_refused_whatever_the_sampler(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    old = tmp_path / "old"
    shutil.copytree(folders["single"], old)
    with closing(open_store(old)) as store:
        store.commit({FACTS: dataclasses.replace(read_facts(store), release="0.0.1").encode()})
    for options in ({}, {"sampler": [[0]]}):
        with pytest.raises(ConfigError, match=r"release = .*0\.0\.1"):
            loader_of(old, **options)


def test_a_sampler_may_draw_in_any_order_what_a_folder_has(folders: dict[str, Path]) -> None:
    own = Sampling(LENGTHS, 64).epoch(0)
    backwards = loader_of(folders["single"], sampler=own[::-1])
    assert [batch.handle.id for batch in backwards] == [
        batch.handle.id for batch in loader_of(folders["single"])
    ][::-1]


def test_a_folder_s_source_is_plain_data(folders: dict[str, Path]) -> None:
    source = FolderSource.open(folders["single"])
    assert source == FolderSource.open(folders["single"])
    assert source.job.to_data() == job().to_data()


# --- several passes on one job


def test_evaluation_in_the_middle_of_a_pass_fences_nobody(urls: dict[str, str]) -> None:
    single = {"source": urls["single"], "key": KEY, "timeout_s": WAIT_S}
    training = PlannedLoader(Recorded(), shuffle=False, lookahead=2, **single)
    evaluating = PlannedLoader(Recorded([50, 7]), stream="eval", shuffle=False, **single)
    whole = [seen(batch) for batch in PlannedLoader(Recorded(), source=HereSource(job()), shuffle=False)]
    found, evaluated = [], []
    for batch in training:
        found.append(seen(batch))
        evaluated.append([seen(one) for one in evaluating])
    assert found == whole
    assert len(evaluated) == len(whole) > 2
    assert evaluated == [evaluated[0]] * len(whole)


def test_groups_of_ranks_on_one_job_fence_only_themselves(pool: Pool, urls: dict[str, str]) -> None:
    options = {"source": urls["four"], "key": KEY, "shuffle": False, "timeout_s": WAIT_S}
    found = pool.run(jobs_seam.groups, 8, options)
    assert found == pool.run(jobs_seam.groups, 8, {"shuffle": False})


# --- compiling


def test_what_is_compiled_for_a_first_plan_is_told_apart_from_waiting(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "FIRST_S", 0.0)
    monkeypatch.setattr(local.LocalFeed, "_seen", set())
    batches = [Batch.from_lengths([40, 20])]
    with closing(local.LocalSource(job()).begin("run", 0)) as feed:
        before = feed.compiled_s
        with pytest.raises(TimeoutError):
            feed.plan(0, batches, 1e-3)
        time.sleep(0.05)
        assert feed.compiled_s - before >= 0.05  # nobody knows yet: it all counts
        feed.plan(0, batches, WAIT_S)
        there_s = feed.compiled_s - compiling.seconds
        time.sleep(0.05)
        assert feed.compiled_s - compiling.seconds == there_s >= 0
    with closing(local.LocalSource(job()).begin("next", 0)) as feed:
        time.sleep(0.05)
        assert feed.compiled_s == compiling.seconds  # a later pass: its plans will say
    (record,) = [record for record in caplog.records if record.name == local.LOG.name]
    assert "apportion warmup" in record.getMessage()


@pytest.mark.parametrize("name", ["service", "folder"])
def test_feeds_of_others_count_what_is_compiled_here(
    urls: dict[str, str], folders: dict[str, Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = (
        ServiceSource.open(urls["single"], KEY) if name == "service" else FolderSource.open(folders["single"])
    )
    with closing(source.begin("run", 0, "eval")) as feed:
        before = feed.compiled_s
        monkeypatch.setattr(compiling, "_done_s", compiling._done_s + 7.0)
        assert feed.compiled_s - before == pytest.approx(7.0)


def test_streams_of_a_job_go_on_side_by_side(urls: dict[str, str]) -> None:
    source = ServiceSource.open(urls["single"], KEY)
    batches = [Batch.from_lengths([40, 20])]
    with closing(source.begin("a", 0)) as train, closing(source.begin("a", 0, "eval")) as evaluation:
        for iteration in range(2):
            for feed in (train, evaluation):
                feed.submit(iteration, batches)
                feed.plan(iteration, batches, WAIT_S)
        with closing(source.begin("b", 0, "eval")) as later:
            later.submit(0, batches)
            with pytest.raises(ServiceProblem, match="410"):
                evaluation.submit(2, batches)
            train.submit(2, batches)
            train.plan(2, batches, WAIT_S)


def test_the_job_says_how_gradients_travel_unless_the_trainer_asks_for_it() -> None:
    wide, narrow = Model(), Model(sent_gradients="model")
    check_model(wide, wide)
    check_model(wide, narrow)
    check_model(narrow, narrow)
    with pytest.raises(ConfigError, match="the trainer's model has 'model', the job's 'wide'"):
        check_model(narrow, wide)

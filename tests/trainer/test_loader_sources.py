"""One loader over three sources: a service, a folder of precomputed plans, and a local process."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler

from apportion import Batch, ConfigError, ExecutionError, PlannedLoader, PlanTimeoutError
from apportion.ir.bytes.job import encode_request
from apportion.ir.request.sampling import Sampling
from apportion.ir.version import __version__
from apportion.service.http.serve import Server, serving
from apportion.service.precompute import Work, precompute
from apportion.service.problems import ServiceError, UnknownPlanError
from apportion.service.workers import ProcessExecutor, WorkerDiedError
from apportion.trainer.loading.sources import LocalSource, ServiceSource
from tests.ranks import jobs_loader, jobs_seam
from tests.ranks.loading import LENGTHS, HereSource, Recorded, job, planning, seen
from tests.ranks.rank_pool import Pool
from tests.support.sparse import sparse

WAIT_S = 300
JOBS = {"plain": job(2, 66, microbatches=2), "packing": job(2, 66, microbatches=2, recipe="wlb")}
FOUR = job(4, 64, microbatches=2)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders with the plans of two epochs of a job, by name."""
    made = {}
    with ProcessExecutor(1) as executor:
        for name, own in {**JOBS, "single": job()}.items():
            made[name] = tmp_path_factory.mktemp("plans") / name
            iterations = 2 * len(Sampling(LENGTHS, own.tokens, own.microbatches, own.policy.seed).epoch(0))
            precompute(Work(own, LENGTHS, None, iterations), made[name], executor, 1)
    return made


@pytest.fixture(params=["service", "folder"])
def single(request: pytest.FixtureRequest, server: Server, folders: dict[str, Path]) -> str | Path:
    """A source of one rank's plans, as an argument of the loader."""
    return server.url if request.param == "service" else folders["single"]


def loader_of(source: Any, dataset: Recorded | None = None, **options: Any) -> PlannedLoader:
    return PlannedLoader(dataset or Recorded(), **{**planning(job(), source), "timeout_s": WAIT_S, **options})


def without_a_server() -> list[Any]:
    """The batches of a pass that needs no server."""
    return [seen(batch) for batch in loader_of(HereSource())]


# --- one behaviour


@pytest.mark.parametrize("name", sparse(list(JOBS), 2))
def test_every_source_gives_the_same_batches_and_plans(
    pool: Pool, server: Server, folders: dict[str, Path], name: str
) -> None:
    sources = server.url, folders[name], "local"
    service, folder, local = (
        pool.run(jobs_loader.passes, 2, planning(JOBS[name], source, timeout_s=WAIT_S), 2)
        for source in sources
    )
    assert service == folder == local
    (first, _), (second, _) = service
    assert [batch[:5] for batch in first[0]] == [batch[:5] for batch in second[0]]
    assert sum(len(batch[5]) for passes, _ in service for batch in passes[0]) == sum(LENGTHS)


def test_data_loader_processes_read_the_same_batches_as_threads(single: str | Path) -> None:
    want = without_a_server()
    dataset = Recorded()
    for workers in (0, 1, 2):
        dataset.read.clear()
        assert [seen(batch) for batch in loader_of(single, dataset, workers=workers)] == want
        assert bool(dataset.read) == (workers == 0)  # each process has its own


def test_labels_from_data_loader_processes_are_unchanged(single: str | Path) -> None:
    for batch in loader_of(single, workers=1):
        batch.check_unchanged()
    batch.labels[0] = 1
    with pytest.raises(ConfigError, match="labels = 'changed'"):
        batch.check_unchanged()


@pytest.mark.parametrize("seeded", [True, False])
def test_data_loader_processes_draw_the_samples_of_their_rank(seeded: bool) -> None:
    def order(workers: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(1) if seeded else None
        random = RandomSampler(range(len(LENGTHS)), generator=generator)
        loader = loader_of("local", sampler=BatchSampler(random, 1, False), workers=workers)
        return [batch.samples.tolist() for batch in loader]

    if seeded:
        assert order(2) == order(0)
    else:
        with pytest.raises(ExecutionError, match=r"iteration \d: a data-loader process draws 1 "):
            order(2)


class Broken(Recorded):
    def __getitem__(self, index: int) -> None:
        raise OSError("the disk is gone")


def test_an_error_in_a_data_loader_process_leaves_none_behind(folders: dict[str, Path]) -> None:
    before = multiprocessing.active_children()
    with pytest.raises(OSError, match="the disk is gone") as caught:
        list(loader_of(folders["single"], Broken(), workers=2))
    assert caught.tb is not None  # the error holds objects that torch would wait for
    assert set(multiprocessing.active_children()) <= set(before)


def test_leaving_a_pass_early_ends_threads_and_processes(single: str | Path) -> None:
    for options in ({}, {"workers": 2}):
        with closing(iter(loader_of(single, **options))) as batches:
            next(batches)
        assert not [thread for thread in threading.enumerate() if thread.name == "apportion-plans"]
    with closing(iter(loader_of("local"))) as batches:
        next(batches)
    assert not [thread for thread in threading.enumerate() if "apportion-plan" in thread.name]


# --- the service


def test_any_rank_submits_iterations_that_rank_0_did_not(pool: Pool, server: Server) -> None:
    arguments = planning(job(2, 68), server.url, timeout_s=WAIT_S)
    first, second = pool.run(jobs_loader.without_rank_0, 2, arguments)
    assert first == second
    assert len(first) > 1


def test_plans_that_a_server_lost_are_submitted_again() -> None:
    """The server restarts at the same address without its plans, and the loader continues."""
    with serving(None) as server:
        port = server.url.rsplit(":", 1)[1]
        loader = loader_of(server.url, lookahead=1)
        batches = iter(loader)
        came = [next(batches)]
    later = threading.Thread(target=lambda: came.extend(batches))
    later.start()
    with serving(None, options=["--port", port]):
        later.join(WAIT_S)
        assert not later.is_alive()
    assert [seen(batch) for batch in came] == without_a_server()


def test_slices_of_consecutive_iterations_arrive_over_a_stream(server: Server) -> None:
    requests = [[Batch.from_lengths([40, 20 + i])] for i in range(4)]
    keys = [job().request_key(batches) for batches in requests]
    source = ServiceSource((server.url,))
    with closing(source):
        for key, batches in zip(keys[:3], requests, strict=False):
            source.submit(key, encode_request(job(), batches), 0)
        first, *then = keys
        assert source.fetch(first, 0, WAIT_S, then).id
        assert list(source._pending) == then
        assert [source.fetch(key, 0, WAIT_S).id for key in keys[1:3]]
        with pytest.raises(UnknownPlanError):  # also when requested again, by a separate request
            source.fetch(keys[3], 0, WAIT_S)
        source.submit(keys[3], encode_request(job(), requests[3]), 0)
        assert source.fetch(keys[3], 0, WAIT_S).id


def test_one_reachable_server_of_several_suffices(server: Server) -> None:
    urls = ["http://127.0.0.1:9", server.url]
    assert [seen(batch) for batch in loader_of(urls)] == without_a_server()


@pytest.mark.parametrize(("kind", "ends"), [("queue-full", TimeoutError), ("refused", ServiceError)])
def test_only_transient_errors_of_a_service_are_retried(
    kind: str, ends: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(*_: Any) -> None:
        raise ServiceError(kind, "not now")

    with closing(ServiceSource(("http://127.0.0.1:9",))) as source:
        monkeypatch.setattr(source._client, "submit", answer)
        with pytest.raises(ends, match="not now"):
            source.submit(b"", b"", 0)


def test_without_its_server_a_loader_ends_within_its_time_out() -> None:
    with serving(None) as server:
        loader = loader_of(server.url, timeout_s=3.0, lookahead=1)
        batches = iter(loader)
        next(batches)
    began = time.monotonic()
    with pytest.raises(PlanTimeoutError, match=r"within 3 s .*All connection attempts failed"):
        list(batches)
    assert time.monotonic() - began < 8.0  # 3.2 s on an idle machine


def test_without_its_server_a_run_plans_locally_and_logs_it(caplog: pytest.LogCaptureFixture) -> None:
    with serving(None) as server:
        loader = loader_of(server.url, on_timeout="local", timeout_s=2.0, lookahead=1)
        batches = iter(loader)
        came = [next(batches)]
    begin = time.monotonic()
    came.extend(batches)
    assert time.monotonic() - begin < 2.0 * (len(came) - 1)  # one time-out, not one per iteration
    assert [seen(batch) for batch in came] == without_a_server()
    assert loader.metrics()["fallbacks"] >= 1
    assert "plans it itself" in caplog.text


def test_ranks_agree_where_their_server_stalls(pool: Pool) -> None:
    with serving(None) as server:
        kwargs = planning(JOBS["plain"], server.url)
        (first, fallbacks), second = pool.run(jobs_loader.stalled, 2, kwargs, server.pid)
    assert (first, fallbacks) == second
    assert len(first) == 3
    assert 1 <= fallbacks <= 2  # the second plan may arrive before the server stops


def test_a_token_reaches_the_server_and_is_not_shown() -> None:
    with serving(None, token="a-token-of-the-tests") as server:
        with pytest.raises(ServiceError, match="401"):
            list(loader_of(server.url, token="another"))
        for workers in (0, 1):
            assert len(list(loader_of(server.url, token="a-token-of-the-tests", workers=workers))) == 4
    assert "a-token-of-the-tests" not in repr(ServiceSource(("http://127.0.0.1:9",), "a-token-of-the-tests"))


def test_evaluation_in_the_middle_of_a_pass_does_not_disturb_it(server: Server) -> None:
    """Holds for a shared source too, since each pass has its own copy."""
    source = ServiceSource((server.url,), timeout_s=WAIT_S)
    training = loader_of(source, shuffle=False, lookahead=2)
    evaluating = loader_of(source, Recorded([50, 7]), shuffle=False)
    whole = [seen(batch) for batch in loader_of(HereSource(), shuffle=False)]
    found, evaluated = [], []
    for batch in training:
        found.append(seen(batch))
        evaluated.append([seen(one) for one in evaluating])
    assert found == whole
    assert evaluated == [evaluated[0]] * len(whole)


def test_groups_of_ranks_share_a_server(pool: Pool, server: Server) -> None:
    kwargs = planning(FOUR, server.url, shuffle=False, timeout_s=WAIT_S)
    assert pool.run(jobs_seam.groups, 8, kwargs) == pool.run(jobs_seam.groups, 8, {"shuffle": False})


# --- folders


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"seed": 5}, r"job\.policy\.seed = 5: .* made with 0"),
        ({"recipe": "usp"}, r"job\.policy\.recipe\.name = 'usp': .* made with 'fcp'"),
        ({"lengths": [41, *LENGTHS[1:]]}, "lengths = "),
        ({"shuffle": False, "lengths": LENGTHS[::-1]}, "lengths = "),
        ({"shuffle": False}, "shuffle = False: .* made with True"),
        ({"sampler": [[0, 1, 2]], "tokens_per_rank": 82}, r"job\.tokens_per_rank = 82"),
        ({"sampler": [[4, 6]]}, "it is not among the plans in .*, which has the first 8 iterations"),
    ],
)
def test_a_plan_missing_from_a_folder_is_an_error_that_names_the_difference(
    folders: dict[str, Path], changes: dict[str, Any], error: str
) -> None:
    dataset = Recorded(changes.pop("lengths")) if "lengths" in changes else None
    with pytest.raises(ConfigError, match=error):
        list(loader_of(folders["single"], dataset, **changes))


def test_a_folder_of_another_release_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "0.0.1").mkdir()
    with pytest.raises(ConfigError, match=rf"release = .*{__version__}.*made with '0\.0\.1'"):
        list(loader_of(tmp_path))


def test_a_sampler_may_draw_the_iterations_of_a_folder_in_any_order(folders: dict[str, Path]) -> None:
    own = Sampling(LENGTHS, 64).epoch(0)
    loaders = loader_of(folders["single"], sampler=own[::-1]), loader_of(folders["single"])
    backwards, forwards = ([batch.handle.id for batch in loader] for loader in loaders)
    assert backwards == forwards[::-1]


# --- a local planning process


def test_a_planner_that_dies_is_an_error() -> None:
    batches = [Batch.from_lengths([40, 20])]
    key = job().request_key(batches)
    with closing(LocalSource()) as source:
        source.submit(key, encode_request(job(), batches), 0)
        while not source._planner._workers:
            time.sleep(0.01)
        next(iter(source._planner._workers)).kill()
        with pytest.raises(WorkerDiedError, match=r"died \(status -9\)"):
            source.fetch(key, 0, WAIT_S)


def test_a_request_that_cannot_be_planned_is_refused() -> None:
    with pytest.raises(ServiceError, match=r"422 refused: .*cap"):
        list(loader_of("local", recipe=replace(job().policy, token_cap=1)))

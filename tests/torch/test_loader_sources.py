"""One loader over three sources: a service, a folder of plans made before, and a process beside this one."""

import threading
from contextlib import closing

import jobs_loader
import pytest
from loading import LENGTHS, MODEL, HereSource, Recorded, job, seen

from apportion.ir.cluster import Cluster
from apportion.ir.errors import ConfigError
from apportion.ir.sampling import Sampling
from apportion.service.client import ServiceProblem, create_job
from apportion.service.http.child import serving
from apportion.service.precompute import Work, precompute
from apportion.service.workers import Planner
from apportion.trainer.loader import PlannedLoader
from apportion.trainer.sources import FolderSource

KEY = "a key of the tests".replace(" ", "-")
WAIT_S = 60
JOBS = {"plain": job(2, 66, microbatches=2), "packing": job(2, 66, microbatches=2, recipe="wlb")}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture(scope="module")
def urls(server):
    """Of a job on the server, by name."""
    for name, own in JOBS.items():
        create_job(server.url, name, own, key=KEY).close()
    create_job(server.url, "single", job(), key=KEY).close()
    return {name: f"{server.url}/v1/jobs/{name}" for name in (*JOBS, "single")}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
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
def single(request, urls, folders):
    """A source of one rank's job, as an argument of the loader."""
    return urls["single"] if request.param == "service" else folders["single"]


def loader_of(source, dataset=None, **options):
    return PlannedLoader(dataset or Recorded(), source=source, key=KEY, **options)


# --- one behaviour


@pytest.mark.parametrize("name", JOBS)
def test_batches_and_plans_are_the_same_whoever_plans(pool, urls, folders, name):
    own = JOBS[name]
    local = {
        "cluster": own.cluster,
        "model": own.model,
        "tokens_per_rank": own.tokens_per_rank,
        "microbatches": own.microbatches,
        "recipe": own.policy.recipe,
    }
    options = {"key": KEY, "timeout_s": WAIT_S}
    service = pool.run(jobs_loader.passes, 2, urls[name], 2, options)
    folder = pool.run(jobs_loader.passes, 2, folders[name], 2, options)
    here = pool.run(jobs_loader.passes, 2, "local", 2, options | local)
    assert service == folder == here
    (first, _), (second, _) = service
    assert [batch[:5] for batch in first[0]] == [batch[:5] for batch in second[0]]
    assert sum(len(batch[5]) for passes, _ in service for batch in passes[0]) == sum(LENGTHS)


def test_a_job_says_all_that_the_caller_leaves_out(single):
    want = [seen(batch) for batch in loader_of(HereSource(job()))]
    assert [seen(batch) for batch in loader_of(single)] == want
    assert [
        seen(batch) for batch in PlannedLoader(Recorded(), Cluster(1, 1), MODEL, 64, source=single, key=KEY)
    ] == want
    with pytest.raises(ConfigError, match="the job says it"):
        loader_of(single, microbatches=2)


def test_data_loader_processes_read_what_threads_read(single):
    want = [seen(batch) for batch in loader_of(single)]
    dataset = Recorded()
    for workers in (1, 2):
        assert [seen(batch) for batch in loader_of(single, dataset, workers=workers)] == want
    assert dataset.read == []  # each process has its own


def test_epochs_and_middles(single):
    loader, here = loader_of(single), loader_of(HereSource(job()))
    for epoch, start in [(0, 0), (1, 2), (1, 0)]:
        for one in (loader, here):
            one.set_epoch(epoch, start)
        assert [seen(batch) for batch in loader] == [seen(batch) for batch in here]


def test_leaving_early_ends_threads_and_processes(single):
    for options in ({}, {"workers": 2}):
        with closing(iter(loader_of(single, **options))) as batches:
            next(batches)
        assert not [thread for thread in threading.enumerate() if thread.name == "apportion-plans"]
    with closing(iter(PlannedLoader(Recorded(), Cluster(1, 1), MODEL, 64))) as batches:
        next(batches)
    assert not [thread for thread in threading.enumerate() if "apportion" in thread.name]


# --- the service


def test_a_wrong_key_or_job_is_named(urls):
    with pytest.raises(ServiceProblem, match="401"):
        PlannedLoader(Recorded(), source=urls["single"], key="another")
    with pytest.raises(ServiceProblem, match=r"40[14]"):
        loader_of(urls["single"].replace("single", "nobody"))
    with pytest.raises(ConfigError, match="url"):
        loader_of("http://127.0.0.1:9/jobs")


def test_an_equal_run_gets_its_plans_again_and_another_one_is_refused(urls):
    want = [seen(batch) for batch in loader_of(urls["single"], run="again")]
    assert [seen(batch) for batch in loader_of(urls["single"], run="again")] == want
    with pytest.raises((ServiceProblem, ConfigError, RuntimeError), match=r"409|not of this batch"):
        list(loader_of(urls["single"], run="again", seed=1))


def test_another_rank_submits_what_nobody_has(pool, urls):
    first, second = pool.run(jobs_loader.without_rank_0, 2, urls["plain"], KEY)
    assert first == second
    assert len(first) == 4


def test_a_server_that_comes_back_is_waited_for(tmp_path):
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


def test_without_its_server_a_run_plans_itself_and_says_so(tmp_path, caplog):
    with serving(tmp_path / "server") as server:
        create_job(server.url, "single", job(), key=KEY).close()
        loader = loader_of(f"{server.url}/v1/jobs/single", on_timeout="local", timeout_s=2.0, lookahead=1)
        batches = iter(loader)
        came = [next(batches)]
    came.extend(batches)
    assert [seen(batch) for batch in came] == [seen(batch) for batch in loader_of(HereSource(job()))]
    assert loader.fallbacks >= 1
    assert "plans it itself" in caplog.text


def test_ranks_agree_where_their_server_stalls(pool, tmp_path):
    with serving(tmp_path / "server") as server:
        create_job(server.url, "plain", JOBS["plain"], key=KEY).close()
        url = f"{server.url}/v1/jobs/plain"
        (first, fallbacks), second = pool.run(jobs_loader.stalled, 2, url, KEY, server.pid)
    assert (first, fallbacks) == second
    assert len(first) == 3
    assert fallbacks == 2


# --- folders


def test_a_folder_refuses_other_samples_and_ends_where_it_ends(folders):
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


def test_a_sampler_may_draw_in_any_order_what_a_folder_has(folders):
    own = Sampling(LENGTHS, 64).epoch(0)
    backwards = loader_of(folders["single"], sampler=own[::-1])
    assert [batch.handle.id for batch in backwards] == [
        batch.handle.id for batch in loader_of(folders["single"])
    ][::-1]


def test_a_folder_s_source_is_plain_data(folders):
    source = FolderSource.open(folders["single"])
    assert source == FolderSource.open(folders["single"])
    assert source.job.to_data() == job().to_data()

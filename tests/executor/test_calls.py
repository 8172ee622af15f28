"""Ranks that make different calls, and ranks that fail in a call."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from apportion import Batch, Cluster, masks
from apportion.planner import api
from tests.ranks import cases, jobs_calls
from tests.ranks.jobs import Shard
from tests.ranks.rank_pool import Pool
from tests.support.sparse import sparse_rows

KINDS = {"a": masks.causal(), "b": masks.sliding_window(8)}


@pytest.fixture
def own_pool() -> Iterator[Pool]:
    """Ranks for a single test, since their groups do not survive a fault."""
    ranks = Pool(size=2)
    yield ranks
    ranks.close()


def shards(recipe: str) -> list[tuple[Shard, ...]]:
    batches = (Batch.from_lengths(lengths, KINDS) for lengths in ([1100], [1000, 100]))
    plans = [api.plan(batch, Cluster(1, 2), cases.model(2), recipe) for batch in batches]
    return list(zip(*(cases.shards(plan, cases.problem_of(plan)) for plan in plans), strict=True))


@pytest.mark.parametrize(
    ("case", "recipe", "own_call", "other_call"),
    sparse_rows(
        [
            ("kinds", "ring", "forward of kind a", "forward of kind b"),
            ("kinds", "ulysses", "forward of kind a", "forward of kind b"),
            ("handles", "ring", "forward of kind a, plan ", "forward of kind a, plan "),
            ("handles", "ulysses", "forward of kind a, plan ", "forward of kind a, plan "),
            ("scale", "ring", "scale 0.25", "scale 0.5"),
            ("softcap", "ring", "scale", "softcap 2"),
            ("sinks", "ring", "scale", ", sinks"),
            ("lse", "ring", "scale", ", return_lse"),
            ("recompute", "ring", "backward of kind a", "forward of kind a"),
            ("skipped", "ring", "forward of kind a", "backward of kind a"),
            ("skipped_at_the_end", "ring", "forward of kind a", "all_gather of metrics"),
            ("pair", "ring", "all_gather of segments", "forward of kind a"),
        ],
        6,
    ),
)
def test_ranks_that_make_different_calls_both_fail_and_name_both_calls(
    own_pool: Pool, case: str, recipe: str, own_call: str, other_call: str
) -> None:
    for error, seconds in own_pool.run(jobs_calls.apart, 2, case, 1, each=shards(recipe)):
        assert error.startswith("ExecutionError: ")
        assert "ranks make different calls" in error
        first, second = sorted(
            error.split("ranks make different calls: ")[1].split(". All ranks")[0].split("; "),
            key=lambda part: "rank 1" in part,
        )
        assert (own_call in first, first.endswith("on rank 0")) == (True, True)
        assert (other_call in second, second.endswith("on rank 1")) == (True, True)
        assert seconds < 30


@pytest.mark.parametrize(
    ("case", "message"),
    sparse_rows([("shape", "ExecutionError: q has "), ("late_failure", "MemoryError: out of memory")], 2),
)
def test_a_rank_that_fails_ends_the_others_with_its_error(own_pool: Pool, case: str, message: str) -> None:
    (first, seconds), (second, _) = own_pool.run(jobs_calls.apart, 2, case, 1, each=shards("ring"))
    assert second.startswith(message)
    assert "rank 1 failed in call" in first
    assert message in first
    assert "Rank 0 waited in call" in first
    assert seconds < 30


def test_a_second_thread_is_refused_while_a_call_runs(pool: Pool) -> None:
    for during, after in pool.run(jobs_calls.threads, 2, each=shards("ring")):
        assert "two threads call at once: forward of kind a" in during
        assert "(a step)" in during
        assert after == ""


def test_a_gather_reports_earlier_calls_that_differ(pool: Pool) -> None:
    for error, gathered in pool.run(jobs_calls.resumed, 2):
        assert "ranks make different calls" in error
        assert gathered == [[0], [1]]


def test_neither_the_end_of_a_recomputation_nor_an_earlier_failure_ends_other_ranks(pool: Pool) -> None:
    assert pool.run(jobs_calls.stopped, 2) == [[[0], [1]]] * 2


AT_THE_END = """
import time, torch.distributed as dist
from apportion.backends.torch import calls

calls.CHECK_INTERVAL_S = 1e-6
store = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
found = calls.calls_of(dist.group.WORLD)
found.wait([], dist.group.WORLD, ())
found._wait = calls.Wait(0.0, dist.group.WORLD, ())  # a long wait: the thread reads the store all the time
time.sleep(0.2)
"""


LAST_COLLECTIVES = """
import sys, torch, torch.distributed as dist
from apportion.backends.torch import calls

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
calls.calls_of(dist.group.WORLD).wait([], dist.group.WORLD, ())
sys.setswitchinterval(100)  # gloo's threads get the GIL only when this one gives it away
given, gathered = torch.ones(2**18), [torch.ones(2**18)]
dist.all_gather(gathered, given, async_op=True)  # gloo's thread is the last to release the tensors
"""


@pytest.mark.parametrize("program", [AT_THE_END, LAST_COLLECTIVES])
def test_a_process_can_exit_while_threads_need_the_interpreter(program: str) -> None:
    """A thread that returns to a finalised interpreter would abort the process: one that reads the store, or gloo's."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")

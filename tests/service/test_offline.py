"""Reading a folder of plans: by content and number, compact plans, and what a wrong folder is told."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from apportion.ir.errors import ApportionError, ConfigError, DecodeError, VersionError
from apportion.ir.isa import VERSION
from apportion.planner.iteration.jobs import plan_job
from apportion.service.offline import FACTS, Facts, open_offline
from apportion.service.packs import Pack
from apportion.service.precompute import Work, precompute
from apportion.service.store import open_store
from apportion.service.workers import Planner
from tests.service.precomputing import bytes_of, lengths, work_of


@pytest.fixture(scope="module")
def planner() -> Iterator[Planner]:
    with Planner(1) as held:
        yield held


@pytest.fixture(scope="module")
def work() -> Work:
    return work_of(lengths(30, 5), 4)


@pytest.fixture(scope="module")
def folder(planner: Planner, work: Work, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans")
    precompute(work, path, planner)
    return path


def test_it_says_what_the_plans_are_for(folder: Path, work: Work) -> None:
    with open_offline(str(folder)) as offline:
        assert offline.job.digest == work.job.digest
        assert offline.facts.encode() == work.facts.encode()
        offline.check(work.job, work.sampling)
        offline.check(work.job, None)


def test_reading_changes_nothing_and_many_may_read(folder: Path) -> None:
    before = bytes_of(folder)
    with open_offline(folder) as one, open_offline(folder) as other:
        key = one.key(0, 2)
        assert one.slice(key, 3) == other.slice(key, 3)
    assert bytes_of(folder) == before


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"seed": 1}, "seed"),
        ({"shuffle": False}, "shuffle"),
        ({"tokens_per_rank": 600}, "tokens_per_rank"),
        ({"samples": lengths(30, 6)}, "lengths"),
        ({"recipe": "contiguous"}, "policy.recipe.name"),
    ],
)
def test_another_job_or_order_is_refused_by_name(changed: dict[str, Any], field: str, folder: Path) -> None:
    other = work_of(**{"samples": lengths(30, 5), "iterations": 4} | changed)
    with open_offline(folder) as offline, pytest.raises(ConfigError) as refused:
        offline.check(other.job, other.sampling)
    assert refused.value.field == field
    assert str(folder) in str(refused.value)


def test_another_order_is_no_matter_where_content_decides(folder: Path) -> None:
    other = work_of(lengths(30, 6), 4)
    with open_offline(folder) as offline:
        offline.check(other.job, None)


def test_another_release_is_refused(work: Work, tmp_path: Path) -> None:
    with closing(open_store(tmp_path)) as store:
        store.commit({FACTS: dataclasses.replace(work.facts, release="0.0.9").encode()})
    with open_offline(tmp_path) as offline, pytest.raises(ConfigError, match=r"made with 0\.0\.9") as refused:
        offline.check(work.job, work.sampling)
    assert refused.value.field == "release"


def test_what_is_not_there_is_said(folder: Path, work: Work) -> None:
    with open_offline(folder) as offline:
        with pytest.raises(ConfigError, match="first 4 iterations"):
            offline.key(7, 0)
        with pytest.raises(ConfigError, match="--iterations"):
            offline.slice(bytes(32), 0)
        with pytest.raises(ConfigError, match="rank"):
            offline.slice(offline.key(0, 0), 4)


def test_folders_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no index\.sqlite"):
        open_offline(tmp_path / "nowhere")
    open_store(tmp_path).close()
    with pytest.raises(ConfigError, match="server"):
        open_offline(tmp_path)


def test_a_damaged_pack_is_told(planner: Planner, work: Work, tmp_path: Path) -> None:
    precompute(work, tmp_path, planner)
    with open_offline(tmp_path) as offline:
        key = offline.key(0, 0)
        (path,) = tmp_path.glob(f"packs/*/{key.hex()}.pack")
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        with pytest.raises(DecodeError):
            offline.slice(key, work.job.ranks - 1)


def test_compact_plans_are_lowered_once(planner: Planner, tmp_path: Path) -> None:
    work = work_of(lengths(120, 5), 4, ranks=32)
    precompute(work, tmp_path, planner)
    with open_offline(tmp_path) as offline:
        keys = [offline.key(0, iteration) for iteration in range(4)]
        forms = [Pack.decode(offline.store.read_pack(key) or b"").form for key in keys]
        assert set(forms) == {"assignment"}
        for iteration, key in enumerate(keys):
            samples = work.sampling.epoch(0)[iteration]
            planned = plan_job(work.job, work.batches(samples), verify=False).plan
            for rank in (0, 31):
                assert offline.slice(key, rank).encode() == planned.slice_for(rank).encode()
        assert offline.slice(keys[-1], 3).slices[0] is not None


def test_facts_read_back_and_equal_facts_are_equal_bytes(work: Work) -> None:
    facts = work.facts
    assert Facts.decode(facts.encode()).encode() == facts.encode()
    assert facts.encode() == dataclasses.replace(facts).encode()


def test_hostile_facts_are_refused(work: Work) -> None:
    data = work.facts.encode()
    for i in range(len(data)):
        changed = data[:i] + bytes([data[i] ^ 0x55]) + data[i + 1 :]
        try:
            Facts.decode(changed)
        except ApportionError:
            continue
    with pytest.raises(VersionError):
        Facts.decode(data.replace(b"\x92" + bytes(VERSION), b"\x92\x09\x00", 1))

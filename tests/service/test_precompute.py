"""`apportion precompute`: which iterations, what the folder is, how a run stops, and what it refuses."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from apportion import cli
from apportion.cli.commands import precompute as command_line
from apportion.ir.errors import ConfigError
from apportion.ir.masks import specs as masks
from apportion.ir.request.sampling import Masks
from apportion.planner.iteration.jobs import plan_job
from apportion.service.errors import StoreError
from apportion.service.offline import open_offline
from apportion.service.precompute import IterationError, Work, precompute
from apportion.service.store import open_store
from apportion.service.workers import Planner
from tests.service.precomputing import bytes_of, command, lengths, packs_in, running, until, work_of

SMALL = ("--ranks", 4, "--tokens-per-rank", 512, "--workers", 1)


@pytest.fixture(scope="module")
def planner() -> Iterator[Planner]:
    with Planner(2) as held:
        yield held


@pytest.fixture
def listed(tmp_path: Path) -> Path:
    path = tmp_path / "lengths.jsonl"
    path.write_text("\n".join(map(str, lengths(40, 0))))
    return path


def keys_of(work: Work) -> Iterator[tuple[int, int, bytes]]:
    """(epoch, iteration, content address) of the iterations, as a loader finds them."""
    left, epoch = work.iterations, 0
    while left:
        drawn = work.sampling.epoch(epoch)[:left]
        for iteration, samples in enumerate(drawn):
            yield epoch, iteration, work.job.request_key(work.batches(samples))
        left, epoch = left - len(drawn), epoch + 1


WORKS = {
    "fcp": {},
    "microbatches": {"microbatches": 3},
    "packs": {"recipe": "wlb", "microbatches": 2},
    "in order": {"shuffle": False},
    "masks": {"masks": {"global": masks.causal(), "local": masks.sliding_window(64)}},
}


@pytest.mark.parametrize("name", WORKS)
def test_every_iteration_is_found_by_content_and_by_number(
    name: str, planner: Planner, tmp_path: Path
) -> None:
    options: dict[str, Any] = WORKS[name]
    work = work_of(lengths(20, 1), 12, **options)
    summary = precompute(work, tmp_path, planner)
    assert summary.iterations == 12
    with open_offline(tmp_path) as offline:
        places = list(keys_of(work))
        assert {epoch for epoch, _, _ in places} > {0}
        for epoch, iteration, key in places:
            assert offline.key(epoch, iteration) == key
            samples = work.sampling.epoch(epoch)[iteration]
            planned = plan_job(work.job, work.batches(samples), verify=False).plan
            for rank in (0, work.job.ranks - 1):
                assert offline.slice(key, rank).encode() == planned.slice_for(rank).encode()


def test_equal_iterations_are_planned_once(planner: Planner, tmp_path: Path) -> None:
    work = work_of(lengths(20, 1), 17, shuffle=False)
    summary = precompute(work, tmp_path, planner)
    assert summary.planned == summary.packs == len(work.sampling.epoch(0)) < 17 == summary.iterations


def test_the_folder_depends_on_neither_workers_nor_stops(planner: Planner, tmp_path: Path) -> None:
    once, more = work_of(lengths(20, 1), 11), work_of(lengths(20, 1), 4)
    first = precompute(once, tmp_path / "once", planner)
    precompute(more, tmp_path / "more", planner)
    with Planner(1) as alone:
        last = precompute(once, tmp_path / "more", alone)
    assert (last.planned, last.iterations, last.ids) == (7, 11, first.ids)
    assert bytes_of(tmp_path / "once") == bytes_of(tmp_path / "more")
    again = precompute(once, tmp_path / "more", planner)
    assert again.planned == 0
    assert bytes_of(tmp_path / "once") == bytes_of(tmp_path / "more")


def test_plans_without_records_are_taken_as_they_are(planner: Planner, tmp_path: Path) -> None:
    work = work_of(lengths(20, 1), 6)
    first = precompute(work, tmp_path, planner)
    undisturbed = bytes_of(tmp_path)
    store = open_store(tmp_path)
    store.commit({}, [name for name, _ in store.records("iteration/")])
    store.close()
    damaged, renamed, other = sorted(tmp_path.glob("packs/*/*.pack"))[:3]
    damaged.write_bytes(damaged.read_bytes()[:-1])
    renamed.write_bytes(other.read_bytes())
    last = precompute(work, tmp_path, planner)
    assert (last.planned, last.ids) == (2, first.ids)
    assert bytes_of(tmp_path) == undisturbed


def test_a_plan_that_is_gone_is_made_again(planner: Planner, tmp_path: Path) -> None:
    work = work_of(lengths(20, 1), 6)
    precompute(work, tmp_path, planner)
    undisturbed = bytes_of(tmp_path)
    next(tmp_path.glob("packs/*/*.pack")).unlink()
    assert precompute(work, tmp_path, planner).planned == 1
    assert bytes_of(tmp_path) == undisturbed


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"seed": 7}, "seed"),
        ({"shuffle": False}, "shuffle"),
        ({"recipe": "contiguous"}, "policy.recipe.name"),
        ({"tokens_per_rank": 600}, "tokens_per_rank"),
        ({"ranks": 8}, "cluster.ranks_per_node"),
        ({"microbatches": 2}, "microbatches"),
        ({"iterations": 2}, "iterations"),
        ({"samples": lengths(20, 2)}, "lengths"),
        ({"samples": lengths(21, 1)}, "samples"),
        ({"masks": masks.sliding_window(64)}, "masks"),
    ],
)
def test_other_arguments_are_refused_by_name(
    changed: dict[str, Any], field: str, planner: Planner, tmp_path: Path
) -> None:
    asked = {"samples": lengths(20, 1), "iterations": 3}
    precompute(work_of(**asked), tmp_path, planner)
    before = bytes_of(tmp_path)
    with pytest.raises(ConfigError) as refused:
        precompute(work_of(**asked | changed), tmp_path, planner)
    assert refused.value.field == field
    assert precompute(work_of(**asked), tmp_path, planner).planned == 0
    assert bytes_of(tmp_path) == before


@pytest.mark.parametrize("same", [masks.causal(), [None] * 20, {"default": masks.causal()}])
def test_masks_are_compared_by_what_they_mean(same: Masks, planner: Planner, tmp_path: Path) -> None:
    precompute(work_of(lengths(20, 1), 3), tmp_path, planner)
    assert precompute(work_of(lengths(20, 1), 3, masks=same), tmp_path, planner).planned == 0


def test_one_writes_at_a_time(planner: Planner, tmp_path: Path) -> None:
    with closing(open_store(tmp_path)), pytest.raises(StoreError, match=f"process {os.getpid()}"):
        precompute(work_of(lengths(20, 1), 3), tmp_path, planner)


def test_a_refused_batch_is_named_and_the_others_are_kept(planner: Planner, tmp_path: Path) -> None:
    samples = [600] * 9 + [1000] * 2 + [600] * 9  # only the long ones fill a microbatch beyond the ranks' cap
    work = work_of(samples, 7, tokens_per_rank=500, shuffle=False, token_cap=480)
    with pytest.raises(IterationError, match=r"iteration 3 of epoch 0: .*480"):
        precompute(work, tmp_path, planner)
    with open_offline(tmp_path) as offline:
        for _, iteration, key in list(keys_of(work))[:3]:
            assert offline.key(0, iteration) == key
            assert offline.slice(key, 1).rank == 1
        with pytest.raises(ConfigError, match="iteration 3 of epoch 0"):
            offline.key(0, 3)


def test_masks_that_do_not_go_together_are_named_too(planner: Planner, tmp_path: Path) -> None:
    kinds = {"global": masks.causal(), "local": masks.sliding_window(64)}
    work = work_of([900] * 6, 3, shuffle=False, masks=[None] * 3 + [kinds] + [None] * 2)
    with pytest.raises(IterationError, match="iteration 1 of epoch 0: "):
        precompute(work, tmp_path, planner)


def test_the_store_of_a_server_is_refused(planner: Planner, tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.commit({"job/run1": b"job"})
    store.close()
    with pytest.raises(ConfigError, match="server"):
        precompute(work_of([900] * 6, 3), tmp_path, planner)


def test_progress_counts_what_was_there(planner: Planner, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    precompute(work_of(lengths(20, 1), 4), tmp_path, planner, lambda *said: told.append(said))
    precompute(work_of(lengths(20, 1), 6), tmp_path, planner, lambda *said: told.append(said))
    assert told == [(0, 0), (1, 1), (2, 2), (3, 3), (4, 4), (4, 0), (5, 1), (6, 2)]


def test_progress_without_a_terminal_is_lines(capsys: pytest.CaptureFixture[str]) -> None:
    lines = command_line.Lines(100, 0.0)
    lines(40, 0)
    lines(60, 20)
    assert re.fullmatch(r"planned 60 of 100 iterations, [\d,.]+ /s, \S+ left\n", capsys.readouterr().err)


# ---------------------------------------------------------------------------------------------- the command


@pytest.mark.parametrize("words", [("precompute",), ("store", "check")])
def test_help_explains_and_shows_an_example(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*words, "--help"]) == cli.OK
    said = capsys.readouterr().out
    assert f"apportion {' '.join(words)}" in said.split("Options")[0].split("Example")[1]


def test_the_command_says_what_is_there(
    listed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = command(tmp_path / "plans", listed, 9, *SMALL)[3:]
    assert cli.main([*words, "--json"]) == cli.OK
    told = json.loads(capsys.readouterr().out)
    assert (told["iterations"], told["planned"], told["ranks"], told["recipe"]) == (9, 9, 4, "fcp")
    packs = [path.stat().st_size for path in (tmp_path / "plans").glob("packs/*/*.pack")]
    assert (told["packs"], told["bytes"]) == (len(packs), sum(packs))
    assert cli.main(words) == cli.OK
    assert told["ids"][:16] in capsys.readouterr().out


def test_the_command_finds_other_arguments(
    listed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = command(tmp_path / "plans", listed, 2, *SMALL)[3:]
    assert cli.main([*words, "--json"]) == cli.OK
    assert cli.main([*words, "--seed", "3", "--json"]) == cli.BAD_INPUT
    assert '"field": "seed"' in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (("--workload", "w.json"), "exactly one"),
        (("--recipe", "RECIPE"), "deadline_ms"),
        (("--tokens-per-rank", 16), "sample"),
        (("--mask", "{sliding_window: {window: -1}}"), "window"),
        (("--mask", "[}"), "YAML"),
        (("--workers", "many"), "--workers"),
        (("--workers", 0), "--workers"),
    ],
)
def test_wrong_input_leaves_nothing(
    more: tuple[object, ...], told: str, listed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.json"
    recipe.write_text(json.dumps({"name": "r", "steps": {"search": {"portfolio": {"deadline_ms": 9.0}}}}))
    given = [str(recipe) if word == "RECIPE" else str(word) for word in more]
    words = command(tmp_path / "plans", listed, 2, *SMALL)[3:]
    assert cli.main([*words, *given]) == cli.BAD_INPUT
    assert told in capsys.readouterr().err
    assert not (tmp_path / "plans").exists()


def test_masks_of_several_kinds(listed: Path, tmp_path: Path) -> None:
    mask = "{global: {causal: {}}, local: {sliding_window: {window: 64}}}"
    words = command(tmp_path / "plans", listed, 2, *SMALL, "--mask", mask)[3:]
    assert cli.main([*words, "--json"]) == cli.OK
    with open_offline(tmp_path / "plans") as offline:
        piece = offline.slice(offline.key(0, 1), 0).slices[0]
        assert piece.header.kinds == ("global", "local")


def test_interrupted_it_ends_cleanly_and_says_how_to_go_on(listed: Path, tmp_path: Path) -> None:
    words = command(tmp_path / "plans", listed, 1000, *SMALL, "--json")  # seconds, so that it is caught
    with running(words, subprocess.PIPE) as process:
        until(lambda: packs_in(tmp_path / "plans") >= 3 or process.poll() is not None)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does, to the workers too
        out, said = process.communicate(timeout=60)
    assert process.returncode == cli.INTERRUPTED, said.decode()
    assert b"goes on" in said
    assert b"Traceback" not in said
    assert out == b""
    held = packs_in(tmp_path / "plans")
    assert cli.main([*words[3:-1]]) == cli.OK
    assert held < packs_in(tmp_path / "plans")

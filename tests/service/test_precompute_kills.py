"""Killed at random and run again, `precompute` leaves what an undisturbed run leaves, byte for byte."""

from __future__ import annotations

import json
import random
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.service.precomputing import DEADLINE_S, bytes_of, command, lengths, packs_in, running, until


@dataclass(frozen=True)
class Size:
    iterations: int = 1000
    ranks: int = 64
    tokens_per_rank: int = 1024
    kills: int = 20
    workers: int = 2
    after_s: float = 0.5


FULL, SMALL = Size(), Size(40, 4, 256, 3, after_s=0.05)


@dataclass(frozen=True)
class Kill:
    """When a run is killed: so many seconds after the folder has so many packs."""

    packs: int
    after_s: float


def case(seed: int, size: Size = FULL) -> dict[str, Any]:
    """Raises AssertionError where a file differs."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        calm, shaken = Path(name, "calm"), Path(name, "shaken")
        undisturbed = _finished(_words(calm, seed, size))
        kills = [_killed(_words(shaken, seed, size), shaken, kill) for kill in _kills(draw, size)]
        resumed = _finished(_words(shaken, seed, size))
        assert resumed["ids"] == undisturbed["ids"]
        assert bytes_of(shaken) == bytes_of(calm)
    kept = ("rate", "bytes_per_iteration", "ids")
    return {**asdict(size), "kills_at": kills, "left_to_last_run": resumed["planned"]} | {
        name: undisturbed[name] for name in kept
    }


def _words(out: Path, seed: int, size: Size) -> list[str]:
    """The command; its samples fill three epochs."""
    listed = out.parent / "lengths.jsonl"
    samples = lengths(2 * size.iterations * size.ranks // 3, seed, size.tokens_per_rank)
    listed.write_text("\n".join(map(str, samples)))
    options = ("--ranks", size.ranks, "--tokens-per-rank", size.tokens_per_rank, "--seed", seed)
    return command(out, listed, size.iterations, *options, "--workers", size.workers, "--json")


def _kills(draw: random.Random, size: Size) -> list[Kill]:
    """In order; some while the run begins, the last ones when every pack is there already."""
    points = sorted(draw.randint(0, size.iterations) for _ in range(size.kills - 1))
    return [Kill(point, draw.uniform(0, size.after_s)) for point in [*points, size.iterations]]


def _killed(words: list[str], folder: Path, kill: Kill) -> int:
    """Run until the kill, and say how many packs there were; a run that is done first is fine too."""
    with running(words) as process:
        until(lambda: packs_in(folder) >= kill.packs or process.poll() is not None)
        try:
            process.wait(kill.after_s)
        except subprocess.TimeoutExpired:
            process.kill()
        process.communicate()
    return packs_in(folder)


def _finished(words: list[str]) -> dict[str, Any]:
    with running(words, subprocess.PIPE) as process:
        out, said = process.communicate(timeout=20 * DEADLINE_S)
        assert process.returncode == 0, said.decode()
    return dict(json.loads(out))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_killed_and_resumed_runs_leave_the_same_bytes(seed: int) -> None:
    figures = case(seed, SMALL)
    assert len(figures["kills_at"]) == SMALL.kills

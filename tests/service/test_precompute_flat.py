"""However many iterations are asked for, `precompute` holds a few of them at a time."""

from __future__ import annotations

import subprocess
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.service.precomputing import command, lengths, packs_in, running, until

LONG_S, EVERY_S = 3600.0, 0.2
GROWTH_MIB = 16.0  # allocators and SQLite's cache; the iterations of the long case alone would be hundreds


@dataclass(frozen=True)
class Size:
    """from_: iterations after which nothing may grow any more."""

    iterations: int = 20_000
    from_: int = 2_000
    samples: int = 2_000
    workers: int = 2


FULL, SMALL = Size(), Size(400, 150, 100)


def case(seed: int, size: Size = FULL) -> dict[str, Any]:
    """Raises AssertionError where memory grows."""
    with tempfile.TemporaryDirectory() as name:
        folder, listed = Path(name), Path(name, "lengths.jsonl")
        listed.write_text("\n".join(map(str, lengths(size.samples, seed, 2000))))
        options = ("--ranks", 2, "--tokens-per-rank", 1024, "--seed", seed, "--workers", size.workers)
        words = command(folder / "plans", listed, size.iterations, *options)
        with running(words, subprocess.PIPE) as process:
            held: list[tuple[int, float]] = []

            def reached(packs: int) -> bool:
                held.append((packs_in(folder / "plans"), _resident_mib(process.pid)))
                return process.poll() is not None or held[-1][0] >= packs

            until(lambda: reached(size.from_), LONG_S, EVERY_S)
            begin = held[-1]
            until(lambda: reached(size.iterations * 19 // 20), LONG_S, EVERY_S)
            _, said = process.communicate()
            assert process.returncode == 0, said.decode()
        grown = max(mib for _, mib in held) - begin[1]
        assert grown <= GROWTH_MIB, held[:: len(held) // 20 or 1]
        return {**asdict(size), "resident_mib": round(begin[1], 1), "grown_mib": round(grown, 1)}


def _resident_mib(process: int) -> float:
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except FileNotFoundError:
        return 0.0
    kib = [int(line.split()[1]) for line in lines if line.startswith("VmRSS:")]
    return kib[0] / 1024 if kib else 0.0


@pytest.mark.slow
def test_memory_is_flat() -> None:
    assert case(0, SMALL)["resident_mib"] > 0

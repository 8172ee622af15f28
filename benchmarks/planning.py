"""The planning benchmark: `fcp` with 2K and with automatic blocks, 8 to 1,024 ranks of 32K tokens, three seeds.

Run: make bench. Prints one line a row and writes all rows to benchmarks/results/planning.json.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "planning.json"
COMMAND = (
    sys.executable,
    "-m",
    "apportion",
    "bench",
    "plan",
    "--recipe",
    "fcp",
    "--tokens-per-rank",
    "32768",
)
GRID = ("--ranks", "8,64,256,1024", "--seeds", "0,1,2", "--repeats", "9", "--json")


def measure(block: str) -> dict[str, Any]:
    """The rows of one block size, measured in a process of its own; progress goes to stderr."""
    print(f"block {block}", file=sys.stderr)
    done = subprocess.run([*COMMAND, "--block", block, *GRID], check=True, stdout=subprocess.PIPE, text=True)
    return dict(json.loads(done.stdout))


def main() -> None:
    measured = {block: measure(block) for block in ("2048", "auto")}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(measured, indent=1) + "\n")
    print(f"rows are in {RESULTS}")


if __name__ == "__main__":
    main()

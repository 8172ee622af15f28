"""Benchmarks the planning service under load, attacks and kills.

    python -m benchmarks.service                       every case; kill cases take half a minute each
    python -m benchmarks.service --minutes 30 kills    the kill case for half an hour
    python -m benchmarks.service hot streams --json    some cases, one JSON object each
    python -m benchmarks.service --list

The exit status is 1 if a promise is broken. Servers run on loopback and end with this process.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import signal
import sys
import time
from typing import Any

from benchmarks.serving import attacks, kills, load


def main() -> int:
    """Runs the cases; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "cases", nargs="*", help="names of cases, or prefixes of names; default: all but memory"
    )
    parser.add_argument("--minutes", type=float, default=0.5, help="duration of each kill case")
    parser.add_argument("--json", action="store_true", help="one JSON object per case")
    parser.add_argument("--list", action="store_true", help="print the names of cases")
    args = parser.parse_args()
    faulthandler.enable()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the servers too
    cases = dict([*load.cases(), *attacks.cases(), *kills.cases(60 * args.minutes)])
    if args.list:
        print("\n".join(cases))
        return 0
    selected = [name for name in cases if any(name.startswith(prefix) for prefix in args.cases)]
    if args.cases and not selected:
        parser.error(f"no case of that name; cases are {', '.join(cases)}")
    failures = 0
    for name in selected or [name for name in cases if name != "memory"]:
        start = time.monotonic()
        row: dict[str, Any] = {"case": name, "ok": True}
        try:
            row |= cases[name]()
        except Exception as error:
            row |= {"ok": False, "error": f"{type(error).__name__}: {error}"}
            failures += 1
        row["seconds"] = round(time.monotonic() - start, 1)
        print(json.dumps(row) if args.json else _line(row), flush=True)
    return int(failures > 0)


def _line(row: dict[str, Any]) -> str:
    figures = ", ".join(f"{name} {value}" for name, value in row.items() if name not in ("case", "ok"))
    return f"{'ok' if row['ok'] else 'FAILED':7}{row['case']:24}{figures}"


if __name__ == "__main__":
    sys.exit(main())

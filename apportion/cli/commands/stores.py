"""`apportion store`: folders of plans, of servers and of `apportion precompute`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from apportion.cli import options
from apportion.cli.output import FAILED, OK, count, emit, progress

if TYPE_CHECKING:
    from collections.abc import Iterator

    from apportion.service.offline import Held
    from apportion.service.store import StoreReport

app = typer.Typer(help="Look after folders of plans.", no_args_is_help=True)


@app.command()
def check(
    folder: Annotated[Path, typer.Argument(help="The folder of a server, or of precompute.", metavar="DIR")],
    verify: Annotated[
        bool, typer.Option("--verify", help="Lower compact plans, and check them against every rule.")
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Read every plan of a folder and say which are damaged or missing. Exit code 1 if one is.

    A folder of precompute must have the plans of all iterations that were asked for. No server and no precompute may
    be at work in it.

    [bold]Examples[/bold]

      apportion store check plans/

      apportion store check plans/ --verify --json
    """
    from apportion.service.offline import held_in
    from apportion.service.store import check_store

    with progress("checking") as step:
        found = check_store(
            folder, verify=verify, progress=lambda done, total: step("", total=total) if done else None
        )
    held = held_in(folder)
    record = _record(folder, verify, found, held)
    emit(record, as_json, lambda: _headline(record), *(lambda line=line: line for line in _remarks(record)))
    raise typer.Exit(OK if record["ok"] else FAILED)


def _record(folder: Path, verified: bool, found: StoreReport, held: Held | None) -> dict[str, Any]:
    precomputed = None
    if held is not None:
        whole = held.there - len(held.lost)
        precomputed = {"asked": held.asked, "there": whole, "lost": list(held.lost)}
    return {
        "store": str(folder),
        "ok": not found.bad and (held is None or held.complete),
        "verified": verified,
        "records": found.records,
        "packs": found.packs,
        "bytes": found.bytes,
        "bad": [{"path": str(item.path), "why": item.why} for item in found.bad],
        "iterations": precomputed,
    }


def _headline(record: dict[str, Any]) -> str:
    from apportion.ir.plan.summary import human_bytes

    size = f"{count(record['packs'], 'plan')}, {human_bytes(record['bytes'])}"
    if record["ok"]:
        return f"{record['store']}: {size}, all whole{' and verified' if record['verified'] else ''}"
    return f"{record['store']}: {size}, {count(len(record['bad']), 'bad plan') if record['bad'] else 'incomplete'}"


def _remarks(record: dict[str, Any]) -> Iterator[str]:
    yield from (f"  {item['path']}: {item['why']}" for item in record["bad"])
    iterations = record["iterations"]
    if record["bad"] and iterations is not None:
        yield "  remove these files, then the same precompute command plans them again"
    if iterations is None:
        return
    yield f"  {iterations['there']:,} of {count(iterations['asked'], 'iteration')} are there"
    yield from (f"  {lost}: its plan is not there" for lost in iterations["lost"])
    if iterations["there"] < iterations["asked"]:
        yield "  the same precompute command plans what is missing"

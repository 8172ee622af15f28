"""`apportion store`: what servers and `apportion precompute` keep, looked after while nobody works on it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from apportion.cli import files, options
from apportion.cli.commands.service.jobs import AdminKey, Cert, Certificates, key_in
from apportion.cli.output import FAILED, OK, count, emit, progress
from apportion.ir.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from apportion.service.offline import Held
    from apportion.service.store import Store, StoreReport

app = typer.Typer(help="Look after folders and other stores of plans.", no_args_is_help=True)

Place = Annotated[
    str,
    typer.Argument(help="Folder of a server or of precompute, or redis://HOST:PORT/0.", metavar="STORE"),
]


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


@app.command()
def prune(
    store: Place,
    days: Annotated[
        float | None, typer.Option("--days", help="Drop what was made more days ago.", min=0.0)
    ] = None,
    gb: Annotated[
        float | None,
        typer.Option(
            "--gb", help="Drop the oldest until plans and records take so many 10^9 bytes.", min=0.0
        ),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Drop plans that no iteration needs. No server may be at work; one does the same by itself.

    Without --days and --gb nothing but records that belong to nothing is dropped. Servers have --store-days and
    --store-gb for it.

    [bold]Examples[/bold]

      apportion store prune .apportion --days 7

      apportion store prune .apportion --gb 2 --json
    """
    from contextlib import closing

    from apportion.ir.plan.summary import human_bytes
    from apportion.service.engine.kept.prune import prune as prune_store

    if not _is_url(store):
        _check_there(Path(store))
    with closing(_opened(store)) as held, progress("dropping") as step:
        most = None if gb is None else int(gb * 1e9)
        found = prune_store(held, days, most, lambda done, total: step("", total=total))
    record = {
        "store": _shown(store),
        "dropped": found.dropped,
        "dropped_bytes": found.dropped_bytes,
        "kept": found.kept,
        "kept_bytes": found.kept_bytes,
        "records_dropped": found.records,
    }
    said = f"{count(found.dropped, 'plan')} dropped, {human_bytes(found.dropped_bytes)}"
    kept = f"{count(found.kept, 'plan')} kept, {human_bytes(found.kept_bytes)}"
    emit(record, as_json, lambda: f"{_shown(store)}: {said}; {kept}")


@app.command()
def compact(
    folder: Annotated[Path, typer.Argument(help="The folder of a server.", metavar="DIR")],
    as_json: options.AsJson = False,
) -> None:
    """Write a folder's index anew, as small as it can be. It needs room for a second index meanwhile.

    No server may be at work; one gives free space back by itself, a part at a time.

    [bold]Example[/bold]

      apportion store compact .apportion
    """
    from contextlib import closing

    from apportion.ir.plan.summary import human_bytes
    from apportion.service.store import SqliteStore

    _check_there(folder)
    with closing(SqliteStore(folder)) as store:
        before, after = store.compact()
    record = {"store": str(folder), "bytes_before": before, "bytes_after": after}
    emit(
        record, as_json, lambda: f"{folder}: the index had {human_bytes(before)}, it has {human_bytes(after)}"
    )


@app.command("export")
def export(
    source: Annotated[
        str,
        typer.Argument(help="URL of a server, which goes on meanwhile; or a store.", metavar="URL|STORE"),
    ],
    file: Annotated[Path, typer.Argument(help="The file to write, a tar.", metavar="FILE")],
    admin_key_file: AdminKey = None,
    ca: Certificates = None,
    cert: Cert = None,
    as_json: options.AsJson = False,
) -> None:
    """Copy all that a server or a store keeps into one file.

    Of a server at work these are its jobs, keys and plans, and no epoch that goes on: after `store import` runs begin
    new ones, and find their plans. Of a store that nobody writes it is everything.

    [bold]Examples[/bold]

      apportion store export http://127.0.0.1:8321 backup.tar

      apportion store export .apportion moved.tar
    """
    from contextlib import closing

    from apportion.ir.plan.summary import human_bytes

    files.check_output("FILE", file)
    part, size = file.with_name(f"{file.name}.part"), 0
    try:
        with part.open("wb") as written, progress("copying", detail=lambda: human_bytes(size)):
            if source.startswith(("http://", "https://")):
                from apportion.service.client import export_store

                def copied(done: int) -> None:
                    nonlocal size
                    size = done

                export_store(
                    source, written, admin_key=key_in(admin_key_file), ca=ca, cert=cert, progress=copied
                )
            else:
                from apportion.service.store.archive import archive

                with closing(_opened(source, read_only=True)) as held:
                    for chunk in archive(held):
                        size += written.write(chunk)
            written.flush()
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)
    record = {"store": _shown(source), "file": str(file), "bytes": size}
    emit(record, as_json, lambda: f"{file}: {human_bytes(size)} of {_shown(source)}")


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="A file that `store export` wrote.", metavar="FILE")],
    store: Place,
    as_json: options.AsJson = False,
) -> None:
    """Put what `store export` copied into a store, made where there is none, that has no job of the same names.

    The file is read twice: nothing is written before all of it was found whole.

    [bold]Example[/bold]

      apportion store import backup.tar .apportion
    """
    from contextlib import closing

    from apportion.service.store.archive import unpack

    with closing(_opened(store)) as held, progress("reading") as step:
        found = unpack(file, held, lambda done: step(""))
    record = {"store": _shown(store), "records": found.records, "packs": found.packs, "live": found.live}
    said = f"{count(found.records, 'record')}, {count(found.packs, 'plan')}"
    after = "; runs begin new epochs" if found.live else ""
    emit(record, as_json, lambda: f"{_shown(store)}: {said} of {file}{after}")


def _opened(place: str, read_only: bool = False) -> Store:
    from apportion.service.store import open_store

    return open_store(place if _is_url(place) else Path(place), read_only=read_only)


def _is_url(place: str) -> bool:
    return place.startswith(("redis://", "rediss://"))


def _check_there(folder: Path) -> None:
    from apportion.service.store.index import INDEX

    if not (folder / INDEX).is_file():
        rule = f"is no store: it has no {INDEX}"
        raise ConfigError("STORE", str(folder), rule, "name the folder of a server (its --dir)")


def _shown(place: str) -> str:
    """Without a password."""
    scheme, mark, rest = place.partition("://")
    return f"{scheme}{mark}{rest.rpartition('@')[2]}"


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

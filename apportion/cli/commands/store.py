"""`apportion store`: checks and prunes folders of plans."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from apportion.cli import options
from apportion.cli.output import FAILED, OK, count, emit, progress
from apportion.ir.errors import ConfigError
from apportion.ir.version import __version__

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from apportion.service.pack import Pack
    from apportion.service.store.folder import File, Folder

app = typer.Typer(name="store", help="Check and prune folders of plans.", no_args_is_help=True)

Place = Annotated[Path, Argument(help="A server's --store or precompute's --out.", metavar="FOLDER")]


@app.command()
def check(
    folder: Place,
    verify: Annotated[
        bool, Option("--verify", help="Plan every request again, verify the plan, and compare.")
    ] = False,
    workers: options.Workers = 0,
    as_json: options.AsJson = False,
) -> None:
    """Read every plan of a folder and list damaged ones. Exit code 1 if there are any.

    Servers may keep using the folder. You may delete a damaged plan: it is made
    again.

    [bold]Examples[/bold]

      apportion store check plans/

      apportion store check plans/ --verify --json
    """
    from concurrent.futures import ThreadPoolExecutor

    from apportion.service.workers import executor_of

    files, bad = list(_open_store(folder).files()), list[dict[str, str]]()
    if not files:
        rule = f"has no plans of release {__version__}"
        raise ConfigError("FOLDER", str(folder), rule, "name the --store of a server or an --out")
    planner, workers = executor_of(workers, None) if verify else (None, 1)
    try:
        with ThreadPoolExecutor(workers) as threads, progress("checking", len(files), not as_json) as step:
            for file, fault in zip(files, threads.map(lambda f: _fault(f, planner), files), strict=True):
                bad += [{"path": file.path, "why": fault}] if fault else []
                step("")
    finally:
        if planner is not None:
            planner.shutdown(cancel_futures=True)
    size = sum(file.size for file in files)
    record = {"folder": str(folder), "ok": not bad, "verified": verify, "plans": len(files), "bytes": size}
    emit(record | {"bad": bad}, as_json, lambda: _summary_of_check(record, bad))
    raise typer.Exit(FAILED if bad else OK)


@app.command()
def prune(
    folder: Place,
    gb: Annotated[
        float | None,
        Option(help="Above this many GB (10^9), delete the least recently used plans.", min=0, max=1e9),
    ] = None,
    days: Annotated[
        float | None, Option(help="Delete plans unused for this many days.", min=0, max=1e5)
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Delete plans by age and size, as `apportion serve` does with --store-days and --store-gb.

    Servers may keep using the folder: missing plans are made again.

    [bold]Examples[/bold]

      apportion store prune plans/ --days 7

      apportion store prune plans/ --gb 2 --json
    """
    if gb is None and days is None:
        raise ConfigError("limits", "none", "at least one is needed", "give --gb, --days or both")
    store = _open_store(folder)
    max_bytes, oldest_s = None if gb is None else int(gb * 1e9), None if days is None else days * 86400.0
    evicted, freed = store.prune(max_bytes, oldest_s)
    sizes = [file.size for file in store.files()]
    record = {"folder": str(folder), "evicted": evicted, "evicted_bytes": freed}
    record |= {"kept": len(sizes), "kept_bytes": sum(sizes)}
    message = f"{folder}: {_amount(evicted, freed)} evicted; {_amount(len(sizes), sum(sizes))} kept"
    emit(record, as_json, lambda: message)


def _open_store(folder: Path) -> Folder:
    from apportion.service.store import Folder

    if not folder.is_dir():
        raise ConfigError(
            "FOLDER", str(folder), "is not a folder", "name the --store of a server or an --out"
        )
    return Folder(folder)


def _fault(file: File, planner: Executor | None) -> str:
    """Describes the fault of a pack; empty if it is intact. planner: plans the request again, to compare."""
    from apportion.ir.bytes.iteration_slice import IterationSlice
    from apportion.ir.bytes.transport import decompress
    from apportion.ir.errors import DecodeError
    from apportion.service.pack import Pack

    try:
        path = Path(file.path)
        pack = Pack.decode(path.read_bytes(), bytes.fromhex(path.stem))
        for rank in range(pack.ranks):
            if IterationSlice.decode(decompress(pack.slice(rank))).id != pack.head.id:
                return f"the slice of rank {rank} belongs to another plan"
        return "" if planner is None else _replan_fault(pack, planner)
    except FileNotFoundError:  # evicted meanwhile
        return ""
    except (OSError, DecodeError, ValueError) as error:
        return str(error)


def _replan_fault(pack: Pack, planner: Executor) -> str:
    from apportion.service.pack import Pack
    from apportion.service.workers import Refusal, plan_pack

    outcome = planner.submit(plan_pack, pack.request).result()
    if isinstance(outcome, Refusal):
        return f"its request cannot be planned: {outcome.detail}"
    new_pack = Pack.decode(outcome.data)
    if (new_pack.key, new_pack.head.id) == (pack.key, pack.head.id):
        return ""
    return f"it has plan {pack.head.id.hex()[:16]}, but its request now gives {new_pack.head.id.hex()[:16]}"


def _summary_of_check(record: dict[str, Any], bad: list[dict[str, str]]) -> str:
    size = _amount(record["plans"], record["bytes"])
    verdict = f"{count(len(bad), 'damaged plan')}" if bad else "all intact"
    lines = [
        f"{record['folder']}: {size}, {verdict}{' and verified' if record['verified'] and not bad else ''}"
    ]
    return "\n".join([*lines, *(f"  {item['path']}: {item['why']}" for item in bad)])


def _amount(plans: int, size: int) -> str:
    from apportion.ir.plan.summary import human_bytes

    return f"{count(plans, 'plan')}, {human_bytes(size)}"

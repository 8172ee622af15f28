"""`apportion serve`: the planning service."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from apportion.cli import inputs, options, settings
from apportion.cli.output import count, emit, note
from apportion.ir.errors import ConfigError

if TYPE_CHECKING:
    from apportion.service.http.serve import Options, Started


def serve(
    context: typer.Context,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on. Beyond loopback it needs an admin key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="0 takes a free one.", min=0, max=65535)] = 8321,
    folder: Annotated[
        Path,
        typer.Option(
            "--dir",
            help="Folder of the store, made where there is none.",
            metavar="DIR",
            envvar="APPORTION_SERVE_DIR",
        ),
    ] = Path(".apportion"),
    store: Annotated[
        str,
        typer.Option(
            "--store",
            help="Where jobs and plans are kept: `sqlite` (in --dir), `redis://HOST:PORT/0`, or `memory` (gone when "
            "the server ends).",
            metavar="sqlite|redis://...|memory",
        ),
    ] = "sqlite",
    workers: Annotated[
        str,
        typer.Option("--workers", help="Processes that plan, or `ray` for a Ray cluster.", metavar="N|ray"),
    ] = "1",
    admin_key_file: Annotated[
        Path | None,
        typer.Option(
            "--admin-key-file",
            help="File with the key that creates and deletes jobs. Without one, whoever reaches the server may.",
            metavar="FILE",
        ),
    ] = None,
    ssl_keyfile: Annotated[
        Path | None, typer.Option("--ssl-keyfile", help="TLS: private key (PEM).", metavar="FILE")
    ] = None,
    ssl_certfile: Annotated[
        Path | None, typer.Option("--ssl-certfile", help="TLS: certificate chain (PEM).", metavar="FILE")
    ] = None,
    deadline: Annotated[
        float, typer.Option("--deadline", help="Seconds that planning one iteration may take.", min=0.1)
    ] = 60.0,
    max_lookahead: Annotated[
        int,
        typer.Option(
            "--max-lookahead", help="Most iterations that a job may have planned ahead.", min=1, max=4096
        ),
    ] = 256,
    max_jobs: Annotated[int, typer.Option("--max-jobs", help="Most jobs at a time.", min=1)] = 256,
    keep: Annotated[
        int, typer.Option("--keep", help="Iterations kept behind the one that a job's ranks are at.", min=1)
    ] = 1024,
    store_gb: Annotated[
        float, typer.Option("--store-gb", help="Plans kept for later, in 10^9 bytes.", min=0.001)
    ] = 16.0,
    log_format: Annotated[
        str, typer.Option("--log-format", help="Log on stderr: `text` or `json`, one event a line.")
    ] = "text",
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            help="File of options (YAML or JSON): names of flags without dashes. Command line and environment "
            "go before it.",
            metavar="SERVE.yaml",
            is_eager=True,
            callback=settings.take_file,
        ),
    ] = None,
    show_config: Annotated[
        bool, typer.Option("--show-config", help="Print every option, where it is from, and end.")
    ] = False,
    parent: Annotated[int | None, typer.Option("--parent", hidden=True)] = None,
    as_json: options.AsJson = False,
) -> None:
    """Plan ahead of training jobs and hand every rank its plans, over HTTP.

    `apportion job create` makes a job, once; its url and key go to every rank, as
    PlannedLoader(source="URL/v1/jobs/NAME", key=...). What was submitted is kept
    in --dir: a server that was stopped or killed goes on with the same command.
    Ctrl-C or SIGTERM finish what is being planned. Every option may also be a line
    of --config, or in the environment: APPORTION_SERVE_PORT for --port.

    [bold]Examples[/bold]

      apportion serve --workers 4

      apportion serve --host 0.0.0.0 --admin-key-file admin.key --ssl-keyfile key.pem --ssl-certfile cert.pem

      apportion serve --config serve.yaml --show-config
    """
    if show_config:
        told = settings.effective(context)
        emit(told, as_json, lambda: settings.as_file(told))
        return
    for package in ("fastapi", "uvicorn", "uvloop", "httptools", "prometheus_client"):
        inputs.need(package, "service", "the planning service")
    from apportion.service.http import serve as server
    from apportion.service.limits import Limits

    limits = Limits(
        deadline_s=deadline,
        lookahead=max_lookahead,
        jobs=max_jobs,
        keep=keep,
        store_bytes=int(store_gb * 1e9),
    )
    chosen = server.Options(
        host=host,
        port=port,
        store=_store(store, folder),
        workers=inputs.workers_of(workers),
        admin=None if admin_key_file is None else _admin(admin_key_file),
        keyfile=ssl_keyfile,
        certfile=ssl_certfile,
        log_format=_format(log_format),
        limits=limits,
        parent=parent,
    )
    server.serve(chosen, lambda started: _announce(chosen, started, as_json))


def _announce(chosen: Options, started: Started, as_json: bool) -> None:
    emit(asdict(started), as_json, lambda: _message(chosen, started))
    sys.stdout.flush()  # whoever started it may be reading a pipe
    if started.in_the_clear:
        note("warning: keys and plans travel unencrypted; --ssl-keyfile and --ssl-certfile turn TLS on")


def _message(chosen: Options, started: Started) -> str:
    told = "" if chosen.admin is None else " --admin-key-file FILE"
    where = "on Ray" if chosen.workers == "ray" else "of this machine"
    return (
        f"Serving {started.url} (docs: {started.url}/docs)\n"
        f"  store    {started.store}\n"
        f"  planning {count(started.workers, 'worker')} {where}, process {started.pid}\n"
        "\n"
        "Make a job, once; every rank gets its url and key:\n"
        "\n"
        f"  apportion job create run1 --server {started.url} --ranks 64 --recipe fcp{told}\n"
        f'  ap.PlannedLoader(dataset, source="{started.url}/v1/jobs/run1", key="KEY", ...)\n'
    )


def _store(text: str, folder: Path) -> Path | str:
    if text == "sqlite":
        return folder
    return "memory:" if text == "memory" else text


def _format(text: str) -> Literal["text", "json"]:
    if text == "text":
        return "text"
    if text == "json":
        return "json"
    raise ConfigError("--log-format", text, "is no format of logs", "write text or json")


def _admin(path: Path) -> bytes:
    from apportion.service.http.auth import key_digest

    return key_digest(inputs.key_of(path), "--admin-key-file")

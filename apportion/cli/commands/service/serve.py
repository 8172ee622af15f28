"""`apportion serve`: the planning service."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal
from urllib.parse import urlsplit

import typer

from apportion.cli import inputs, options, settings
from apportion.cli.output import count, emit, note
from apportion.ir.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from apportion.service.http.run.options import Options
    from apportion.service.http.run.serve import Started


Host = Annotated[
    str, typer.Option("--host", help="Address to listen on. Beyond loopback it needs an admin key.")
]
Folder = Annotated[
    Path,
    typer.Option(
        "--dir",
        help="Folder of the store, made where there is none.",
        metavar="DIR",
        envvar="APPORTION_SERVE_DIR",
    ),
]
Store = Annotated[
    str,
    typer.Option(
        "--store",
        help="Where jobs and plans are kept: `sqlite` (in --dir), `redis://HOST:PORT/0`, or `memory` (gone when "
        "the server ends).",
        metavar="sqlite|redis://...|memory",
    ),
]
RedisPasswordFile = Annotated[
    Path | None,
    typer.Option(
        "--redis-password-file",
        help="File with the password of a Redis. Or APPORTION_REDIS_PASSWORD in the environment.",
        metavar="FILE",
    ),
]
Workers = Annotated[
    str,
    typer.Option(
        "--workers",
        help="Processes that plan (one more stands by for short plans), or `ray` for a Ray cluster.",
        metavar="N|ray",
    ),
]
WorkerGb = Annotated[
    float,
    typer.Option(
        "--worker-gb", help="Memory of each worker, in 2^30 bytes; 0 for no limit. Not with Ray.", min=0
    ),
]
AdminKeyFile = Annotated[
    Path | None,
    typer.Option(
        "--admin-key-file",
        help="File with the key that creates and deletes jobs. Default: one is made in --dir, and commands of the "
        "same user on this machine find it.",
        metavar="FILE",
    ),
]
MetricsKeyFile = Annotated[
    Path | None,
    typer.Option(
        "--metrics-key-file", help="File with a key that opens /metrics and /docs alone.", metavar="FILE"
    ),
]
Insecure = Annotated[
    bool,
    typer.Option(
        "--insecure", help="No admin key: all users of this machine may do everything. Loopback only."
    ),
]
PublicUrl = Annotated[
    str,
    typer.Option(
        "--public-url", help="How clients call this server: in answers, before paths.", metavar="URL"
    ),
]
SslKeyfile = Annotated[
    Path | None, typer.Option("--ssl-keyfile", help="TLS: private key (PEM).", metavar="FILE")
]
SslCertfile = Annotated[
    Path | None, typer.Option("--ssl-certfile", help="TLS: certificate chain (PEM).", metavar="FILE")
]
SslCaCerts = Annotated[
    Path | None,
    typer.Option(
        "--ssl-ca-certs",
        help="TLS: clients must show a certificate of one of these authorities (PEM).",
        metavar="FILE",
    ),
]
Deadline = Annotated[
    float, typer.Option("--deadline", help="Seconds that planning one iteration may take.", min=0.1)
]
MaxLookahead = Annotated[
    int,
    typer.Option(
        "--max-lookahead", help="Most iterations that a job may have planned ahead.", min=1, max=4096
    ),
]
Keep = Annotated[
    int, typer.Option("--keep", help="Iterations kept behind the one that a job's ranks are at.", min=1)
]
StoreGb = Annotated[
    float,
    typer.Option("--store-gb", help="Plans kept for later, and records, in 10^9 bytes.", min=0.001),
]
StoreDays = Annotated[
    float,
    typer.Option(
        "--store-days", help="Days that a plan is kept for later, once it was made; 0 for ever.", min=0.0
    ),
]
JobDays = Annotated[
    float,
    typer.Option(
        "--job-days",
        help="Days after which a job that nobody asks anything of is deleted; 0 for never.",
        min=0.0,
    ),
]
Standby = Annotated[
    bool,
    typer.Option(
        "--standby",
        help="Where another server has the store, wait until it ends, and take over. For Redis: two servers "
        "behind one address that /readyz chooses between.",
    ),
]
LogFormat = Annotated[
    str, typer.Option("--log-format", help="Log on stderr: `text` or `json`, one event a line.")
]
Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="File of options (YAML or JSON): names of flags without dashes. Command line and environment "
        "go before it.",
        metavar="SERVE.yaml",
        is_eager=True,
        callback=settings.take_file,
    ),
]
ShowConfig = Annotated[
    bool, typer.Option("--show-config", help="Print every option, where it is from, and end.")
]


def serve(
    context: typer.Context,
    host: Host = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="0 takes a free one.", min=0, max=65535)] = 8321,
    folder: Folder = Path(".apportion"),
    store: Store = "sqlite",
    redis_password_file: RedisPasswordFile = None,
    workers: Workers = "1",
    worker_gb: WorkerGb = 8.0,
    admin_key_file: AdminKeyFile = None,
    metrics_key_file: MetricsKeyFile = None,
    insecure: Insecure = False,
    public_url: PublicUrl = "",
    ssl_keyfile: SslKeyfile = None,
    ssl_certfile: SslCertfile = None,
    ssl_ca_certs: SslCaCerts = None,
    deadline: Deadline = 60.0,
    max_lookahead: MaxLookahead = 256,
    max_jobs: Annotated[int, typer.Option("--max-jobs", help="Most jobs at a time.", min=1)] = 256,
    keep: Keep = 1024,
    store_gb: StoreGb = 16.0,
    store_days: StoreDays = 30.0,
    job_days: JobDays = 0.0,
    standby: Standby = False,
    log_format: LogFormat = "text",
    config: Config = None,
    show_config: ShowConfig = False,
    parent: Annotated[int | None, typer.Option("--parent", hidden=True)] = None,
    as_json: options.AsJson = False,
) -> None:
    """Plan ahead of training jobs and hand every rank its plans, over HTTP.

    `apportion job create` makes a job, once, with an admin key that it finds by
    itself where the server is one of yours on this machine; the job's url and key go to
    every rank, as PlannedLoader(source="URL/v1/jobs/NAME", key=...). What was submitted is kept
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
    from apportion.service.http.run import serve as server
    from apportion.service.http.run.options import Options
    from apportion.service.limits import Limits
    from apportion.service.private import ADMIN_KEY

    limits = Limits(
        deadline_s=deadline,
        lookahead=max_lookahead,
        jobs=max_jobs,
        keep=keep,
        store_bytes=int(store_gb * 1e9),
        store_s=store_days * 86400.0,
        job_s=job_days * 86400.0,
    )
    take = _keys_of(folder, admin_key_file, metrics_key_file, insecure)
    key, digests = take()
    chosen = Options(
        host=host,
        port=port,
        store=_store(context, store, folder),
        redis_password=None if redis_password_file is None else inputs.key_of(redis_password_file),
        workers=inputs.workers_of(workers),
        worker_bytes=int(worker_gb * 2**30),
        standby=standby,
        admin=digests[0],
        metrics=digests[1],
        shown=key,
        admin_file=None if insecure else admin_key_file or folder / ADMIN_KEY,
        folder=folder,
        public_url=public_url,
        keyfile=ssl_keyfile,
        certfile=ssl_certfile,
        ca_certs=ssl_ca_certs,
        log_format=_format(log_format),
        limits=limits,
        parent=parent,
        renew=take,
    )
    server.serve(chosen, lambda started: _announce(chosen, started, as_json))


def _announce(chosen: Options, started: Started, as_json: bool) -> None:
    emit(asdict(started), as_json, lambda: _message(chosen, started))
    sys.stdout.flush()  # whoever started it may be reading a pipe
    if started.in_the_clear:
        note("warning: keys and plans travel unencrypted; --ssl-keyfile and --ssl-certfile turn TLS on")


def _message(chosen: Options, started: Started) -> str:
    keys = (
        f"admin key in {chosen.admin_file}"
        if chosen.admin_file
        else "none: all users of this machine may do all"
    )
    where = "on Ray" if chosen.workers == "ray" else "of this machine"
    return (
        f"Serving {started.url}\n"
        f"  store    {started.store}\n"
        f"  planning {count(started.workers, 'worker')} {where}, process {started.pid}\n"
        f"  keys     {keys}\n"
        "\n"
        "Make a job, once; every rank gets its url and key:\n"
        "\n"
        f"  apportion job create run1 --server {started.url} --ranks 64 --recipe fcp\n"
        f'  ap.PlannedLoader(dataset, source="{started.url}/v1/jobs/run1", key="KEY", ...)\n'
    )


def _store(context: typer.Context, text: str, folder: Path) -> Path | str:
    """Raises ConfigError for a password that every user of the machine can see in the list of processes."""
    source = context.get_parameter_source("store")
    if "@" in text and source is not None and source.name == "COMMANDLINE" and urlsplit(text).password:
        shown = text.split("@")[-1]
        rule = "has a password, which all users of this machine see in the list of processes"
        raise ConfigError("--store", shown, rule, "change it, and write it to --redis-password-file FILE")
    if text == "sqlite":
        return folder
    return "memory:" if text == "memory" else text


def _format(text: str) -> Literal["text", "json"]:
    if text == "text":
        return "text"
    if text == "json":
        return "json"
    raise ConfigError("--log-format", text, "is no format of logs", "write text or json")


def _keys_of(
    folder: Path, admin: Path | None, metrics: Path | None, insecure: bool
) -> Callable[[], tuple[str | None, tuple[bytes | None, bytes | None]]]:
    """What reads the key files: the admin key, if any, and the digests of it and of the key for metrics. Makes the
    folder. Raises ConfigError."""
    from apportion.service.http.auth import key_digest
    from apportion.service.private import ADMIN_KEY, own_key, private_folder

    if insecure and (admin or metrics):
        raise ConfigError("--insecure", True, "a server with keys is not keyless", "leave one of them out")
    private_folder(folder)

    def take() -> tuple[str | None, tuple[bytes | None, bytes | None]]:
        key = None if insecure else own_key(folder) if admin is None else inputs.key_of(admin)
        figures = None if metrics is None else key_digest(inputs.key_of(metrics), "--metrics-key-file")
        named = str(folder / ADMIN_KEY) if admin is None else "--admin-key-file"
        return key, (None if key is None else key_digest(key, named), figures)

    return take

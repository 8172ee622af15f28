"""`apportion serve`: the planning service."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

from typer import Option

from apportion.cli import inputs, options

_GB, _DAY_S = 10**9, 86400.0


def serve(
    host: Annotated[str, Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, Option(help="Port to listen on; 0: a free port.", min=0, max=65535)] = 8321,
    store: Annotated[
        str | None,
        Option(
            help="Store of plans: a folder, or redis://HOST:PORT/0. Default: in memory only.",
            metavar="FOLDER|redis://...",
        ),
    ] = None,
    store_gb: Annotated[
        float | None,
        Option(
            help="Above this many GB (10^9), delete the least recently used plans. Default: no limit.",
            min=0.001,
            max=1e9,
        ),
    ] = None,
    store_days: Annotated[
        float | None,
        Option(help="Delete plans unused for this many days. Default: never; Redis: 1.", min=0.001, max=1e5),
    ] = None,
    workers: options.Workers = 0,
    worker_gb: Annotated[
        float, Option(help="Memory limit of a worker, in GB (10^9).", min=0.1, max=1e6)
    ] = 8.0,
    plan_s: Annotated[
        float, Option(help="Time limit of planning a request, in seconds.", min=0.1, max=1e6)
    ] = 600.0,
    token_file: options.TokenFile = None,
    tenants_file: Annotated[
        Path | None,
        Option(
            help="File with a line `name: token` for each tenant; they share the workers fairly.",
            metavar="FILE",
        ),
    ] = None,
    ray: options.Ray = None,
    as_json: options.AsJson = False,
) -> None:
    """Serve plans to training jobs over HTTP, each request planned once.

    Ranks use it with PlannedLoader(source="http://HOST:PORT"), people with a
    browser, curl, or `apportion plan --server`. Losing its data never changes a
    result: lost plans are made again, byte for byte. Ctrl-C or SIGTERM ends
    it. Each option can be set in the environment: --store-gb as
    APPORTION_SERVE_STORE_GB. On an open network put a proxy with TLS in front
    (deploy/nginx.conf).

    [bold]Examples[/bold]

      apportion serve

      apportion serve --store plans/ --store-gb 50 --workers 8

      apportion serve --host 0.0.0.0 --token-file token --store redis://cache:6379/0
    """
    for package in ("fastapi", "h11", "prometheus_client", "uvicorn", "uvloop"):
        inputs.need(package, "service", "the planning service")
    from apportion.service.http.serve import Settings, run

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    settings = Settings(
        host=host,
        port=port,
        store=store,
        store_bytes=None if store_gb is None else int(store_gb * _GB),
        store_age_s=None if store_days is None else store_days * _DAY_S,
        workers=workers,
        worker_bytes=int(worker_gb * _GB),
        plan_s=plan_s,
        token=inputs.token_of(token_file),
        tenants=tenants_file,
        ray=ray,
        announce=as_json,
    )
    run(settings)

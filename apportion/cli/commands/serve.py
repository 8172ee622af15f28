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
    port: Annotated[int, Option(help="Port to listen on; 0 takes a free one.", min=0, max=65535)] = 8321,
    store: Annotated[
        str | None,
        Option(
            help="Where plans are kept: a folder, or redis://HOST:PORT/0. Default: in memory only.",
            metavar="FOLDER|redis://...",
        ),
    ] = None,
    store_gb: Annotated[
        float | None,
        Option(help="Evict the plans unused longest beyond so many GB (10^9).", min=0.001, max=1e9),
    ] = None,
    store_days: Annotated[
        float | None, Option(help="Evict plans unused for so many days.", min=0.001, max=1e5)
    ] = None,
    workers: options.Workers = 0,
    worker_gb: Annotated[
        float, Option(help="Memory that each of them may use, in GB (10^9).", min=0.1, max=1e6)
    ] = 8.0,
    plan_s: Annotated[
        float, Option(help="Seconds that planning one request may take.", min=0.1, max=1e6)
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
    """Plan for training jobs over HTTP, each request once, and keep the plans.

    Ranks use it with PlannedLoader(source="http://HOST:PORT"), people with a
    browser, curl, and `apportion plan --server`. Nothing it keeps is needed to
    be right: what is lost is planned again, byte for byte. It ends with Ctrl-C
    or SIGTERM. Each option can be set in the environment: --store-gb as
    APPORTION_SERVE_STORE_GB. On a network that strangers reach it belongs behind
    a proxy with TLS (deploy/nginx.conf).

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

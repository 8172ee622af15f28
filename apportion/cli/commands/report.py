"""`apportion report`: a plan as a page that a browser opens."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from apportion.cli import files, inputs, options
from apportion.cli.output import emit
from apportion.ir.errors import ConfigError

Output = Annotated[
    Path, Option("--output", "-o", help="Write the page here.", metavar="R.html", show_default=True)
]
_PLANS_PATH = "/v1/plans/"  # on servers


def report(
    plan: Annotated[
        str,
        Argument(
            help="A plan file, a file from a folder of plans, or the URL of a plan on a server.",
            metavar="PLAN|URL",
        ),
    ],
    output: Output = Path("report.html"),
    hardware: options.HardwareName = None,
    token_file: options.TokenFile = None,
    ca: options.Certificates = None,
    as_json: options.AsJson = False,
) -> None:
    """Write a page about a plan: one HTML file that opens offline in any browser.

    It shows figures next to their bounds, the simulated timeline of every rank,
    the ranks that compute each part of the mask, the traffic between ranks, and
    the candidates of a search.

    [bold]Examples[/bold]

      apportion report first.plan

      apportion report first.plan -o first.html --hardware h200

      apportion report plans/0.1.0/3f/3f02...d1.plan

      apportion report http://127.0.0.1:8321/v1/plans/3f02...d1
    """
    files.check_output("--output", output)
    if plan.startswith(("http://", "https://")):
        rule = "applies to plans simulated here; a server uses the job's hardware"
        inputs.refuse({"--hardware": hardware}, rule, "drop")
        page, ids = _server_page(plan, inputs.token_of(token_file), ca), list[str]()
    else:
        page, ids = _file_page(Path(plan), hardware)
    files.write(output, page)
    record = {"ids": ids, "file": str(output), "bytes": len(page)}
    emit(record, as_json, lambda: f"{output}: {len(page) / 1e6:.2f} MB, open it in a browser")


def _server_page(url: str, token: str | None, ca: Path | None) -> bytes:
    """The page that a server makes. Raises ConfigError, ServiceError, UnreachableError."""
    from apportion.service.client import Client

    server, _, key = url.partition(_PLANS_PATH)
    try:
        key_bytes = bytes.fromhex(key)
    except ValueError:
        key_bytes = b""
    if not key_bytes:
        raise ConfigError(
            "URL", url, f"must be SERVER{_PLANS_PATH}KEY, with a key of 64 hex digits", "copy the whole URL"
        )
    client = Client(server, token, ca=ca)
    try:
        return client.page(key_bytes)
    finally:
        client.close()


def _file_page(path: Path, hardware: str | None) -> tuple[bytes, list[str]]:
    """The page of the plans in a local file, and their ids."""
    from apportion.report import report_html

    plans = files.read_plans(path)
    page = report_html(plans, inputs.hardware_for(hardware, plans[0][1]))
    return page.encode(), [plan.id.hex() for _, plan in plans]

"""`apportion report`: a plan as a page that a browser opens."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from apportion.cli import files, inputs, options
from apportion.cli.output import emit
from apportion.ir.errors import ConfigError

if TYPE_CHECKING:
    from apportion.ir.bytes.codec import Plan
    from apportion.service.client import Client

Output = Annotated[
    Path, typer.Option("--output", "-o", help="Write the page here.", metavar="R.html", show_default=True)
]


def report(
    plan: Annotated[
        str,
        typer.Argument(
            help="A plan file, a folder of `apportion precompute`, or the URL of a server's job.",
            metavar="PLAN|FOLDER|URL",
        ),
    ],
    output: Output = Path("report.html"),
    epoch: Annotated[
        int,
        typer.Option("--epoch", help="With a folder or job: of this epoch. Of a job, 0: the newest.", min=0),
    ] = 0,
    iteration: Annotated[
        int, typer.Option("--iteration", help="With a folder or job: this iteration's microbatches.", min=0)
    ] = 0,
    hardware: options.HardwareName = None,
    key_file: Annotated[
        Path | None,
        typer.Option("--key-file", help="With a job: file with its key or the admin's.", metavar="FILE"),
    ] = None,
    ca: Annotated[
        Path | None,
        typer.Option("--ca", help="With a job: PEM file of certificates to trust.", metavar="FILE"),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Write a page about a plan: one HTML file that opens offline in any browser.

    It has the figures beside their bounds, what every rank does when (simulated),
    who computes which part of the mask, who sends to whom, and what a search tried.

    [bold]Examples[/bold]

      apportion report first.plan

      apportion report first.plan -o first.html --hardware h200

      apportion report plans --epoch 0 --iteration 12

      apportion report http://127.0.0.1:8321/v1/jobs/run1 --iteration 12
    """
    files.check_output("--output", output)
    if plan.startswith(("http://", "https://")):
        if hardware is not None:
            rule = "says what a plan is simulated on here, a server takes that of the job"
            raise ConfigError("--hardware", hardware, rule, "leave it out")
        page, ids = _asked(plan, key_file, ca, epoch, iteration), list[str]()
    else:
        page, ids = _made(Path(plan), hardware, epoch, iteration)
    files.write(output, page)
    record = {"ids": ids, "file": str(output), "bytes": len(page)}
    emit(record, as_json, lambda: f"{output}: {len(page) / 1e6:.2f} MB, open it in a browser")


def _asked(url: str, key_file: Path | None, ca: Path | None, epoch: int, iteration: int) -> bytes:
    """The page that a server makes. Raises ClientError."""
    from apportion.service.client import Client
    from apportion.service.private import admin_key_of

    client = Client(url, admin_key_of(url) if key_file is None else inputs.key_of(key_file), ca=ca)
    try:
        return client.report(epoch or _newest(client, ca), iteration)
    finally:
        client.close()


def _newest(client: Client, ca: Path | None) -> int:
    """The job's newest epoch; without a key from the list of jobs, which a server without keys shows."""
    from apportion.service.client import list_jobs

    if client.key is not None:
        return client.summary().epoch or 1
    server, _, name = client.url.rpartition("/v1/jobs/")
    return next((job.epoch for job in list_jobs(server, ca=ca) if job.name == name), 0) or 1


def _made(path: Path, hardware: str | None, epoch: int, iteration: int) -> tuple[bytes, list[str]]:
    """The page of plans that are here, and their ids."""
    from apportion.report import report_html

    the_hardware, plans = inputs.hardware_of(hardware), _plans(path, epoch, iteration)
    inputs.warn_of_mismatch(the_hardware, plans[0][1].request.cluster)
    inputs.warn_of_dtype(the_hardware, plans[0][1].request.model)
    return report_html(plans, the_hardware).encode(), [each.id.hex() for _, each in plans]


def _plans(path: Path, epoch: int, iteration: int) -> list[tuple[str, Plan]]:
    """(name, plan) of the file, or of each microbatch of an iteration of the folder."""
    if not path.is_dir():
        for option, value in (("--epoch", epoch), ("--iteration", iteration)):
            if value:
                rule = "says which plan of a folder, and this is a file"
                raise ConfigError(option, value, rule, f"drop {option}")
        return [(path.name, files.read_plan(path))]
    from apportion.service.offline import open_offline

    with open_offline(path) as held:
        found = held.iteration(held.key(epoch, iteration)).plans
    return [(f"microbatch {number}", each) for number, each in enumerate(found)]

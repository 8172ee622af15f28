"""`apportion job`: the jobs of a planning service."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from apportion.cli import inputs, options
from apportion.cli.output import emit, note

if TYPE_CHECKING:
    from rich.table import Table

    from apportion.service.client import JobSummary

app = typer.Typer(help="The jobs of a planning service.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="The job's name: letters, digits, `_`, `-`, `.`.", metavar="NAME")]
Server = Annotated[str, typer.Option("--server", help="URL of the service.", metavar="URL")]
AdminKey = Annotated[
    Path | None,
    typer.Option(
        "--admin-key-file", help="File with the server's admin key, where it has one.", metavar="FILE"
    ),
]
Certificates = Annotated[
    Path | None,
    typer.Option("--ca", help="PEM file of certificates to trust. Default: the system's.", metavar="FILE"),
]
SERVER = "http://127.0.0.1:8321"


@app.command("create")
def create(
    name: Name,
    server: Server = SERVER,
    cluster: options.ClusterFile = None,
    model: options.ModelFile = None,
    hardware: options.HardwareName = None,
    ranks: options.Ranks = None,
    ranks_per_node: options.RanksPerNode = None,
    tokens_per_rank: options.MicrobatchTokens = options.SAMPLED,
    microbatches: options.Microbatches = 1,
    recipe: options.RecipeName = "fcp",
    block: options.Block = None,
    pods: options.Pods = None,
    seed: options.Seed = 0,
    lookahead: Annotated[
        int, typer.Option("--lookahead", help="Iterations planned before ranks ask for them.", min=1)
    ] = 8,
    key_file: Annotated[
        Path | None,
        typer.Option(
            "--key-file",
            help="File with the job's key, at least 16 characters. Default: a new one.",
            metavar="FILE",
        ),
    ] = None,
    admin_key_file: AdminKey = None,
    ca: Certificates = None,
    as_json: options.AsJson = False,
) -> None:
    """Create a job and print its URL and key, which go to every rank's PlannedLoader.

    Again with the same --key-file and the same job is no error: the launcher of a
    training run may create its job whenever it starts.

    [bold]Examples[/bold]

      apportion job create run1 --ranks 64 --recipe fcp

      apportion job create run1 --cluster cluster.yaml --model model.yaml --tokens-per-rank 65536 --key-file run1.key

      apportion job create run1 --ranks 64 --model Llama-3.1-8B/config.json
    """
    from apportion.ir.bytes.job import Job
    from apportion.ir.request.policy import Policy
    from apportion.service.client import create_job

    the_hardware = inputs.hardware_of(hardware)
    the_cluster = inputs.cluster_of(cluster, ranks, ranks_per_node, the_hardware)
    policy = Policy(inputs.recipe_of(recipe, block, pods), seed=seed)
    job = Job(the_cluster, inputs.model_of(model), policy, tokens_per_rank, microbatches, the_hardware)
    key = None if key_file is None else inputs.key_of(key_file)
    admin = None if admin_key_file is None else inputs.key_of(admin_key_file)
    with create_job(server, name, job, key=key, admin_key=admin, lookahead=lookahead, ca=ca) as made:
        record = {"name": name, "url": made.url, "key": made.key}
    emit(record, as_json, lambda: f"{made.url}\nkey {made.key}")


@app.command("list")
def list_(
    server: Server = SERVER,
    admin_key_file: AdminKey = None,
    ca: Certificates = None,
    as_json: options.AsJson = False,
) -> None:
    """List the jobs of a service.

    [bold]Example[/bold]

      apportion job list --server http://127.0.0.1:8321
    """
    from msgspec.structs import asdict

    from apportion.service.client import list_jobs

    admin = None if admin_key_file is None else inputs.key_of(admin_key_file)
    found = list_jobs(server, admin_key=admin, ca=ca)
    emit({"jobs": [asdict(job) for job in found]}, as_json, lambda: _table(found))


@app.command("delete")
def delete(
    name: Name,
    server: Server = SERVER,
    admin_key_file: AdminKey = None,
    ca: Certificates = None,
    as_json: options.AsJson = False,
) -> None:
    """Delete a job and what it has asked for; its ranks are told.

    [bold]Example[/bold]

      apportion job delete run1
    """
    from apportion.service.client import delete_job

    admin = None if admin_key_file is None else inputs.key_of(admin_key_file)
    delete_job(server, name, admin_key=admin, ca=ca)
    if as_json:
        emit({"deleted": name}, as_json)
    else:
        note(f"deleted {name}")


def _table(jobs: list[JobSummary]) -> Table:
    from rich.table import Table

    table = Table("job", "url", title=None)
    for title in ("ranks", "look-ahead"):
        table.add_column(title, justify="right")
    table.add_column("epochs")
    for job in jobs:
        epochs = ", ".join(f"{stream} {epoch}" for stream, epoch in sorted(job.streams.items()))
        table.add_row(job.name, job.url, str(job.ranks), str(job.lookahead), epochs)
    return table

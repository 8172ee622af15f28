"""`apportion job`: the jobs of a planning service."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from apportion.cli import inputs, options
from apportion.cli.output import emit, note

if TYPE_CHECKING:
    from rich.table import Table

    from apportion.service.client import JobSummary

app = typer.Typer(help="The jobs of a planning service.", no_args_is_help=True)
keys = typer.Typer(help="The keys of a job.", no_args_is_help=True)
app.add_typer(keys, name="key")

Name = Annotated[str, typer.Argument(help="The job's name: letters, digits, `_`, `-`, `.`.", metavar="NAME")]
Server = Annotated[str, typer.Option("--server", help="URL of the service.", metavar="URL")]
AdminKey = Annotated[
    Path | None,
    typer.Option(
        "--admin-key-file",
        help="File with the server's admin key. Of a server of yours on this machine it is found without.",
        metavar="FILE",
    ),
]
Certificates = Annotated[
    Path | None,
    typer.Option("--ca", help="PEM file of certificates to trust. Default: the system's.", metavar="FILE"),
]
Cert = Annotated[
    Path | None,
    typer.Option(
        "--cert", help="PEM file of a certificate and its key, where the server asks for one.", metavar="FILE"
    ),
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
    cert: Cert = None,
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
    key = key_in(key_file)
    admin = key_in(admin_key_file)
    with create_job(
        server, name, job, key=key, admin_key=admin, lookahead=lookahead, ca=ca, cert=cert
    ) as made:
        record = {"name": name, "url": made.url, "key": made.key}
    emit(record, as_json, lambda: f"{made.url}\nkey {made.key}")


@app.command("list")
def list_(
    server: Server = SERVER,
    admin_key_file: AdminKey = None,
    ca: Certificates = None,
    cert: Cert = None,
    as_json: options.AsJson = False,
) -> None:
    """List the jobs of a service.

    [bold]Example[/bold]

      apportion job list --server http://127.0.0.1:8321
    """
    from msgspec.structs import asdict

    from apportion.service.client import list_jobs

    admin = key_in(admin_key_file)
    found = list_jobs(server, admin_key=admin, ca=ca, cert=cert)
    emit({"jobs": [asdict(job) for job in found]}, as_json, lambda: _table(found))


@app.command("delete")
def delete(
    name: Name,
    server: Server = SERVER,
    admin_key_file: AdminKey = None,
    ca: Certificates = None,
    cert: Cert = None,
    as_json: options.AsJson = False,
) -> None:
    """Delete a job and what it has asked for; its ranks are told.

    [bold]Example[/bold]

      apportion job delete run1
    """
    from apportion.service.client import delete_job

    admin = key_in(admin_key_file)
    delete_job(server, name, admin_key=admin, ca=ca, cert=cert)
    if as_json:
        emit({"deleted": name}, as_json)
    else:
        note(f"deleted {name}")


@keys.command("add")
def add_key(
    name: Name,
    role: Annotated[
        Literal["submit", "read"],
        typer.Option("--role", help="`submit`: all that is the job's; `read`: fetches plans alone."),
    ] = "submit",
    key_file: Annotated[
        Path | None,
        typer.Option("--key-file", help="File with the key. Default: a new one.", metavar="FILE"),
    ] = None,
    server: Server = SERVER,
    admin_key_file: AdminKey = None,
    ca: Certificates = None,
    cert: Cert = None,
    as_json: options.AsJson = False,
) -> None:
    """Add a key to a job: to rotate its keys, or one for ranks that only reads.

    [bold]Example[/bold]

      apportion job key add run1 --role read
    """
    from msgspec.structs import asdict

    from apportion.service import client

    made = client.add_key(
        server, name, role=role, key=key_in(key_file), admin_key=key_in(admin_key_file), ca=ca, cert=cert
    )
    emit(asdict(made), as_json, lambda: f"{made.id} {made.role}\nkey {made.key}")


@keys.command("list")
def list_keys(
    name: Name,
    server: Server = SERVER,
    admin_key_file: AdminKey = None,
    ca: Certificates = None,
    cert: Cert = None,
    as_json: options.AsJson = False,
) -> None:
    """List the keys of a job by id and role.

    [bold]Example[/bold]

      apportion job key list run1
    """
    from apportion.service import client

    found = client.list_keys(server, name, admin_key=key_in(admin_key_file), ca=ca, cert=cert)
    record = {"keys": [{"id": key.id, "role": key.role} for key in found]}
    emit(record, as_json, lambda: "\n".join(f"{key.id} {key.role}" for key in found))


@keys.command("revoke")
def revoke_key(
    name: Name,
    id: Annotated[str, typer.Argument(help="As `job key list` shows it.", metavar="ID")],
    server: Server = SERVER,
    admin_key_file: AdminKey = None,
    ca: Certificates = None,
    cert: Cert = None,
    as_json: options.AsJson = False,
) -> None:
    """Revoke a key of a job: it opens nothing from now on.

    [bold]Example[/bold]

      apportion job key revoke run1 0123456789abcdef
    """
    from apportion.service import client

    client.revoke_key(server, name, id, admin_key=key_in(admin_key_file), ca=ca, cert=cert)
    if as_json:
        emit({"revoked": id}, as_json)
    else:
        note(f"revoked {id}")


def key_in(file: Path | None) -> str | None:
    return None if file is None else inputs.key_of(file)


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

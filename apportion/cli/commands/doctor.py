"""`apportion doctor`: checks what is installed, compiled and reachable, and suggests remedies."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import typer
from typer import Option

from apportion.cli import options
from apportion.cli.output import FAILED, OK, emit

if TYPE_CHECKING:
    from rich.table import Table

State = Literal["ok", "absent", "warning", "failed"]
MARKS = {"ok": "ok", "absent": "-", "warning": "!", "failed": "FAILED"}
REACH_S = 3.0  # timeout for a server, Redis or Ray
_MIN_FREE_BYTES = 1 << 30  # bytes
#: optional packages: (packages, extra, purpose)
OPTIONAL_PACKAGES = (
    (("scipy", "highspy", "pulp", "mtkahypar"), "solvers", "flexsp, and exact solvers"),
    (("fastapi", "uvicorn", "uvloop", "h11", "prometheus_client"), "service", "apportion serve"),
    (("redis",), "redis", "a store that several machines share"),
    (("ray",), "ray", "workers on a cluster"),
    (("pyarrow",), "data", "lengths from Parquet and saved datasets"),
    (("pandas",), "notebook", "to_pandas()"),
    (("transformers",), "hf", "Hugging Face's Trainer"),
    (("lightning",), "lightning", "Lightning"),
    (("torchtitan",), "torchtitan", "TorchTitan"),
    (("megatron",), "megatron", "Megatron-Core"),
    (("nemo_automodel",), "automodel", "NeMo Automodel"),
)


class Check(NamedTuple):
    """Result of a check. remedy: a command or a sentence, empty if the check passed."""

    name: str
    state: State
    message: str
    remedy: str = ""


def doctor(
    server: Annotated[str | None, Option(help="Also check this planning server.", metavar="URL")] = None,
    redis: Annotated[str | None, Option(help="Also check this Redis.", metavar="URL")] = None,
    folder: Annotated[
        Path, Option("--dir", help="Folder for plans: its free disk space is checked.", metavar="DIR")
    ] = Path(".apportion"),
    as_json: options.AsJson = False,
) -> None:
    """Check what is installed, compiled and reachable, with a remedy for what is missing.

    Missing optional packages are not an error. Exit code 1 if something is
    broken, or if the named server or Redis does not answer.

    [bold]Examples[/bold]

      apportion doctor

      apportion doctor --server http://127.0.0.1:8321 --redis redis://127.0.0.1:6379/0 --json
    """
    checks = [check for run_checks in (_python, _torch, _optional_packages, _ray) for check in run_checks()]
    checks.append(_disk(folder))
    checks += [_check_service("redis", redis, _ping)] if redis is not None else []
    checks += [_check_service("server", server, _ready)] if server is not None else []
    failures = [check.name for check in checks if check.state == "failed"]
    record = {"checks": [check._asdict() for check in checks], "failed": failures}
    emit(record, as_json, lambda: _table(checks), width=0)
    raise typer.Exit(FAILED if failures else OK)


def _table(checks: list[Check]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    styles = {"ok": "green", "absent": "dim", "warning": "yellow", "failed": "red"}
    for check in checks:
        message = Text(check.message)
        if check.remedy:
            message.append(f"\n{check.remedy}", "bold")
        table.add_row(Text(MARKS[check.state], styles[check.state]), check.name, message)
    return table


def _version(package: str) -> str | None:
    """The version of an installed package, without importing it."""
    from importlib import metadata, util

    name = {"megatron": "megatron-core", "prometheus_client": "prometheus-client"}.get(package, package)
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "?" if util.find_spec(package) else None


def _python() -> Iterator[Check]:
    import platform
    import sys

    from apportion.cli.environment import machine
    from apportion.ir import isa
    from apportion.ir.version import __version__

    host = machine()
    yield Check("machine", "ok", f"{host['processor']}, {host['cores']} cores, {host['system']}")
    supported = (3, 11) <= sys.version_info < (3, 14)
    remedy = "" if supported else "use Python 3.11 to 3.13"
    yield Check("python", "ok" if supported else "warning", platform.python_version(), remedy)
    yield Check("apportion", "ok", f"{__version__}, plan format {isa.VERSION[0]}.{isa.VERSION[1]}")


def _torch() -> Iterator[Check]:
    version = _version("torch")
    if version is None:
        remedy = "pip install '.[torch]'"
        yield Check("torch", "absent", "plans are not executed on this machine", remedy)
        return
    try:
        import torch
    except (ImportError, OSError) as error:
        yield Check("torch", "failed", f"{version} cannot be imported: {error}", "reinstall it")
        return
    yield Check("torch", "ok", version)
    if not torch.cuda.is_available():
        yield Check("GPUs", "absent", "none found; plans run on CPUs, over gloo")
        return
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    yield Check("GPUs", "ok", ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)))
    if torch.distributed.is_available() and torch.distributed.is_nccl_available():
        nccl: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        yield Check("NCCL", "ok", ".".join(map(str, nccl)))
    else:
        yield Check(
            "NCCL",
            "failed",
            "this build of torch has no NCCL: GPUs cannot communicate",
            "install a CUDA build of torch",
        )
    triton = _version("triton")
    remedy = "" if triton else "pip install '.[triton]'"
    yield Check("triton", "ok" if triton else "warning", triton or "the stage engine needs it", remedy)


def _optional_packages() -> Iterator[Check]:
    for packages, extra, purpose in OPTIONAL_PACKAGES:
        versions = {package: _version(package) for package in packages}
        missing = [package for package, version in versions.items() if version is None]
        if missing:
            message = f"for {purpose}: {', '.join(missing)} not installed"
            yield Check(extra, "absent", message, f"pip install '.[{extra}]'")
        else:
            message = ", ".join(f"{package} {version}" for package, version in versions.items())
            yield Check(extra, "ok", f"{message}, for {purpose}")


def _ray() -> Iterator[Check]:
    """Checks the cluster that RAY_ADDRESS names."""
    address = os.environ.get("RAY_ADDRESS", "")
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        yield _check_service("Ray cluster", address, lambda _: _connect(host, int(port)))


def _disk(folder: Path) -> Check:
    import shutil

    paths = (folder.absolute(), *folder.absolute().parents)
    base = next((path for path in paths if path.exists()), Path("/"))
    free = shutil.disk_usage(base).free
    message = f"{free / 1e9:,.1f} GB are free for {folder}"
    if not os.access(base, os.W_OK):
        return Check("disk", "failed", f"{base} cannot be written", "name another folder with --dir")
    if free < _MIN_FREE_BYTES:
        return Check("disk", "warning", message, "make room, or name another folder with --dir")
    return Check("disk", "ok", message)


def _check_service(name: str, address: str, probe: Callable[[str], str]) -> Check:
    """Checks a service. probe: returns its state as text, or raises an error."""
    from apportion.ir.errors import ApportionError

    host = address.rpartition("@")[2]
    try:
        return Check(name, "ok", f"{host}: {probe(address)}")
    except (ApportionError, OSError, ValueError) as error:
        return Check(name, "failed", f"{host}: {error}", "is it running, and is this its address?")


def _connect(host: str, port: int) -> str:
    import socket

    with socket.create_connection((host, port), REACH_S):
        return "answers"


def _ping(url: str) -> str:
    from apportion.service.store import open_store

    open_store(url).close()
    return "answers"


def _ready(url: str) -> str:
    """The status of a server, from /readyz. Raises OSError if it does not accept work."""
    import httpx

    try:
        answer = httpx.get(url.rstrip("/") + "/readyz", timeout=REACH_S)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise OSError(f"no answer ({type(error).__name__})") from None
    if answer.status_code != 200:
        raise OSError(f"status {answer.status_code}, {answer.text[:200]}")
    status: str = answer.json()["status"]
    return status

"""Files that commands read and write."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from apportion.ir.errors import ConfigError

if TYPE_CHECKING:
    from apportion.ir.bytes.codec import Plan


def read_plan(path: Path, check_id: bool = True) -> Plan:
    """The plan in a file. Raises DecodeError, which names the file."""
    from apportion.ir.bytes.codec import decode
    from apportion.ir.bytes.transport import decompress
    from apportion.ir.errors import DecodeError

    try:
        return decode(decompress(path.read_bytes()), check_id)
    except DecodeError as error:
        raise type(error)(f"{path} is not a plan that this release reads: {error}") from error


def read_plans(path: Path) -> list[tuple[str, Plan]]:
    """Reads [(name, plan)] from a plan file. For a pack, a file from a folder of plans, plans its request again and
    returns (name, plan) of each microbatch. Raises DecodeError."""
    from apportion.ir.bytes.job import decode_request
    from apportion.planner.iteration.jobs import plan_job
    from apportion.service.pack import MAGIC, Pack

    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            return [(path.name, read_plan(path))]
    pack = Pack.decode(path.read_bytes())
    plans = plan_job(*decode_request(pack.request), verify=False).plans
    return [(f"microbatch {number}", plan) for number, plan in enumerate(plans)]


def check_output(option: str, path: Path | None) -> None:
    """Refuse an output path that cannot be written, before any work is done; None: no output."""
    if path is None:
        return
    target = path.resolve()
    folder, fault = target.parent, None
    if target.is_dir():
        fault = "it is a folder", "name a file in it"
    elif not folder.is_dir():
        fault = f"there is no folder {folder}", "create it first"
    elif not os.access(target if _is_device(target) else folder, os.W_OK):
        fault = f"{folder} cannot be written", "choose another folder"
    if fault is not None:
        raise ConfigError(option, str(path), *fault)


def _is_device(path: Path) -> bool:
    return path.exists() and not path.is_file()  # such as /dev/null, which must not be replaced by a file


def write(path: Path, data: bytes) -> None:
    """Write the whole file or nothing: under a temporary name next to it, then renamed."""
    path = path.resolve()  # a link stays a link
    if _is_device(path):
        path.write_bytes(data)
        return
    part = path.with_name(f".apportion-{os.getpid()}.part")
    try:
        part.write_bytes(data)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)

"""`apportion profile`: measure this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from apportion.cli import files, inputs, options
from apportion.cli.output import emit, progress

if TYPE_CHECKING:
    from apportion.ir.hardware import Hardware


def profile(
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Write the hardware file here.", metavar="H.json")
    ],
    quick: Annotated[
        bool, typer.Option("--quick", help="A coarse grid: under a minute on two CPU cores.")
    ] = False,
    name: Annotated[
        str | None, typer.Option("--name", help="Name in the file. Default: that of the file.")
    ] = None,
    engine: Annotated[
        str, typer.Option("--engine", help="Whose attention tasks are timed: flash, or stage (on a GPU).")
    ] = "flash",
    as_json: options.AsJson = False,
) -> None:
    """Measure attention kernels, memory and linear layers of this machine, and write a hardware file.

    Under torchrun the links are measured too: two ranks of one node and two of
    different nodes suffice. Without it the file has the default links, marked as
    assumed. Give the file as --hardware.

    [bold]Examples[/bold]

      apportion profile --quick -o mine.json

      torchrun --nnodes 2 --nproc-per-node 8 -m apportion profile -o mine.json
    """
    inputs.need("torch", "torch", "a profile")
    from apportion.trainer import profiling

    files.check_output("--output", output)
    with progress("measuring") as report:
        measured = profiling.run(quick, name or output.stem, lambda done, total: report("", total), engine)
    if measured is None:  # another rank writes
        return
    files.write(output, json.dumps(measured.to_data(), indent=1).encode() + b"\n")
    record = _record(measured, output)
    emit(record, as_json, lambda: _text(record))


def _record(hardware: Hardware, output: Path) -> dict[str, Any]:
    data = hardware.to_data()
    names = (
        "name",
        "device",
        "engine",
        "dtype",
        "axis",
        "q_heads",
        "kv_heads",
        "head_dim",
        "figures",
        "measured",
    )
    return {"file": str(output), "digest": hardware.digest(), **{key: data[key] for key in names}}


def _text(record: dict[str, Any]) -> str:
    figures = (
        f"  {name:<18}{figure['value']:>12g}  {figure['source']}{' (assumed)' if figure['assumed'] else ''}"
        for name, figure in record["figures"].items()
    )
    axis = record["axis"]
    head = (
        f"{record['file']}: {record['device']}, engine {record['engine']}, grids of {axis[0]} to {axis[-1]} rows, "
        f"{record['dtype']}"
    )
    return "\n".join([head, *figures])

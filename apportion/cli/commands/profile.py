"""`apportion profile`: measure this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from apportion.cli import files, inputs, options
from apportion.cli.output import emit, progress

if TYPE_CHECKING:
    from apportion.ir.request.hardware import Hardware


def profile(
    output: Annotated[Path, Option("--output", "-o", help="Write the hardware file here.", metavar="H.json")],
    quick: Annotated[bool, Option("--quick", help="A coarse grid: under a minute on two CPU cores.")] = False,
    name: Annotated[str | None, Option(help="Name stored in the file. Default: the file's name.")] = None,
    engine: Annotated[
        str, Option(help="Engine whose attention tasks are timed: flash, or stage (on a GPU).")
    ] = "flash",
    model: options.ModelFile = None,
    tokens: Annotated[int | None, Option(help="Tokens per rank, for timing layers.", min=1)] = None,
    as_json: options.AsJson = False,
) -> None:
    """Measure this machine and write a hardware file for simulations and forecasts: attention kernels, sliding windows,
    memory, linear layers, row work, the loss and Adam.

    With --model the kernels and layers are timed with that model's sizes.

    Under torchrun it also measures the links while all ranks send, the time to
    post a message, and kernels slowed by messages: start one rank per GPU on two
    nodes. Without torchrun these figures keep their built-in values, marked as
    assumed. Pass the file as --hardware.

    [bold]Examples[/bold]

      apportion profile --quick -o mine.json

      torchrun --nnodes 2 --nproc-per-node 8 -m apportion profile --model config.json -o mine.json
    """
    inputs.need("torch", "torch", "a profile")
    from apportion.trainer.measure import profile

    files.check_output("--output", output)
    with progress("measuring") as report:
        shapes = None if model is None else inputs.model_of(model)
        hardware = profile.run(
            quick, name or output.stem, lambda done, total: report("", total), engine, shapes, tokens
        )
    if hardware is None:  # another rank writes
        return
    files.write(output, json.dumps(hardware.to_data(), indent=1).encode() + b"\n")
    record = _record(hardware, output)
    emit(record, as_json, lambda: _text(record))


def _record(hardware: Hardware, output: Path) -> dict[str, Any]:
    data = hardware.to_data()
    sizes = ("axis", "q_heads", "kv_heads", "head_dim", "figures", "measured")
    names = ("name", "device", "engine", "dtype", *sizes)
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

"""Hardware: the inputs of time predictions, each with its source.

    Hardware ── figures     memory, linear layers, links: one number each
             ├─ forward     grids of one attention task, microseconds over (query rows, key rows): every pair
             │              allowed (`full`), or all but one corner triangle (`causal`)
             ├─ backward    the same
             └─ measured    origin of a profile: device, versions, date; not part of the digest

A file is the JSON of `to_data` (schema: apportion:hardware). Profiling writes one; the built-in files, in the folder
`chips`, are from data sheets and papers, with grids from a small model of a flash kernel (`benchmarks/chips.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from apportion.ir.errors import ConfigError, UnknownNameError
from apportion.ir.fields import amount, choice, integer, known, load, sequence, suggestion
from apportion.ir.hashing import digest
from apportion.ir.request.cluster import Cluster
from apportion.ir.request.figures import HOST, LEAST, MOST, Figure, Grid, MessageRates
from apportion.ir.request.model import ELEMENT_BYTES
from apportion.ir.structs import Name, Text, one_of, read, to_data, values

VERSION = 1
#: names of built-in hardware: chips with library flash kernels, and with the Triton kernels of the `stage` engine
BUILTIN = tuple(
    f"{chip}{engine}" for engine in ("", "-stage") for chip in ("h100", "h200", "a100", "a800", "h20", "b200")
)
_CHIPS = Path(__file__).with_name("chips")
#: executor engines that grids may describe: one kernel for all tasks of an instruction, a library flash kernel per
#: task, plain matrix products
ENGINES = ("stage", "flash", "plain")
MAX_AXIS = 64  # points of a grid's axis
MAX_ROWS = 2**20  # rows of the largest task on an axis
MAX_FILE_BYTES = 2**22  # four grids of 64 x 64 times are some 300 KB
_CLOSE = 0.1  # relative tolerance for a cluster's links to match the hardware's

# Fields that both a cluster and its hardware have.
_SHARED = ("intra_gbs", "inter_gbs", "nics_per_node", "intra_latency_us", "inter_latency_us", "memory_gib")


@dataclass(frozen=True)
class ProfileOrigin:
    """Origin of a profile: device, software versions, date (ISO 8601)."""

    device: Text
    versions: Annotated[Mapping[str, Text], Meta(max_length=32)] = field(hash=False)
    date: Text


@dataclass(frozen=True)
class Hardware:
    """One kind of rank and its links.

    engine: the engine whose kernels the grids describe, see `ENGINES`. axis: row counts of the grid points, ascending,
    for queries and for keys. tile: rows of queries and of keys are rounded up to multiples of it. q_heads, kv_heads,
    head_dim, dtype: configuration of the grids. memory_gbs, intra_gbs, inter_gbs (of one NIC): 1e9 bytes/s.
    peak_tflops: dense, of the dtype, from the data sheet; linear_tflops: achieved by linear layers; 1e12 FLOP/s.
    rowop_us: fixed cost of a row kernel (copy, merge, add, pack, ...) besides its bytes. post_us: cost of posting one
    message; adds to the latency of its round's transfers. host_gbs: between a rank and its host's memory, each way, 1e9
    bytes/s; optional in files. contention: relative slowdown of a rank's kernels while it transfers, since transfers
    occupy multiprocessors (0.1: a tenth; 0: none). rows_gbs, loss_gbs, optimizer_gbs: 1e9 bytes/s, in bytes as
    `apportion.ir.layer_work` counts them, for row work of layers, the loss, and Adam; None: not measured, memory_gbs
    applies.
    incast: relative slowdown of an inter-node transfer for each further NIC, up to `incast_peers`, that sends to the
    same NIC in a round; one_peer: share of the rate that a NIC reaches with a single peer; message_rates: rate by
    message size. None: unknown, the rate is always `inter_gbs` (see `planner.congestion`). Create with `load`,
    `from_data` or a profile, which validate.
    """

    name: Name
    device: Text
    engine: Annotated[str, one_of(ENGINES)]
    dtype: Annotated[str, one_of(ELEMENT_BYTES)]
    axis: tuple[Annotated[int, Meta(ge=1, le=MAX_ROWS)], ...]
    tile: Annotated[int, Meta(ge=1, le=2**12)]
    q_heads: Annotated[int, Meta(ge=1, le=2**16)]
    kv_heads: Annotated[int, Meta(ge=1, le=2**16)]
    head_dim: Annotated[int, Meta(ge=1, le=2**12)]
    forward: Grid
    backward: Grid
    memory_gib: Figure
    memory_gbs: Figure
    peak_tflops: Figure
    linear_tflops: Figure
    rowop_us: Figure
    post_us: Figure
    contention: Figure
    intra_gbs: Figure
    inter_gbs: Figure
    nics_per_node: Figure
    intra_latency_us: Figure
    inter_latency_us: Figure
    measured: ProfileOrigin | None = None
    host_gbs: Figure = HOST
    rows_gbs: Figure | None = None
    loss_gbs: Figure | None = None
    optimizer_gbs: Figure | None = None
    incast: Figure | None = None
    incast_peers: Figure | None = None
    one_peer: Figure | None = None
    message_rates: MessageRates | None = None

    def figures(self) -> dict[str, Figure]:
        """The single numbers by name, including the optional ones that are set."""
        figures = {name: getattr(self, name) for name in (*_FIGURES, *_OPTIONAL)}
        return {name: figure for name, figure in figures.items() if figure is not None}

    def rate_gbs(self, name: str) -> float:
        """1e9 bytes/s of `rows_gbs`, `loss_gbs` or `optimizer_gbs`; memory bandwidth if not measured."""
        figure: Figure | None = getattr(self, choice("figure", name, _RATES))
        return self.memory_gbs.value if figure is None else figure.value

    def grid(self, phase: str) -> Grid:
        """The grid of `forward` or `backward`. Raises UnknownNameError."""
        return self.forward if choice("phase", phase, ("forward", "backward")) == "forward" else self.backward

    def cluster(self, nodes: int = 1, ranks_per_node: int = 8) -> Cluster:
        """Builds a cluster with this hardware's links and memory."""
        links = {field: getattr(self, field).value for field in _SHARED}
        return Cluster(nodes, ranks_per_node, **links | {"nics_per_node": int(self.nics_per_node.value)})

    def mismatch(self, cluster: Cluster) -> list[str]:
        """A warning for each link or memory figure of the cluster that differs from the hardware's by over a tenth.

        Predicted times use the cluster's links and the hardware's kernels.
        """
        pairs = ((field, getattr(cluster, field), getattr(self, field).value) for field in _SHARED)
        return [
            f"cluster.{field} is {value:g}, but hardware {self.name} has {figure:g}; "
            "predicted times use the cluster's figure"
            for field, value, figure in pairs
            if abs(value - figure) > _CLOSE * max(value, figure)
        ]

    def digest(self) -> str:
        """BLAKE2b, hex, of figures and grids: equal numbers and sources have equal digests, whatever `measured` is."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        data = self.to_data() | {"measured": None}
        return digest(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hex()

    def to_data(self) -> dict[str, Any]:
        """Plain data with every field, in the form of `from_data`."""
        data = to_data(self)
        figures = {name: data.pop(name) for name in (*_FIGURES, *_OPTIONAL)}
        figures = {name: figure for name, figure in figures.items() if figure is not None}
        if self.message_rates is None:
            del data["message_rates"]
        plain = {name: data[name] for name in (*_PLAIN, "axis")}
        return {"version": VERSION, **plain, "figures": figures, **data}

    @staticmethod
    def from_data(data: Any) -> Hardware:
        """Builds hardware from plain data. Raises ConfigError, which names field, value, rule and remedy."""
        keys = ("version", *_PLAIN, "axis", "figures", "forward", "backward")
        data = dict(known("hardware", data, (*keys, "measured", "message_rates"), keys))
        integer("hardware.version", data.pop("version"), VERSION, VERSION)
        figures = known("hardware.figures", data.pop("figures"), (*_FIGURES, *_OPTIONAL), _NEEDED)
        if not 2 <= len(sequence("hardware.axis", data["axis"])) <= MAX_AXIS:  # before the points are checked
            rule = f"must have 2 to {MAX_AXIS} points"
            raise ConfigError("hardware.axis", len(data["axis"]), rule, "use fewer or more")
        arguments = values(Hardware, "hardware", data) | {
            key: _figure(key, value) for key, value in figures.items()
        }
        hardware = Hardware(**arguments)
        integer("hardware.kv_heads", hardware.kv_heads, 1, hardware.q_heads)
        if any(low >= high for low, high in pairwise(hardware.axis)):
            rule, remedy = "must be ascending", "sort the points and list each once"
            raise ConfigError("hardware.axis", list(hardware.axis), rule, remedy)
        for phase in ("forward", "backward"):
            hardware.grid(phase).check(f"hardware.{phase}", len(hardware.axis))
        return hardware

    @staticmethod
    def builtin() -> tuple[str, ...]:
        """Names of built-in hardware, which `load` accepts."""
        return BUILTIN

    @staticmethod
    def named(hardware: Hardware | str | None) -> Hardware | None:
        """Loads hardware given by name or file path; returns a Hardware or None unchanged. Raises ConfigError."""
        if hardware is None or isinstance(hardware, Hardware):
            return hardware
        return Hardware.load(hardware)

    @staticmethod
    def load(source: str | Path) -> Hardware:
        """Loads built-in hardware by name, or hardware from a JSON (or YAML) file. Raises ConfigError, and
        UnknownNameError for a source that is neither a name nor a file path."""
        if not isinstance(source, str | Path):
            rule = "must be a Hardware, a name or a file"
            raise ConfigError("hardware", source, rule, f"use one of {', '.join(Hardware.builtin())}")
        if source in BUILTIN:
            return _builtin(str(source))
        if not Path(source).suffix:
            rule = "neither built-in hardware nor a file"
            remedy = f"{suggestion(str(source)[:64], BUILTIN)}, or the path of a .json file"
            raise UnknownNameError("hardware", str(source), rule, remedy)
        return Hardware.from_data(_load_data(Path(source)))


_FIGURES = tuple(item.name for item in fields(Hardware) if item.type == "Figure")
#: required in every file; all others have defaults
_NEEDED = tuple(item.name for item in fields(Hardware) if item.name in _FIGURES and item.default is MISSING)
_OPTIONAL = tuple(item.name for item in fields(Hardware) if item.type == "Figure | None")
_RATES = ("rows_gbs", "loss_gbs", "optimizer_gbs")
_PLAIN = ("name", "device", "engine", "dtype", "tile", "q_heads", "kv_heads", "head_dim")
_MAY_BE_0 = (
    *("rowop_us", "post_us", "contention", "nics_per_node", "intra_latency_us", "inter_latency_us"),
    *("incast", "incast_peers"),
)
MOST_CONTENTION = 10.0  # kernels eleven times as slow: beyond that, transfers do not overlap with them at all
_MOST = {"contention": MOST_CONTENTION, "incast": 10.0, "incast_peers": 2.0**16, "one_peer": 1.0}


@cache
def _builtin(name: str) -> Hardware:
    return Hardware.from_data(msgspec.json.decode((_CHIPS / f"{name}.json").read_bytes()))


def _load_data(path: Path) -> Any:
    if path.stat().st_size > MAX_FILE_BYTES:
        raise ConfigError(
            str(path), path.stat().st_size, f"must be at most {MAX_FILE_BYTES} bytes", "use a profile"
        )
    return load(path)


def _figure(key: str, data: Any) -> Figure:
    figure = read(Figure, f"hardware.figures.{key}", data)
    low, high = 0.0 if key in _MAY_BE_0 else LEAST, _MOST.get(key, MOST)
    amount(f"hardware.figures.{key}.value", figure.value, low, high)
    if key == "nics_per_node":
        value = int(figure.value) if figure.value.is_integer() else figure.value
        integer("hardware.figures.nics_per_node.value", value, 1, 2**16)
    return figure

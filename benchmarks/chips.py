"""Writes the files of built-in hardware, from data sheets, papers' descriptions of their clusters, and a small model of
a flash kernel.

Run: python benchmarks/chips.py [--check]. The files are in apportion/ir/request/chips; a plan has the digest of its
hardware, so changed figures count as different hardware for earlier plans.

The kernel model. A flash kernel gives a tile of 128 query rows of one head to a multiprocessor, which walks over
the tiles of 128 keys that the tile sees (backward: a tile of keys, walking over queries):

    one step           tile FLOPs / (peak x achieved fraction / multiprocessors)
    a tile of queries  steps x step + start,   start = its own rows / (memory bandwidth / multiprocessors) + latency
    a task             the sum over its tiles and heads, spread over all multiprocessors

So rows are padded to the tile (throughput falls below 128 rows: DistCA, section 4.1, Figure 5), and tiles that see
few keys pay for their start: a fixed-length FlashAttention-3 kernel without mask reaches 0.69, 0.83, 0.91 and 0.95
of its best at 512, 1024, 2048 and 4096 tokens (430, 517, 566, 590 of 621 TFLOP/s: pytorch/benchmark pull request
2391), where this start without latency gives 0.71, 0.83, 0.91 and 0.95. `latency` is set such that causal
documents of 512 tokens reach a quarter of peak on the H100, as varlen kernels do in FCP, section 3.1 and Figure 3
(the Hopper chip is not named there; the H20, with more bandwidth for its FLOPs, reaches 46 % by this model).

Each chip has two files: NAME, with the flash kernels of the model above, and NAME-stage, with the Triton kernels of
engine `stage` (one launch per instruction), which reach a fraction of their speed.

Tasks of an instruction are one launch, so a task's time excludes waves over multiprocessors; an instruction's time
includes its launch and its longest chain of steps (`Grid.tile_us`).
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from apportion.ir.arrays import Floats, Ints
from apportion.ir.request.figures import HOST, Figure, Grid, Rows
from apportion.ir.request.hardware import Hardware

FILES = Path(__file__).parents[1] / "apportion/ir/request/chips"

TILE = 128
DIM = 128  # head dim of the grids
Q_HEADS, KV_HEADS = 64, 8  # of the grids: Llama-3-70B, as in FCP's Figure 3
BYTES = 2  # bf16
#: 128, 256, 384, 512, 768, 1024, ... 128K: halfway points keep linear interpolation of squares within 4 %
AXIS = tuple(sorted([TILE << i for i in range(11)] + [3 * TILE << i for i in range(9)]))
_TILES = np.asarray(AXIS) // TILE

# Matrix products of tile x tile x head dim: QK and PV; backward QK again, dP, dV, dQ and dK.
FORWARD_PRODUCTS, BACKWARD_PRODUCTS = 2, 5

LAUNCH = Figure(5.0, "CUDA kernel launch and drain on a busy stream, a few microseconds", True)
ROWOP = Figure(5.0, "one small CUDA kernel, as a launch of attention", True)
POST = Figure(1.0, "NCCL group of sends and receives, a microsecond an operation", True)
LATENCY = Figure(2.5, "gives 25 % of peak at causal 512 on the H100: FCP, section 3.1 and Figure 3", True)
CONTENTION = Figure(
    0.0,
    "assumed that transfers leave kernels their multiprocessors; FCP, section 6.1, sets 6 to 8 aside",
    True,
)
INTRA_LATENCY = Figure(
    5.0, "NCCL send and receive over NVLink, small message; NCCL's src/graph/tuning.cc has 3.4 a step", True
)
INTER_LATENCY = Figure(
    10.0, "NCCL send and receive over InfiniBand or RoCE, small message; NCCL's tuning.cc has 9.6 to 14", True
)

_HOST_4 = Figure(
    25.0,
    "PCIe 4.0 x16, 32 GB/s each way by NVIDIA's A100 data sheet; four fifths of it for large copies",
    True,
)


@dataclass(frozen=True)
class Chip:
    """Inputs of the kernel model and the links. peak_tflops: dense bf16; forward, backward: the fractions of it
    that the engine's kernels reach on long attention; linear: the fraction that linear layers reach; inter_gbs: of one
    NIC."""

    name: str
    device: str
    peak_tflops: Figure
    multiprocessors: Figure
    memory_gib: Figure
    memory_gbs: Figure
    forward: Figure
    backward: Figure
    linear: Figure
    intra_gbs: Figure
    inter_gbs: Figure
    nics_per_node: Figure
    engine: str = "flash"
    host_gbs: Figure = HOST


_H100_SHEET = "NVIDIA H100 data sheet, SXM5"
_H200_SHEET = "NVIDIA H200 data sheet, SXM5"
_A100_SHEET = "NVIDIA A100 data sheet, SXM4 80 GB"
_B200_SHEET = "NVIDIA DGX B200 data sheet"
_H20_SHEET = "figures published for the H20 SXM5; NVIDIA has no public data sheet"
_LINEAR = Figure(
    0.65, "large bf16 matrix products; DistCA, Appendix A, reckons with 0.5 for whole layers", True
)

_FA3_FORWARD = Figure(
    0.72, "FlashAttention-3 on H100, UPipe, Table 5: forward run twice (checkpointing), 512K: 701 TFLOP/s"
)
_FA3_BACKWARD = Figure(0.61, "FlashAttention-3 on H100, UPipe, Table 5, 256K to 1M: 613 TFLOP/s")
_FA2_FORWARD = Figure(0.70, "FlashAttention-2 paper: up to 73 % on A100, long causal, head dim 128", True)
_FA2_BACKWARD = Figure(0.60, "FlashAttention-2 paper: up to 63 % on A100, long causal, head dim 128", True)
_FA4_FORWARD = Figure(0.71, "FlashAttention-4 paper: up to 1613 of 2250 TFLOP/s on B200, bf16")
_FA4_BACKWARD = Figure(
    0.60,
    "FlashAttention-4 on B200, two CTAs a tile: 1360 TFLOP/s, 8K, full, head dim 128; its pull request 2280",
)
_NVLINK4 = Figure(450.0, "NVLink 4: 900 GB/s both ways together, data sheet")


def _assumed_figure(figure: Figure, reason: str) -> Figure:
    """Another chip's figure, assumed to hold for this one."""
    return Figure(figure.value, f"{reason}; {figure.source}", True)


_FLASH: Mapping[str, Chip] = MappingProxyType(
    {
        chip.name: chip
        for chip in (
            Chip(
                "h100",
                "NVIDIA H100 SXM5 80 GB, DGX H100",
                Figure(989.4, _H100_SHEET),
                Figure(132, _H100_SHEET),
                Figure(80.0, _H100_SHEET),
                Figure(3350.0, _H100_SHEET),
                _FA3_FORWARD,
                _FA3_BACKWARD,
                _LINEAR,
                _NVLINK4,
                Figure(50.0, "ConnectX-7, 400 Gb/s: DGX H100 data sheet; UPipe, section 5.1"),
                Figure(8, "DGX H100 data sheet"),
            ),
            Chip(
                "h200",
                "NVIDIA H200 SXM5 141 GB, DGX H200",
                Figure(989.4, _H200_SHEET),
                Figure(132, _H200_SHEET),
                Figure(140.0, f"{_H200_SHEET}: 141 GB; DistCA, section 6.1: 140 GB"),
                Figure(4800.0, _H200_SHEET),
                _assumed_figure(_FA3_FORWARD, "same multiprocessors as the H100"),
                _assumed_figure(_FA3_BACKWARD, "same multiprocessors as the H100"),
                _LINEAR,
                _NVLINK4,
                Figure(50.0, "400 Gb/s a GPU: Zeppelin, section 5, Cluster C; 50 GB/s in DistCA, Appendix A"),
                Figure(8, "Zeppelin, section 5, Cluster C: one CX7 a GPU"),
            ),
            Chip(
                "a100",
                "NVIDIA A100 SXM4 80 GB, Amazon p4de.24xlarge",
                Figure(312.0, _A100_SHEET),
                Figure(108, _A100_SHEET),
                Figure(80.0, _A100_SHEET),
                Figure(2039.0, _A100_SHEET),
                _FA2_FORWARD,
                _FA2_BACKWARD,
                _LINEAR,
                Figure(300.0, "NVSwitch, 600 GB/s both ways: DCP, section 7.1, testbed"),
                Figure(12.5, "100 Gb/s EFA: DCP, section 7.1, testbed"),
                Figure(4, "DCP, section 7.1, testbed: 4 NICs a node of 8 GPUs"),
                host_gbs=_HOST_4,
            ),
            Chip(
                "a800",
                "NVIDIA A800 SXM4 80 GB, Zeppelin's Cluster A",
                _assumed_figure(Figure(312.0, _A100_SHEET), "the A800 differs from the A100 in NVLink alone"),
                _assumed_figure(Figure(108, _A100_SHEET), "the A800 differs from the A100 in NVLink alone"),
                Figure(80.0, "Zeppelin, section 5, Cluster A: A800-80G"),
                _assumed_figure(
                    Figure(2039.0, _A100_SHEET), "the A800 differs from the A100 in NVLink alone"
                ),
                _FA2_FORWARD,
                _FA2_BACKWARD,
                _LINEAR,
                Figure(200.0, "NVSwitch, 400 GB/s: Zeppelin, section 5, Cluster A; taken as both ways"),
                Figure(25.0, "200 Gb/s RoCE: Zeppelin, section 5, Cluster A"),
                Figure(4, "Zeppelin, section 5, Cluster A: one NIC for two GPUs"),
                host_gbs=_HOST_4,
            ),
            Chip(
                "h20",
                "H20-like: few tensor cores, much bandwidth",
                Figure(148.0, _H20_SHEET, True),
                Figure(78, _H20_SHEET, True),
                Figure(96.0, _H20_SHEET, True),
                Figure(4000.0, _H20_SHEET, True),
                _assumed_figure(_FA3_FORWARD, "as on the H100"),
                _assumed_figure(_FA3_BACKWARD, "as on the H100"),
                _LINEAR,
                Figure(450.0, f"NVLink 4; {_H20_SHEET}", True),
                Figure(25.0, "FCP, Table 1: 5920 FLOP a byte for GPU-X, if that is 148 TFLOP/s", True),
                Figure(8, "one NIC a GPU", True),
            ),
            Chip(
                "b200",
                "NVIDIA B200 SXM6 180 GB, DGX B200",
                Figure(
                    2250.0,
                    f"{_B200_SHEET}: 72 PFLOP/s of sparse FP8 in eight, a quarter of it for dense bf16",
                ),
                Figure(148, "published for the B200; its data sheet does not say", True),
                Figure(180.0, f"{_B200_SHEET}: 1440 GB in eight"),
                Figure(8000.0, f"{_B200_SHEET}: 64 TB/s in eight"),
                _FA4_FORWARD,
                _FA4_BACKWARD,
                _LINEAR,
                Figure(900.0, f"NVLink 5: 1800 GB/s both ways together, {_B200_SHEET}"),
                Figure(50.0, f"ConnectX-7, 400 Gb/s: {_B200_SHEET}"),
                Figure(8, _B200_SHEET),
            ),
        )
    }
)


_HOPPER, _AMPERE = ("h100", "h200", "h20"), ("a100", "a800")
#: chip -> Triton's fraction of the speed of the chip's flash kernel, forward and backward
_TRITON = {
    **dict.fromkeys(_HOPPER, (0.65, 0.55, "Triton on Hopper, assumed to reach {:g} of FlashAttention-3")),
    "b200": (
        0.37,
        0.37,
        "Triton on B200, assumed to reach {:g} of FlashAttention-4, up to 2.7 times as fast",
    ),
    **dict.fromkeys(_AMPERE, (0.95, 0.85, "Triton on A100, assumed to reach {:g} of FlashAttention-2")),
}


def _with_stage_engine(chip: Chip) -> Chip:
    """The chip with engine `stage`, whose Triton kernels run all tasks of an instruction in one launch."""
    forward, backward, reason = _TRITON[chip.name]
    return replace(
        chip,
        name=f"{chip.name}-stage",
        forward=_part(forward, chip.forward, f"{reason}, {chip.name}"),
        backward=_part(backward, chip.backward, f"{reason}, {chip.name}"),
        engine="stage",
    )


def _part(share: float, figure: Figure, reason: str) -> Figure:
    """A share of a figure, assumed."""
    return Figure(round(share * figure.value, 4), f"{reason.format(share)}: {figure.value:g}", True)


CHIPS: Mapping[str, Chip] = MappingProxyType(
    {**_FLASH, **{f"{name}-stage": _with_stage_engine(chip) for name, chip in _FLASH.items()}}
)


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the files of built-in hardware.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if a file differs")
    check = parser.parse_args().check
    texts = {FILES / f"{name}.json": text_of(hardware_of(chip).to_data()) for name, chip in CHIPS.items()}
    outdated = [path for path, text in texts.items() if not path.exists() or path.read_text() != text]
    for path in outdated:
        print(path.name)
        if not check:
            path.write_text(texts[path])
    return 1 if check and outdated else 0


def text_of(data: Any) -> str:
    """JSON with a line for each row of a grid."""
    return re.sub(r"\n {4}|\n {3}(?=])", "", json.dumps(data, indent=1)) + "\n"


def hardware_of(chip: Chip) -> Hardware:
    """The hardware of a chip, with grids computed by the kernel model."""
    return Hardware(
        chip.name, chip.device, chip.engine, "bf16", AXIS, TILE, Q_HEADS, KV_HEADS, DIM, *grids_of(chip),
        chip.memory_gib, chip.memory_gbs, chip.peak_tflops, linear_of(chip), ROWOP, POST, CONTENTION,
        chip.intra_gbs, chip.inter_gbs, chip.nics_per_node, INTRA_LATENCY, INTER_LATENCY,
        host_gbs=chip.host_gbs,
    )  # fmt: skip


@dataclass(frozen=True)
class Side:
    """Queries or keys of a task. start: bf16 rows moved per row when its tile starts; walks: whether a multiprocessor
    owns a tile of this side and walks over the other side, which adds the latency; once: the fewest bf16 rows moved per
    row in any kernel.

    Forward: Q in and O out; K and V in. Backward: dQ in float32, cleared, added and converted (`once`: Q and dO in,
    dQ out); K and V in, dK and dV out."""

    start: int
    walks: bool
    once: int

    def start_us(self, chip: Chip) -> Floats:
        """float64 [axis]: time to move the rows of one head, on one multiprocessor."""
        moved = _moved_us(chip, self.start * TILE) * chip.multiprocessors.value
        return _TILES * (moved + LATENCY.value * self.walks)

    def once_us(self, chip: Chip, heads: int) -> Floats:
        """float64 [axis]: least time to move the rows of all heads, on the whole device."""
        return _moved_us(chip, self.once * heads * np.asarray(AXIS))


def linear_of(chip: Chip) -> Figure:
    """The rate of linear layers, in TFLOP/s."""
    return Figure(
        round(chip.peak_tflops.value * chip.linear.value, 4),
        f"{chip.linear.value:g} of {chip.peak_tflops.value:g} TFLOP/s ({chip.peak_tflops.source}): "
        f"{chip.linear.source}",
        True,
    )


def grids_of(chip: Chip) -> tuple[Grid, Grid]:
    """The grids of forward and backward, computed by the kernel model."""
    return (
        _grid(chip, chip.forward, FORWARD_PRODUCTS, Side(2, True, 2), Side(0, False, 2)),
        _grid(chip, chip.backward, BACKWARD_PRODUCTS, Side(5, False, 3), Side(4, True, 4)),
    )


def _grid(chip: Chip, achieved: Figure, products: int, queries: Side, keys: Side) -> Grid:
    step = _step_us(chip, achieved, products)
    start = queries.start_us(chip)[:, None] + keys.start_us(chip)
    share = Q_HEADS / chip.multiprocessors.value
    full, causal = ((steps * step + start) * share for steps in (_TILES[:, None] * _TILES, _causal_steps()))
    floor = queries.once_us(chip, Q_HEADS)[:, None] + keys.once_us(chip, KV_HEADS)
    return Grid(
        _round_times(np.maximum(full, floor)),
        _round_times(np.maximum(causal, floor)),
        LAUNCH.value,
        round(step, 4),
        _source(chip, achieved),
        True,
    )


def _step_us(chip: Chip, achieved: Figure, products: int) -> float:
    flops = 2 * products * TILE * TILE * DIM
    return flops * chip.multiprocessors.value / (chip.peak_tflops.value * achieved.value * 1e6)


def _moved_us(chip: Chip, rows: Ints | int) -> Floats:
    """The microseconds to move rows of a head, in bf16, at the memory's bandwidth."""
    return np.asarray(rows) * (DIM * BYTES) / (chip.memory_gbs.value * 1e3)


def _causal_steps() -> Ints:
    """int64 [axis, axis]: for each grid point, the number of tiles (queries x keys) with a pair of the causal band."""
    return np.array([[_tiles_read(rows, keys) for keys in AXIS] for rows in AXIS], np.int64)


@lru_cache(maxsize=len(AXIS) ** 2)  # the same for every chip
def _tiles_read(rows: int, keys: int) -> int:
    past = np.arange(TILE, rows + TILE, TILE)  # one past the last query of each tile
    return int(np.minimum((past - min(0, rows - keys)) // TILE, keys // TILE).sum())


def _round_times(times: Floats) -> Rows:
    return tuple(map(tuple, np.round(times, 4).tolist()))


def _source(chip: Chip, achieved: Figure) -> str:
    return (  # names the folder of the files: part of digests
        f"kernel model of apportion.ir.request.chips: {achieved.value:g} of {chip.peak_tflops.value:g} TFLOP/s "
        f"({achieved.source}); start: {LATENCY.value:g} us ({LATENCY.source}); launch: {LAUNCH.source}, assumed"
    )


if __name__ == "__main__":
    raise SystemExit(main())

"""Kernel variants by dtype and head dims: tile sizes, warps, pipeline stages.

A width is padded to one or two powers of two: 64, 64 + 32, 128 + 64, ... Matrix products need at least 16 columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MIN_WIDTH = 16
#: rows of a tile of row operations
ROWS = 16


@dataclass(frozen=True)
class Shape:
    """Tile shape of a kernel. owner: rows of a tile; walked: rows of a step."""

    owner: int
    walked: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Variant:
    """Compile-time parameters of the kernels of one model. element_bytes: 2 or 4."""

    qk: int
    v: int
    element_bytes: int
    shapes: Mapping[str, Shape]

    def constants(self, kernel: str, softcap: bool) -> dict[str, int | bool | str]:
        """The compile-time arguments of an attention kernel, and Triton's options."""
        shape = self.shapes[kernel]
        (qk_a, qk_b), (v_a, v_b) = parts(self.qk), parts(self.v)
        widths = {"D": self.qk, "DA": qk_a, "DB": qk_b, "E": self.v, "EA": v_a, "EB": v_b}
        precision = "tf32" if self.element_bytes == 2 else "ieee"
        # the tanh series needs the registers
        stages = shape.stages - (softcap and kernel == "dq" and shape.stages > 2)
        rows = {"M": shape.owner, "N": shape.walked, "num_warps": shape.warps, "num_stages": stages}
        return {"CAP": softcap, **rows, **widths, "PRECISION": precision}


def parts(width: int) -> tuple[int, int]:
    """Two powers of two that cover a width; the second is 0 if one suffices."""
    first = max(MIN_WIDTH, 1 << (width.bit_length() - 1))
    remaining = width - first
    return first, 0 if remaining <= 0 else max(MIN_WIDTH, 1 << (remaining - 1).bit_length())


def row_constants(width: int) -> dict[str, int]:
    """The compile-time arguments of `merge`, `delta` and `finish` for rows of a width."""
    first, second = parts(width)
    return {"R": ROWS, "E": width, "EA": first, "EB": second}


def add_constants(width: int) -> dict[str, int]:
    """The compile-time arguments of `add`; width: the widest row."""
    return {"R": ROWS, "C": min(256, max(16, 1 << (width - 1).bit_length()))}


def variant(dtype: str, qk: int, v: int) -> Variant:
    """The variant of a model, for all GPUs."""
    size = {"bf16": 2, "fp16": 2, "fp32": 4}[dtype]
    return Variant(qk, v, size, _shapes(max(qk, v), size))


def _shapes(width: int, size: int) -> Mapping[str, Shape]:
    """Tile shapes whose loops do not spill registers on any GPU that `make kernels` compiles for."""
    if size == 4:
        owner = 32 if width <= 64 else 16
        return {"attend": Shape(32, 16, 8, 1), "dq": Shape(owner, 16, 8, 1), "dkdv": Shape(32, 16, 8, 1)}
    if width > 192:
        return {"attend": Shape(64, 32, 8, 2), "dq": Shape(32, 32, 4, 2), "dkdv": Shape(32, 32, 8, 2)}
    # the fastest of those measured on an H100 (docs/benchmarks.md): two warp groups halve the speed of dkdv
    if width > 128:
        return {"attend": Shape(128, 32, 8, 3), "dq": Shape(64, 32, 4, 3), "dkdv": Shape(32, 32, 4, 3)}
    if width <= 64:
        return {"attend": Shape(128, 64, 4, 3), "dq": Shape(64, 64, 4, 3), "dkdv": Shape(64, 32, 4, 3)}
    return {"attend": Shape(128, 64, 8, 3), "dq": Shape(128, 64, 8, 3), "dkdv": Shape(64, 32, 4, 3)}

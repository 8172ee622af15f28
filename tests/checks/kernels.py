"""Compiles the stage kernels without a GPU and checks their machine code against rules.

Run: python -m tests.checks.kernels [--kernel attend,dq] [--arch sm_90a] [--dims 128,192/128] [--dtype bf16] [--jobs 2]
[--shape 128x64x8x3] [--json]. Kernels get the same types and options as in real launches. --shape: owner and walked
rows, warps and stages that replace those of `variants`. Exit code 1 if a rule is broken.

    regs, stack   per thread; stack holds spilled registers, in bytes
    shared        KB per program
    loop          instructions that a warp issues per iteration (turn) of the mask-free attention loop
    local         accesses to spilled registers in inner loops
    tensor        tensor core instructions in that loop
    cycles        per turn and SM, upper bounds: tensor cores, instruction issue, exponentials
    share         estimated fraction of a turn in which tensor cores work, without and with full overlap
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from triton import compile as translate
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from apportion.backends.torch.memory.arrays import DTYPES
from apportion.backends.torch.stage.launcher import KERNELS
from apportion.backends.torch.stage.rowlists import Panel, move
from apportion.backends.torch.stage.variants import (
    Shape,
    Variant,
    add_constants,
    parts,
    row_constants,
    variant,
)
from tests.checks import sass
from tests.checks.kernel_arguments import examples

ATTENTION = ("attend", "dq", "dkdv")


class Arch(NamedTuple):
    """An architecture. shared: shared memory of a program in bytes; tensor, plain: FLOP per cycle and SM, of tensor
    cores in half precision and of float32 (NVIDIA's white papers on A100, H100 and B200)."""

    target: GPUTarget
    shared: int
    tensor: int
    plain: int


ARCHS: Mapping[str, Arch] = {
    "sm_80": Arch(GPUTarget("cuda", 80, 32), 163 << 10, 2048, 128),
    "sm_90a": Arch(GPUTarget("cuda", 90, 32), 227 << 10, 4096, 256),
    "sm_100a": Arch(GPUTarget("cuda", 100, 32), 227 << 10, 8192, 256),
    "gfx942": Arch(GPUTarget("hip", "gfx942", 64), 64 << 10, 2048, 256),
}
SCHEDULERS, EXPONENTIALS, WARP = 4, 16, 32  # per SM; per SM and cycle; threads
WIDTHS = ((64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256))
MODELS = {"bf16": WIDTHS, "fp16": ((128, 128),), "fp32": ((64, 64), (128, 128))}
CAPPED = {("bf16", 128), ("bf16", 256)}


@dataclass(frozen=True)
class Case:
    """One variant of a kernel on one architecture. constants: only for row kernels."""

    kernel: str
    arch: str
    dtype: str
    qk: int
    v: int
    softcap: bool = False
    constants: tuple[tuple[str, int | bool], ...] = ()

    @property
    def on_nvidia(self) -> bool:
        return self.arch.startswith("sm_")

    def __str__(self) -> str:
        suffix = "".join(f" {name}={value}" for name, value in self.constants if name in ("GRAIN", "C"))
        softcap = " softcap" if self.softcap else ""
        return f"{self.kernel} {self.dtype} {widths(self.qk, self.v)}{softcap}{suffix} {self.arch}"


@dataclass(frozen=True)
class Turn:
    """The mask-free loop of an attention kernel; cycles are per turn and SM."""

    instructions: int
    mix: Mapping[str, int]
    wide_bytes: int
    narrow_reads: int
    tensor: int
    waits: int
    tensor_cycles: float
    issue_cycles: float
    exponential_cycles: float

    @property
    def share(self) -> tuple[float, float]:
        """The fraction of a turn in which tensor cores work, without overlap and with full overlap."""
        other = max(self.issue_cycles, self.exponential_cycles)
        if not self.tensor_cycles:
            return 0.0, 0.0
        cycles = self.tensor_cycles
        return cycles / (cycles + other), cycles / max(cycles, other)


@dataclass(frozen=True)
class Report:
    """The compiler's result for a case. local: local-memory accesses in inner loops; vector: whether some inner loop
    reads and writes only 16 bytes at a time; failed: the compiler's error."""

    case: Case
    shape: Shape | None
    registers: int
    stack: int
    shared: int
    seconds: float
    tensor: int = 0
    local: int = 0
    vector: bool = False
    turn: Turn | None = None
    failed: str = ""


class Rule(NamedTuple):
    """A rule. find: returns a description of the violation, or None; remedy: advice to the reader."""

    name: str
    find: Callable[[Report], str | None]
    remedy: str


@dataclass(frozen=True)
class Row:
    """A report, and the rules that it breaks: name -> description of the violation."""

    report: Report
    violations: Mapping[str, str] = field(default_factory=dict)


# --- rules


def _compiles(report: Report) -> str | None:
    return report.failed or None


def _local(report: Report) -> str | None:
    return f"{report.local} local-memory instructions in inner loops" if report.local else None


def _shared(report: Report) -> str | None:
    limit = ARCHS[report.case.arch].shared
    return f"{report.shared} bytes of {limit}" if report.shared > limit else None


def _tensor(report: Report) -> str | None:
    expected = report.case.kernel in ATTENTION and report.case.dtype != "fp32"
    return "none in the mask-free loop" if expected and not report.tensor else None


def _series(report: Report) -> str | None:
    turn = report.turn
    serial = turn is not None and report.case.arch == "sm_90a" and 2 * turn.waits > turn.tensor > 0
    return f"{turn.waits} waits for {turn.tensor} products" if turn and serial else None


def _tiles(report: Report) -> str | None:
    """In half precision, walked tiles are read 16 bytes at a time, unless a part has fewer bytes per thread."""
    case, turn = report.case, report.turn
    if turn is None or case.dtype == "fp32" or report.shape is None:
        return None
    columns = (column for width in (case.qk, case.v) for column in parts(width))
    each = (report.shape.walked * column * 2 // (report.shape.warps * WARP) for column in columns)
    needed = sum(size for size in each if size >= 16)
    return f"{turn.wide_bytes} bytes per thread, of {needed}" if turn.wide_bytes < needed else None


def _vector(report: Report) -> str | None:
    expected = report.case.kernel == "move" and dict(report.case.constants)["GRAIN"] == 16
    return "no inner loop of 16-byte accesses" if expected and not report.vector else None


RULES = (
    Rule("it compiles", _compiles, "look at what Triton printed; smaller tiles, in variants.py"),
    Rule("no spills in inner loops", _local, "smaller tiles, or more warps, in variants.py"),
    Rule("shared memory", _shared, "smaller tiles, or fewer stages, in variants.py"),
    Rule("tensor cores", _tensor, "tiles that the MMA instructions take: 64 owner rows for 4 warps, 16 numbers"),
    Rule("products in flight", _series, "fewer registers: wgmma is serialised where accumulators do not fit"),
    Rule("tiles in 16-byte reads", _tiles, "row strides and widths that are known multiples of 16 bytes"),
    Rule("panels in 16-byte accesses", _vector, "addresses and strides known to be multiples of 16"),
)  # fmt: skip


def judge(report: Report) -> Row:
    violations = {rule.name: rule.find(report) for rule in RULES} if report.case.on_nvidia else {}
    return Row(report, {name: text for name, text in violations.items() if text})


# --- cases


def all_cases() -> Iterator[Case]:
    """Yields all cases, slowest first."""
    for arch in reversed(ARCHS):
        for dtype, listed in MODELS.items():
            for qk, v in sorted(listed, reverse=True):
                yield from (Case(kernel, arch, dtype, qk, v) for kernel in ATTENTION)
                if (dtype, qk) in CAPPED:
                    yield from (Case(kernel, arch, dtype, qk, v, True) for kernel in ATTENTION)
        yield from row_cases(arch)


def row_cases(arch: str) -> Iterator[Case]:
    """Yields the row kernels of half-precision and float32 models."""
    for dtype, (qk, v) in (("bf16", (192, 128)), ("bf16", (80, 80)), ("fp32", (128, 128))):
        size = DTYPES[dtype].itemsize
        tables: dict[str, dict[str, Any]] = {name: row_constants(v) for name in ("merge", "delta", "finish")}
        tables["add"] = add_constants(qk + v)
        tables["move"] = move([_panel(8 * (qk + v) * size)]).constants(dtype)
        tables["delta"] |= {"SINKS": True, "DLSE": True}
        tables["finish"] |= {"SINKS": True}
        yield from (Case(name, arch, dtype, qk, v, False, tuple(one.items())) for name, one in tables.items())
    for width in (4, 8, 2 * 5):
        constants = move([_panel(width)]).constants("bf16").items()
        yield Case("move", arch, "bf16", width, width, False, tuple(constants))


def _panel(width: int) -> Panel:
    return Panel(None, 0, width, None, 0, width, 4096, width, 0)


def widths(qk: int, v: int) -> str:
    return str(qk) if qk == v else f"{qk}/{v}"


# --- compiling


def variant_of(case: Case, shape: Shape | None) -> Variant:
    """The variant of a case, with `shape`, if there is one, for its kernel."""
    found = variant(case.dtype, case.qk, case.v)
    return found if shape is None else replace(found, shapes={**found.shapes, case.kernel: shape})


def compile_kernel(case: Case, constants: Mapping[str, Any]) -> Any:
    """Compiles like a launch, with the same types, specialisation and options; returns Triton's kernel."""
    function, target = KERNELS[case.kernel], ARCHS[case.arch].target
    backend = make_backend(target)
    bind = create_function_from_signature(function.signature, function.params, backend)
    kinds = {one.name: one.annotation_type for one in function.params if not one.is_constexpr}
    bound, kinds_found, options = bind(*examples(kinds, DTYPES[case.dtype]), **constants)
    options, signature, values, attributes = function._pack_args(backend, options, bound, kinds_found, None)
    source = ASTSource(function, signature, values, attributes)
    return translate(source, target=target, options=options.__dict__)


def measure(case: Case, shape: Shape | None) -> Row:
    """Compiles a case and checks the result."""
    began = time.perf_counter()
    if case.kernel in ATTENTION:
        chosen = variant_of(case, shape)
        shape, constants = chosen.shapes[case.kernel], chosen.constants(case.kernel, case.softcap)
    else:
        shape, constants = None, dict(case.constants)
    try:
        kernel = compile_kernel(case, constants)
    except RuntimeError as error:  # Triton's compiler gave up
        seconds = time.perf_counter() - began
        return judge(Report(case, shape, 0, 0, 0, seconds, failed=str(error)))
    seconds = time.perf_counter() - began
    reader = on_nvidia if case.on_nvidia else on_amd
    return judge(reader(case, shape, constants, kernel, seconds))


def on_nvidia(case: Case, shape: Any, constants: Mapping[str, Any], kernel: Any, seconds: float) -> Report:
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(kernel.asm["cubin"])
        registers, stack = sass.resources(cubin)
        inner = sass.innermost(sass.loops(sass.disassembled(cubin)))
    free = mask_free(inner, constants) if shape else None
    return Report(
        case, shape, registers, stack, kernel.metadata.shared, seconds,
        tensor=free.count(sass.TENSOR) if free else 0,
        local=sum(loop.count(sass.LOCAL) for loop in inner),
        vector=any(is_vector(loop) for loop in inner),
        turn=turn_of(case, shape, constants, free) if free and shape else None,
    )  # fmt: skip


def on_amd(case: Case, shape: Shape | None, _: Mapping[str, Any], kernel: Any, seconds: float) -> Report:
    """Reports only registers, bytes of spilled registers, and matrix instructions of the whole kernel."""
    text = kernel.asm["amdgcn"]
    names = "vgpr_count", "vgpr_spill_count"
    registers, spilled = (int(found_in(text, rf"\.{name}:\s+(\d+)")) for name in names)
    matrix = len(re.findall(r"v_mfma", text))
    return Report(case, shape, registers, 4 * spilled, kernel.metadata.shared, seconds, tensor=matrix)


def found_in(text: str, pattern: str) -> str:
    found = re.search(pattern, text)
    return found.group(1) if found else "0"


def mask_free(inner: Iterable[sass.Loop], constants: Mapping[str, Any]) -> sass.Loop:
    """The mask-free loop: the shortest of the loops with the most matrix products."""
    kinds = sass.TENSOR if constants["PRECISION"] != "ieee" else {"FFMA"}
    listed = list(inner)
    most = max(loop.count(kinds) for loop in listed)
    return min((loop for loop in listed if 2 * loop.count(kinds) > most), key=lambda loop: len(loop.turn))


def is_vector(loop: sass.Loop) -> bool:
    """Whether the loop reads and writes global memory only 16 bytes at a time."""
    accesses = [one for one in loop.code if one.op in ("LDG", "STG")]
    kinds = {one.op for one in accesses}
    return kinds == {"LDG", "STG"} and all(sass.access_bytes(one.name) >= 16 for one in accesses)


def turn_of(case: Case, shape: Shape, constants: Mapping[str, Any], loop: sass.Loop) -> Turn:
    arch = ARCHS[case.arch]
    rate = arch.plain if constants["PRECISION"] == "ieee" else arch.tensor
    ops = loop.ops
    return Turn(
        instructions=len(loop.turn),
        mix=dict(ops.most_common(12)),
        wide_bytes=loop.wide_bytes(),
        narrow_reads=loop.narrow(),
        tensor=loop.count(sass.TENSOR),
        waits=sum("gsb0" in one.operands for one in loop.turn if one.op == "HGMMA"),
        tensor_cycles=loop.tensor_cycles(shape.warps, rate) or flops(case.kernel, shape, constants) / rate,
        issue_cycles=len(loop.turn) * shape.warps / SCHEDULERS,
        exponential_cycles=ops["MUFU"] * WARP * shape.warps / EXPONENTIALS,
    )


def flops(kernel: str, shape: Shape, constants: Mapping[str, Any]) -> int:
    """The FLOPs of a turn's matrix products, with padded widths."""
    qk, v = (constants[one] + constants[two] for one, two in (("DA", "DB"), ("EA", "EB")))
    width = {"attend": qk + v, "dq": 2 * qk + v, "dkdv": 2 * qk + 2 * v}[kernel]
    return 2 * shape.owner * shape.walked * width


# --- output


def line(row: Row) -> str:
    report, shape, turn = row.report, row.report.shape, row.report.turn
    tile = f"{shape.owner}x{shape.walked} w{shape.warps} s{shape.stages}" if shape else ""
    text = f"{report.case!s:44} {tile:14} {report.registers:4} {report.stack:5} {report.shared / 1024:7.1f}"
    text += f" {report.local:5} {report.tensor:6} {report.seconds:6.1f}"
    if turn:
        low, high = turn.share
        text += f" {turn.instructions:5} {turn.tensor_cycles:6.0f} {turn.issue_cycles:6.0f}"
        text += f" {turn.exponential_cycles:6.0f} {low:4.0%}-{high:.0%}"
    text += f"  NOT COMPILED: {report.failed}" if report.failed else ""
    return text + "".join(f"  BROKEN {name}" for name in row.violations)


HEAD = f"{'':44} {'tile':14} regs stack  shared local tensor      s  loop tensor  issue    exp share (cycles of a turn)"


def complaints(row: Row) -> Iterator[str]:
    """Yields a message with violation and remedy for each broken rule."""
    remedies = {rule.name: rule.remedy for rule in RULES}
    for name, found in row.violations.items():
        yield f"{row.report.case}: {name}: {found}; remedy: {remedies[name]}"


def as_json(row: Row) -> dict[str, Any]:
    return {**asdict(row.report), "broken": dict(row.violations)}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def measure_all(cases: Sequence[Case], shape: Shape | None, jobs: int) -> Iterator[Row]:
    """Yields the rows of the cases in order; uses a temporary Triton cache."""
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
            for number, row in enumerate(pool.map(partial(measure, shape=shape), cases), 1):
                say(f"{number}/{len(cases)} {row.report.case} {row.report.seconds:.1f} s")
                yield row


# --- command line


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    listed = {"kernel": "attend,dq", "arch": "sm_90a", "dims": "128,192/128", "dtype": "bf16"}
    for name, example in listed.items():
        parser.add_argument(f"--{name}", help=f"only these, as in {example}", type=lambda x: x.split(","))
    parser.add_argument("--shape", help="owner x walked x warps x stages, as in 128x64x8x3", type=shape_of)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="rows as JSON instead of a table")
    return parser.parse_args(argv)


def shape_of(text: str) -> Shape:
    return Shape(*(int(number) for number in text.split("x")))


def is_selected(case: Case, options: argparse.Namespace) -> bool:
    found = {"kernel": case.kernel, "arch": case.arch, "dims": widths(case.qk, case.v), "dtype": case.dtype}
    return all(value in (getattr(options, name) or [value]) for name, value in found.items())


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_arguments(argv)
    if os.environ.get("TRITON_INTERPRET") == "1":
        say("TRITON_INTERPRET=1 disables compilation: unset it")
        return 2
    cases = [case for case in all_cases() if is_selected(case, options)]
    if not cases:
        say("no variant has that kernel, architecture, dims and dtype: see ARCHS and MODELS in this file")
        return 2
    began = time.perf_counter()
    rows = list(measure_all(cases, options.shape, options.jobs))
    table = "\n".join([HEAD, *map(line, rows)])
    print(json.dumps([as_json(row) for row in rows], indent=1) if options.json else table)
    violations = [text for row in rows for text in complaints(row)]
    say(f"{len(rows)} variants in {time.perf_counter() - began:.0f} s, {len(violations)} rules broken")
    for text in violations:
        say(text)
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())

"""Analyses machine code of NVIDIA GPUs as a graph: the loops of a kernel, and the instructions per turn of each.

    nvdisasm's text ──read──► instructions ──Graph──► natural loops ──► Loop: counts of opcodes on its shortest turn

A loop is the body of a branch back to a block that dominates the branch (Aho, Lam, Sethi, Ullman: Compilers, 9.6). The
shortest turn skips masked blocks and retried waits.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import triton

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
TENSOR = frozenset({"HMMA", "HGMMA", "UTCHMMA"})
LOCAL = frozenset({"LDL", "STL"})
SHARED_BYTES = 128  # per cycle and SM
_HMMA = re.compile(r"HMMA\.(16)(8)(8|16)\.")
_HGMMA = re.compile(r"HGMMA\.(\d+)x(\d+)x(\d+)\b")
_LABEL = re.compile(r"(\.L_x_\d+):")
_LINE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([^\s;]+)\s*([^;]*);")
_TARGET = re.compile(r"`\((\.L_x_\d+)\)")


class Instruction(NamedTuple):
    """An instruction. guard: its predicate; name: opcode with modifiers; operands: the rest."""

    guard: str
    name: str
    operands: str

    @property
    def op(self) -> str:
        return self.name.split(".")[0]

    @property
    def target(self) -> str | None:
        """The label to which the instruction may branch; a CALL of a label is a far branch."""
        found = _TARGET.search(self.operands) if self.op in ("BRA", "CALL") else None
        return found.group(1) if found else None

    @property
    def falls_through(self) -> bool:
        if self.guard:
            return True
        return not (self.op in ("EXIT", "RET", "BRX") or (self.target and self.operands.startswith("`")))


@dataclass(frozen=True)
class Loop:
    """A loop. blocks: numbers of its blocks; depth: number of enclosing loops; turn: instructions of its shortest turn;
    code: all its instructions."""

    blocks: frozenset[int]
    depth: int
    turn: tuple[Instruction, ...]
    code: tuple[Instruction, ...]

    @cached_property
    def ops(self) -> Counter[str]:
        return Counter(one.op for one in self.turn)

    def count(self, ops: Iterable[str]) -> int:
        """The number of instructions with these opcodes, on any path."""
        return sum(one.op in ops for one in self.code)

    @property
    def waits(self) -> bool:
        """Whether the loop only retries a barrier."""
        return len(self.code) < 64 and not self.count({"LDG", "LDGSTS", "STG", "LDS", "FFMA", *TENSOR})

    def wide_bytes(self, bits: int = 128) -> int:
        """The bytes that a thread reads from global memory per turn in accesses of at least `bits` bits."""
        return sum(width for width in self._reads() if width * 8 >= bits)

    def narrow(self, bits: int = 128) -> int:
        """The number of reads from global memory per turn of fewer than `bits` bits."""
        return sum(width * 8 < bits for width in self._reads())

    def tensor_cycles(self, warps: int, rate: int) -> float:
        """The cycles of an SM's tensor cores for a turn of `warps` warps, at `rate` FLOP per cycle; 0 if the
        instructions do not state their shapes."""
        return sum(product_cycles(one, rate) for one in self.turn if one.op in TENSOR) * warps

    def _reads(self) -> Iterator[int]:
        return (access_bytes(one.name) for one in self.turn if one.op in ("LDG", "LDGSTS"))


def access_bytes(name: str) -> int:
    """The bytes of a memory access: LDG.E.128 -> 16, STG.E.U8 -> 1, LDG.E -> 4."""
    sizes = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}
    return next((sizes[part] for part in name.split(".")[1:] if part in sizes), 4)


def product_cycles(one: Instruction, rate: int) -> float:
    """The cycles of one warp's share of a matrix product. A warpgroup's product reads operands from shared memory at
    128 bytes per cycle, so 64 x 32 with both operands there takes as long as 64 x 48."""
    if found := _HMMA.match(one.name):
        m, n, k = (int(size) for size in found.groups())
        return 2 * m * n * k / rate
    if found := _HGMMA.match(one.name):
        m, n, k = (int(size) for size in found.groups())
        rows = m + n if "gdesc" in one.operands.split(", ")[1] else n
        return max(2 * m * n * k / rate, 2 * rows * k / SHARED_BYTES) / 4
    return 0.0


def disassembled(cubin: Path) -> str:
    """The output of nvdisasm."""
    command = [TOOLS / "nvdisasm", "-c", cubin]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def resources(cubin: Path) -> tuple[int, int]:
    """(registers, stack bytes) per thread of the only kernel."""
    command = [TOOLS / "cuobjdump", "-res-usage", cubin]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if found is None:
        raise ValueError(f"cuobjdump printed no registers:\n{text}")
    return int(found.group(1)), int(found.group(2))


def read(text: str) -> tuple[list[Instruction], dict[str, int]]:
    """The instructions, and label -> number of the instruction after it."""
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := _LABEL.match(line.strip()):
            labels[label.group(1)] = len(code)
        elif found := _LINE.search(line):
            guard, name, operands = found.groups()
            code.append(Instruction((guard or "").strip(), name, operands.strip()))
    return code, labels


def loops(text: str) -> list[Loop]:
    """The loops of a kernel in code order, without loops that only wait."""
    found = Graph(*read(text)).loops()
    return [loop for loop in found if not loop.waits]


def innermost(found: Sequence[Loop]) -> list[Loop]:
    """The loops that contain no other."""
    return [one for one in found if not any(other.blocks < one.blocks for other in found)]


class Graph:
    """The control flow graph of one kernel."""

    def __init__(self, code: Sequence[Instruction], labels: dict[str, int]) -> None:
        starts = {0, *labels.values(), *(i + 1 for i, one in enumerate(code) if _ends(one))}
        bounds = sorted(at for at in starts if at < len(code))
        number = {at: i for i, at in enumerate(bounds)}
        self.blocks = [code[a:b] for a, b in zip(bounds, [*bounds[1:], len(code)], strict=True)]
        self.next = [
            [number[at] for at in _successors(code, labels, stop - 1) if at in number]
            for stop in [*bounds[1:], len(code)]
        ]
        self.previous: list[list[int]] = [[] for _ in self.blocks]
        for block, targets in enumerate(self.next):
            for target in targets:
                self.previous[target].append(block)

    @cached_property
    def dominators(self) -> list[set[int]]:
        """For each block, the blocks on every path to it."""
        all_blocks = set(range(len(self.blocks)))
        found = [{0}, *(set(all_blocks) for _ in self.blocks[1:])]
        changed = True
        while changed:
            changed = False
            for block in range(1, len(self.blocks)):
                before = [found[one] for one in self.previous[block]]
                now = {block} | (set.intersection(*before) if before else set())
                changed |= now != found[block]
                found[block] = now
        return found

    def loops(self) -> list[Loop]:
        bodies: dict[int, set[int]] = {}
        for block, targets in enumerate(self.next):
            for head in targets:
                if head in self.dominators[block]:
                    bodies.setdefault(head, {head}).update(self._body(head, block))
        return [self._loop(head, body, bodies.values()) for head, body in sorted(bodies.items())]

    def _body(self, head: int, tail: int) -> set[int]:
        """The head, and the blocks that reach the tail without passing it."""
        body, todo = {head}, [tail]
        while todo:
            block = todo.pop()
            if block not in body:
                body.add(block)
                todo += self.previous[block]
        return body

    def _loop(self, head: int, body: set[int], others: Iterable[set[int]]) -> Loop:
        depth = sum(body < other for other in others)
        turn = tuple(one for block in self._shortest(head, body) for one in self.blocks[block])
        code = tuple(one for block in sorted(body) for one in self.blocks[block])
        return Loop(frozenset(body), depth, turn, code)

    def _shortest(self, head: int, body: set[int]) -> list[int]:
        """The blocks of the turn with the fewest instructions (Bellman and Ford)."""
        cost = {head: (len(self.blocks[head]), [head])}
        for _ in body:
            for block in sorted(body & cost.keys()):
                length, path = cost[block]
                for target in self.next[block]:
                    longer = length + len(self.blocks[target])
                    if target in body and target != head and longer < cost.get(target, (1 << 30,))[0]:
                        cost[target] = longer, [*path, target]
        return min(cost[block] for block in body if head in self.next[block] and block in cost)[1]


def _ends(one: Instruction) -> bool:
    return one.target is not None or not one.falls_through


def _successors(code: Sequence[Instruction], labels: dict[str, int], last: int) -> list[int]:
    one = code[last]
    target = [labels[one.target]] if one.target in labels else []
    return target + ([last + 1] if one.falls_through else [])

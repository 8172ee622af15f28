"""Writes the corpus of the core's fuzzer (`make fuzz-core`), in the format of core/fuzz/program.cpp.

Run: python -m tests.checks.fuzz_corpus. Takes programs of golden plans and of small plans of several recipes, with at
most four ranks and two head sets, and keeps the smallest of each form.
"""

from __future__ import annotations

import struct
from pathlib import Path

from apportion.ir.bytes import table_bytes
from apportion.ir.bytes.codec import Plan
from apportion.ir.isa import TABLES, Op
from apportion.ir.verify.subject import Subject
from apportion.ir.verify.view import Program
from tests.checks.fuzz_plans import golden_plans, one_rank, planned

CORPUS = Path(__file__).resolve().parents[2] / "core/fuzz/corpus"
RANKS, HEAD_SETS, BYTES = 4, 2, 4096


def seed(program: Program) -> bytes:
    """Encodes a program for the fuzz target."""
    uses = {Op(code) for code in program.source["instructions"]["op"].tolist()}
    projects = bool(uses & {Op.PROJECT, Op.PROJECT_GRAD})
    parts = table_bytes.encode_tables([program.source[name] for name in TABLES], program.ranks)
    head = bytes([program.ranks - 1, (program.phase == "backward") | projects << 2])
    rows = program.home_rows.tolist()
    return head + b"".join(
        struct.pack("<HH", own, len(part)) + part for own, part in zip(rows, parts, strict=True)
    )


def form(program: Program) -> tuple[object, ...]:
    """The features by which programs differ: ranks, phase, ops, head sets."""
    table = program.source["instructions"]
    return program.ranks, program.phase, frozenset(table["op"].tolist()), program.splits_heads


def main() -> None:
    plans: list[Plan] = [*golden_plans(), *one_rank(golden_plans()), *planned()]
    small = [plan for plan in plans if plan.header.ranks <= RANKS and len(plan.header.head_sets) <= HEAD_SETS]
    smallest: dict[tuple[object, ...], bytes] = {}
    for program in (program for plan in small for program in Subject(plan).programs):
        shortest = smallest.setdefault(form(program), encoded := seed(program))
        smallest[form(program)] = min(shortest, encoded, key=len)
    CORPUS.mkdir(exist_ok=True)
    for old in CORPUS.iterdir():
        old.unlink()
    for number, data in enumerate(sorted(smallest.values())):
        if len(data) <= BYTES:
            (CORPUS / f"{number:02}.bin").write_bytes(data)


if __name__ == "__main__":
    main()

"""Prints a rank's program and checks the plan's id, on msgpack and numpy alone: python read_plan.py P.plan [rank]

Written from apportion/schemas/FORMAT.md; it shares no code with the package."""

import sys
from hashlib import blake2b

import msgpack
import numpy as np

DTYPES = dict(enumerate(["<u1", "<u2", "<u4", "<u8", "<i1", "<i2", "<i4", "<i8"], 1)) | {10: "<u1"}
TENSORS = ["none", "X", "Q", "KV", "O", "dX", "dQ", "dKV", "dO", "delta"]
NAMES = """
spans row token length sequence position
operands tensor space row rows col heads
instructions op round channel mode count
transfers send peer operand
tasks q kv o dmin dmax first
grads q kv do delta dq dkv dmin dmax first
rowops a b c d first
ops none launch wait attend attend_grad delta merge add copy clear project project_grad finish
indexes operand q kv o do delta dq dkv a b c d
"""
WORDS = {words[0]: words[1:] for words in map(str.split, NAMES.strip().splitlines())}
LISTS = {1: "transfers", 2: None, 3: "tasks", 4: "grads"}  # every other op takes rowops


def digest(data):
    return blake2b(data, digest_size=32).digest()


def plan_id(plan):
    level = [digest(b"\0" + part) for part in plan["parts"]]
    while len(level) > 1:
        pairs = [digest(b"\1" + a + b) for a, b in zip(level[::2], level[1::2], strict=False)]
        level = pairs + level[2 * len(pairs) :]
    sections = [digest(plan[name]) for name in ("header", "request", "layouts", "moves", "report")]
    return digest(b"apportion.plan\0" + b"".join(sections) + level[0])


def read_table(cell, names):
    """Rows as dicts. Columns beyond the known ones are skipped; a missing table has no rows."""
    codes, *blobs = cell or [b"\1", b""]
    columns = [np.frombuffer(b, DTYPES.get(c) or f"<i{len(b)}") for c, b in zip(codes, blobs, strict=True)]
    rows = next(len(column) for code, column in zip(codes, columns, strict=True) if code <= 8)
    for i, code in enumerate(codes):  # a constant or an offset is one number, which stretches to all rows
        values = np.unpackbits(columns[i], bitorder="little") if code == 10 else columns[i].astype(int)
        columns[i] = np.resize(values + columns[0] if code == 11 else values, rows)
    return [dict(zip(names, map(int, row), strict=False)) for row in zip(*columns, strict=True)]


def show_operand(tensor, space, row, rows, col, heads):
    where = f"{TENSORS[tensor]}.{('home', 'work')[space]}[{row}:{row + rows})"
    return (where + f" head set {heads}" if heads else where) if tensor else "none"


def show_program(tables):
    lists = {name: read_table(tables.get(name), columns) for name, columns in WORDS.items()}
    for number, step in enumerate(lists["instructions"]):
        print(f"{number:6d} {WORDS['ops'][step['op']]}", *([step["round"]] if step["op"] <= 2 else []))
        for _ in range(step["count"]):
            row = lists[LISTS.get(step["op"], "rowops")].pop(0)
            for name in row.keys() & WORDS["indexes"]:
                row[name] = show_operand(**lists["operands"][row[name]])
            print("         ", *(f"{name}={value}" for name, value in row.items()))


plan = msgpack.unpackb(np.fromfile(sys.argv[1], "<u1").tobytes())
if plan["format"] != "apportion.plan" or plan["version"][0] != 1:
    sys.exit(f"not a plan of version 1: {plan['format']} {plan['version']}")
part = msgpack.unpackb(plan["parts"][int(sys.argv[2]) if len(sys.argv) > 2 else 0])
for name, spans in part["layouts"].items():
    print(f"layout {name}:", *(tuple(span.values()) for span in read_table(spans, WORDS["spans"])))
for kind, phase in [(kind, phase) for kind, phases in part["programs"].items() for phase in phases]:
    print(f"program {kind} {phase} of rank {part['rank']}")
    show_program(part["programs"][kind][phase])
if plan["id"] != plan_id(plan):
    sys.exit(f"the stored id {plan['id'].hex()} is not that of the bytes, {plan_id(plan).hex()}")
print("id", plan["id"].hex(), "matches")

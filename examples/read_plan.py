"""Prints a rank's program and checks the plan's id, on msgpack alone: python read_plan.py P.plan [rank]

Written from apportion/schemas/FORMAT.md; it shares no code with the package."""

import sys
from hashlib import blake2b

import msgpack

TENSORS = ["none", "X", "Q", "KV", "O", "dX", "dQ", "dKV", "dO", "delta"]
OPS = ["none", "launch", "wait", "attend", "attend_grad", "delta", "merge", "add", "copy", "clear", "project"]
OPS += ["project_grad", "finish", "deliver"]
LISTS = {1: "transfers", 2: None, 3: "tasks", 4: "grads"}  # every other op takes rowops
INDEXES = {"operand", "q", "kv", "o", "do", "delta", "dq", "dkv", "a", "b", "c", "d"}
# table: its columns, and what is expected of each
RULES = """
spans: length LAST, row AFTER length, token AFTER length, sequence LAST, position PLACE token sequence
moves: send LAST, peer FOLLOW, rows LAST, row AFTER rows
arenas: tensor LAST, rows LAST, heads LAST
operands: source BACK, tensor LAST, space LAST, rows LIKE, row ROW, col LIKE, heads LIKE
instructions: op FOLLOW, round RISE op, channel BY op, mode BY op, count BY op
transfers: send LAST, peer FOLLOW, operand NEW
tasks: q NEW, kv NEW, o WITH q, dmin KEYS kv, dmax QUERIES q, first LAST
grads: q NEW, kv NEW, do WITH q, delta WITH q, dq WITH q, dkv NEW, dmin KEYS kv, dmax QUERIES q, first FOLLOW
rowops: a FOLLOW, b LAST, c NEW, d LAST, first LAST
"""
TABLES = {line.split(":")[0]: line.split(": ")[1].split(", ") for line in RULES.strip().splitlines()}
PROGRAM = ("arenas", "operands", "instructions", "transfers", "tasks", "grads", "rowops")


def digest(data):
    return blake2b(data, digest_size=32).digest()


def plan_id(plan):
    level = [digest(b"\0" + part) for part in plan["parts"]]
    while len(level) > 1:
        pairs = [digest(b"\1" + a + b) for a, b in zip(level[::2], level[1::2], strict=False)]
        level = pairs + level[2 * len(pairs) :]
    sections = [digest(plan[name]) for name in ("header", "request", "layouts", "moves", "report")]
    return digest(b"apportion.plan\0" + b"".join(sections) + level[0])


class Cell:
    """The bytes of one rank's rows of a table, from the first to the last."""

    def __init__(self, data):
        self.data, self.at = data, 0

    def number(self):
        number = shift = 0
        while True:
            byte = self.data[self.at]
            number |= (byte & 127) << shift
            self.at, shift = self.at + 1, shift + 7
            if byte < 128:
                return number

    def difference(self):
        number = self.number()
        return number >> 1 if number % 2 == 0 else -(number + 1 >> 1)

    def differences(self, rows):
        """How much the rows of the next column are above what is expected."""
        form, found, at = self.number(), [0] * rows, -1
        if form == 1:
            for _ in range(self.number()):
                at += self.number() + 1
                found[at] = self.difference()
        if form == 2:
            self.at += (rows + 7) // 8
            bits = int.from_bytes(self.data[self.at - (rows + 7) // 8 : self.at], "little")
            found = [self.difference() if bits >> row & 1 else 0 for row in range(rows)]
        return [self.difference() for _ in range(rows)] if form == 3 else found


def read_program(cells, others):
    """Tables by name, each a list of rows; others: the operands of the part's programs so far, to which these come."""
    program = {"newest": 0, "operands": [], "others": others}
    for name, cell in zip(PROGRAM, cells, strict=False):
        program[name] = read_table(name, cell, program)
    return {name: program[name] for name in PROGRAM}


def read_table(name, data, program):
    """The rows of a table: the number in each column by its name."""
    cell = Cell(data)
    rows = [{} for _ in range(cell.number() if data else 0)]
    if name == "operands":
        program["first"] = len(program["others"])
        program["others"] += rows
    for rule in TABLES[name] if data else ():
        column, kind, *words = rule.split()
        memory, differences = {}, cell.differences(len(rows))
        for i, row in enumerate(rows):
            before = rows[i - 1] if i else dict.fromkeys([column, *words], 0)
            key = row[words[0]] if kind in ("BY", "RISE") else before[column]
            expected = expect(kind, column, words, row, before, memory.get(key), i, program)
            row[column] = memory[key] = expected + differences[i]
            if kind == "NEW" or (name == "rowops" and kind == "FOLLOW"):
                program["newest"] = max(program["newest"], row[column])
    return rows


def expect(kind, column, words, row, before, remembered, i, program):
    """What is expected of a row, from the one before it; remembered: what followed the last time."""
    last, a = before[column], words[0] if words else None
    if kind in ("LAST", "BACK"):
        return last
    if kind == "PLACE" and (i == 0 or row[words[1]] != before[words[1]]):
        return 0
    if kind in ("WITH", "PLACE"):
        return last + row[a] - before[a]
    if kind == "AFTER":
        return last + before[a]
    if kind in ("BY", "RISE"):
        return (remembered or 0) + (kind == "RISE" and row[a] <= 2)
    if kind in ("FOLLOW", "NEW"):
        unknown = last if kind == "FOLLOW" else program["newest"]
        return unknown + 1 if remembered is None else remembered
    if kind in ("KEYS", "QUERIES"):
        rows = program["operands"][row[a]]["rows"]
        return rows - 1 if kind == "QUERIES" else 1 - rows
    others, at = program["others"], program["first"] + i
    source = others[at - row["source"]] if row["source"] else None
    if kind == "LIKE":
        return source[column] if source else last
    if source and source["space"] == row["space"]:
        follows = i and before["source"] == row["source"]
        return source["row"] + (before["row"] - others[at - 1 - row["source"]]["row"] if follows else 0)
    follows = i and (before["tensor"], before["space"]) == (row["tensor"], row["space"])
    return before["row"] + before["rows"] if follows else 0


def read_part(part):
    """A part with rows in place of cells."""
    part = msgpack.unpackb(part)
    part["layouts"] = [read_table("spans", cell, {}) for cell in part["layouts"]]
    part["moves"] = [read_table("moves", cell, {}) for cell in part["moves"]]
    others = []
    for phases in part["programs"].values():
        for phase, cells in phases.items():
            phases[phase] = read_program(cells, others)
    return part


def show_operand(tensor, space, row, rows, heads, **_):
    where = f"{TENSORS[tensor]}.{('home', 'work')[space]}[{row}:{row + rows})"
    return (where + f" head set {heads}" if heads else where) if tensor else "none"


def show_program(tables):
    lists = {name: iter(rows) for name, rows in tables.items()}
    for number, step in enumerate(tables["instructions"]):
        print(f"{number:6d} {OPS[step['op']]}", *([step["round"]] if step["op"] <= 2 else []))
        for _ in range(step["count"]):
            row = next(lists[LISTS.get(step["op"], "rowops")])
            shown = {n: show_operand(**tables["operands"][v]) if n in INDEXES else v for n, v in row.items()}
            print("         ", *(f"{name}={value}" for name, value in shown.items()))


def main(path, rank=0):
    with open(path, "rb") as file:
        plan = msgpack.unpackb(file.read())
    if plan["format"] != "apportion.plan" or plan["version"][0] != 2:
        sys.exit(f"not a plan of version 2: {plan['format']} {plan['version']}")
    part = read_part(plan["parts"][int(rank)])
    for name, spans in zip(msgpack.unpackb(plan["header"])["layouts"], part["layouts"], strict=True):
        print(f"layout {name}:", *(tuple(span.values()) for span in spans))
    for kind, phases in part["programs"].items():
        for phase, tables in phases.items():
            print(f"program {kind} {phase} of rank {part['rank']}")
            show_program(tables)
    if plan["id"] != plan_id(plan):
        sys.exit(f"the stored id {plan['id'].hex()} is not that of the bytes, {plan_id(plan).hex()}")
    print("id", plan["id"].hex(), "matches")


if __name__ == "__main__":
    main(*sys.argv[1:])

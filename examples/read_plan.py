"""Reads plans and slices, on msgpack alone, and checks their bytes as apportion/schemas/FORMAT.md asks of a reader.

    python read_plan.py P.plan [rank]      prints a rank's layouts and programs
    python read_plan.py read P.plan        prints everything as JSON, for the conformance suite
    python read_plan.py check P.plan       exits with 1 where the plan must be refused

Written from the prose; it shares no code with the package."""

import json
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
#: columns in the order of the plan, where they are written in another one
ORDERS = {"spans": "row token length sequence position", "operands": "tensor space row rows col heads"}
ORDERS["moves"] = "send peer row rows"
#: what a column is at least, and at most: else 0, and 2**48
LEAST = dict.fromkeys(["arenas.tensor", "arenas.rows", "instructions.op", "spans.length", "moves.rows"], 1)
LEAST |= dict.fromkeys(["tasks.dmin", "tasks.dmax", "grads.dmin", "grads.dmax"], -(2**48))
MOST = {"tensor": 9, "space": 1, "col": 2**16, "op": 13, "mode": 3, "send": 1, "first": 1, "grads.first": 3}
MOST["arenas.heads"] = 2**16
DTYPES = {"bf16": 16, "fp16": 16, "fp32": 32, "fp64": 64}
SLICED = ("header", "layouts", "moves")
SECTIONS = ("header", "request", "layouts", "moves", "report")
PROGRAM = ("arenas", "operands", "instructions", "transfers", "tasks", "grads", "rowops")


class Refused(Exception):
    """What a reader must refuse: FORMAT.md lists it."""


def require(holds, what):
    if not holds:
        raise Refused(what)


def digest(data):
    return blake2b(data, digest_size=32).digest()


def plan_id(plan):
    level = [digest(b"\0" + part) for part in plan["parts"]]
    while len(level) > 1:
        pairs = [digest(b"\1" + a + b) for a, b in zip(level[::2], level[1::2], strict=False)]
        level = pairs + level[2 * len(pairs) :]
    sections = [digest(plan[name]) for name in SECTIONS]
    return digest(b"apportion.plan\0" + b"".join(sections) + level[0])


class Cell:
    """The bytes of one rank's rows of a table, from the first to the last."""

    def __init__(self, data):
        self.data, self.at = data, 0

    def number(self):
        number = shift = 0
        while True:
            require(self.at < len(self.data) and shift < 56, "cells: a number does not end")
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
        form, found, at = self.data[self.at] if self.at < len(self.data) else 4, [0] * rows, -1
        require(form <= 3, "cells: no such form")
        self.at += 1
        if form == 1:
            for _ in range(self.number()):
                at += self.number() + 1
                require(at < rows, "cells: differences beyond the rows")
                found[at] = self.difference()
        if form == 2:
            self.at += (rows + 7) // 8
            bits = int.from_bytes(self.data[self.at - (rows + 7) // 8 : self.at], "little")
            require(self.at <= len(self.data) and not bits >> rows, "cells: bits beyond the rows")
            found = [self.difference() if bits >> row & 1 else 0 for row in range(rows)]
        return [self.difference() for _ in range(rows)] if form == 3 else found

    def count(self):
        """How many rows it has, which its bytes bound."""
        rows = self.number() if self.data else 0
        require(rows <= min(2 * len(self.data), 1 << 24) and (rows or not self.data), "cells: too many rows")
        return rows

    def end(self, rows):
        """Behind the last column come zeros, as few as give it half a byte for a row."""
        zeros = (rows + 1) // 2 - self.at
        require(self.data[self.at :] == bytes(max(zeros, 0)), "cells: bytes are left over")


def read_program(cells, others, lenient):
    """Tables by name, each a list of rows; others: the operands of the part's programs so far, to which these come."""
    program = {"newest": 0, "operands": [], "others": others, "lenient": lenient}
    require(len(cells) == 7 or (lenient and len(cells) > 7), "parts: there are 7 tables")
    for name, cell in zip(PROGRAM, cells, strict=False):
        program[name] = read_table(name, cell, program)
    return {name: program[name] for name in PROGRAM}


def read_table(name, data, program):
    """The rows of a table: the number in each column by its name."""
    cell = Cell(data)
    rows = [{} for _ in range(cell.count())]
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
            if kind == "BACK":
                require(0 <= row[column] <= program["first"] + i, "cells: a source before the first operand")
            if kind == "NEW" or (name == "rowops" and kind == "FOLLOW"):
                program["newest"] = max(program["newest"], row[column])
    if not program.get("lenient"):
        cell.end(len(rows))
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


def read_part(part, lenient=False):
    """A part with rows in place of cells; lenient: of a newer minor version, which may have more of everything."""
    part, facts = msgpack.unpackb(part), {"lenient": lenient}
    part["layouts"] = [read_table("spans", cell, facts) for cell in part["layouts"]]
    part["moves"] = [read_table("moves", cell, facts) for cell in part["moves"]]
    others = []
    for phases in part["programs"].values():
        for phase, cells in phases.items():
            phases[phase] = read_program(cells, others, lenient)
    return part


def slice_id(held):
    """The id that a slice proves to belong to: up the tree from its part, and beside the other sections."""
    node, i, n, path = digest(b"\0" + held["part"]), held["rank"], held["ranks"], list(held["path"])
    require(
        0 <= i < n <= 65535 and len(held["digests"]) == 2, "parts: a slice of no rank, or without digests"
    )
    require(all(len(one) == 32 for one in path + held["digests"]), "id: a digest has 32 bytes")
    while n > 1:
        if i ^ 1 < n:
            require(path, "id: the path is too short")
            beside = path.pop(0)
            node = digest(b"\1" + (beside + node if i % 2 else node + beside))
        i, n = i // 2, (n + 1) // 2
    require(not path, "id: the path is too long")
    request, report = held["digests"]
    sections = [digest(held["header"]), request, digest(held["layouts"]), digest(held["moves"]), report, node]
    cap = held["token_cap"]
    require(
        cap[8:] == digest(held["id"] + cap[:8])[:8] and len(cap) == 16, "id: a token cap without its hash"
    )
    return digest(b"apportion.plan\0" + b"".join(sections))


def read_plan(data):
    """A plan, or a slice, with sections and parts as plain data, rows in place of cells. Raises Refused."""
    held = msgpack.unpackb(data)
    known = isinstance(held, dict) and held["format"] in ("apportion.plan", "apportion.slice")
    require(known, "envelope: neither a plan nor a slice")
    require(held["version"][0] == 2 and held["version"][1] >= 0, f"version: {held['version']}, 2.x is read")
    whole = held["format"] == "apportion.plan"
    parts = held["parts"] if whole else [held["part"]]
    bins = [*(held[name] for name in (SECTIONS if whole else SLICED)), *parts, held["id"]]
    bins += [] if whole else [*held["digests"], *held["path"]]
    require(all(isinstance(item, bytes) for item in bins), "envelope: sections, parts and digests are bin")
    real = plan_id(held) if whole else slice_id(held)
    require(
        held["id"] == real, f"id: stored is {held['id'].hex()}, which is not that of the bytes, {real.hex()}"
    )
    found = {"id": held["id"].hex(), **{name: msgpack.unpackb(held[name]) for name in SLICED}}
    check_sections(found, held["version"])
    ranks = len(parts) if whole else held["ranks"]
    require(ranks == found["header"]["ranks"], "parts: not as many as ranks")
    parts = [read_part(part, lenient=held["version"][1] > 0) for part in parts]
    for rank, part in enumerate(parts, 0 if whole else held["rank"]):
        require(part["rank"] == rank, "parts: of another rank")
        check_part(part, parts[0], found)
    return found | ({"parts": parts} if whole else {"rank": held["rank"], "part": parts[0]})


def check_sections(found, version):
    check_header(found["header"], version)
    layouts = found["layouts"]
    require(set(layouts) == set(found["header"]["layouts"]), "sections: not the layouts of the header")
    require(len({layout["tokens"] for layout in layouts.values()}) == 1, "sections: layouts of other tokens")
    require(all(set(pair) <= set(layouts) for pair in found["moves"]), "sections: moves of no layout")
    require(len(set(map(tuple, found["moves"]))) == len(found["moves"]), "sections: a move twice")


def check_header(header, version):
    sizes = [header[name] for name in ("q_heads", "kv_heads", "head_dim", "v_head_dim")]
    require(header["version"] == version, "sections: another version than outside")
    require(1 <= header["ranks"] <= 65535 and all(1 <= size <= 2**16 for size in sizes), "sections: sizes")
    require(sizes[0] % sizes[1] == 0, "sections: q_heads is no multiple of kv_heads")
    require(
        header["dtype"] in DTYPES and header["kinds"] and header["layouts"], "sections: dtype, kinds, layouts"
    )
    narrow = header.get("sent_gradients")
    require(
        narrow is None or (narrow == "model" and DTYPES[header["dtype"]] == 16), "sections: sent_gradients"
    )
    require(header["home_layout"] in header["layouts"], "sections: home_layout is no layout")
    names = [*header["kinds"], *header["layouts"]]
    require(all(0 < len(name) <= 128 for name in names), "sections: a name has 1 to 128 characters")
    for group in (header["kinds"], header["layouts"]):
        require(len(set(group)) == len(group), "sections: a name twice")
    require(set(header["diagonals"]) == set(header["kinds"]), "sections: diagonals must be of each kind")
    for pairs in header["diagonals"].values():
        rises = len(pairs) <= 8 and pairs == sorted(map(list, set(map(tuple, pairs))))
        right = rises and all(-(2**62) <= low <= high <= 2**62 for low, high in pairs)
        require(right, "sections: such diagonals cannot be")
    for heads in header["head_sets"]:
        require(heads and len(set(heads)) == len(heads), "sections: a head set must hold distinct heads")
        require(all(0 <= head < header["q_heads"] for head in heads), "sections: a head that is not there")


def check_part(part, first, found):
    """It has what the sections and the first part say, numbers are in their ranges, and lists are used up."""
    header, tokens = found["header"], found["layouts"][found["header"]["home_layout"]]["tokens"]
    require(len(part["moves"]) == len(found["moves"]), "parts: not the moves of the plan")
    require(len(part["layouts"]) == len(header["layouts"]), "parts: not the layouts of the header")
    require([*part["programs"]] == header["kinds"], "parts: not the kinds of the header")
    for kind, phases in part["programs"].items():
        require(list(phases) == list(first["programs"][kind]), "parts: phases that others have not")
    for spans in part["layouts"]:
        check_rows("spans", spans, {})
        require(all(span["token"] + span["length"] <= tokens for span in spans), "values: beyond the tokens")
    limits = {"peer": header["ranks"] - 1, "operands.heads": len(header["head_sets"])}
    for moves in part["moves"]:
        check_rows("moves", moves, limits)
    for phases in part["programs"].values():
        require(list(phases) in (["forward"], ["backward"], ["forward", "backward"]), "parts: phases")
        for program in phases.values():
            for name, rows in program.items():
                check_rows(name, rows, limits | dict.fromkeys(INDEXES, len(program["operands"]) - 1))
            check_program(program, header)


def check_rows(table, rows, limits):
    most = MOST | limits
    for row in rows:
        for column, value in row.items():
            name = f"{table}.{column}"
            high = most.get(name, most.get(column, 2**48))
            require(LEAST.get(name, 0) <= value <= high, f"values: {name} = {value} cannot be")


def check_program(program, header):
    tensors = [arena["tensor"] for arena in program["arenas"]]
    require(len(set(tensors)) == len(tensors), "values: two arenas of a tensor")
    for number, operand in enumerate(program["operands"]):
        none = [operand["tensor"] == 0, operand["rows"] == 0]
        right = not any(none) if number else not any(operand[name] for name in ORDERS["operands"].split())
        require(right, "values: operand 0 is none, and no other is")
        heads = header["head_sets"][operand["heads"] - 1] if operand["heads"] else [0]
        fits = operand["tensor"] not in (3, 7) or max(heads) < header["kv_heads"]
        require(fits, "indexes: a KV head that is not there")
    used = dict.fromkeys(PROGRAM[3:], 0)
    for step in program["instructions"]:
        stray = step["channel"] or step["mode"] or (step["op"] != 2 and step["round"])
        require(step["op"] == 1 or not stray, "values: round, channel and mode are for launch")
        if LISTS.get(step["op"], "rowops"):
            used[LISTS.get(step["op"], "rowops")] += step["count"]
        else:
            require(step["count"] == 0, "values: wait takes no list")
    require(all(used[name] == len(program[name]) for name in used), "counts: they do not add up to the lists")


def plain(plan):
    """With lists in place of rows, columns in the order of the plan."""

    def rows_of(name, rows):
        order = ORDERS[name].split() if name in ORDERS else [rule.split()[0] for rule in TABLES[name]]
        return [[row[column] for column in order] for row in rows]

    for part in plan.get("parts") or [plan["part"]]:
        part["layouts"] = [rows_of("spans", spans) for spans in part["layouts"]]
        part["moves"] = [rows_of("moves", moves) for moves in part["moves"]]
        for phases in part["programs"].values():
            for phase, program in phases.items():
                phases[phase] = [rows_of(name, program[name]) for name in PROGRAM]
        for name in part.keys() - {"rank", "layouts", "programs", "moves"}:
            del part[name]  # of a newer version
    return plan


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


def show(plan, rank):
    part = plan["parts"][rank] if "parts" in plan else plan["part"]
    for name, spans in zip(plan["header"]["layouts"], part["layouts"], strict=True):
        print(f"layout {name}:", *(tuple(span.values()) for span in spans))
    for kind, phases in part["programs"].items():
        for phase, tables in phases.items():
            print(f"program {kind} {phase} of rank {part['rank']}")
            show_program(tables)
    print("id", plan["id"], "matches")


def main(*words):
    verb = words[0] if words[0] in ("read", "check") else None
    with open(words[1] if verb else words[0], "rb") as file:
        data = file.read()
    try:
        plan = read_plan(data)
    except Refused as error:
        sys.exit(str(error))
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        # of msgpack, or where something else was expected
        sys.exit(f"envelope: {type(error).__name__}: {error}")
    if verb == "read":
        print(json.dumps(plain(plan)))
    elif verb is None:
        show(plan, int(words[1]) if len(words) > 1 else 0)


if __name__ == "__main__":
    main(*sys.argv[1:])

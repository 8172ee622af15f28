"""Reads plans and slices with only msgpack, and checks their bytes as apportion/schemas/FORMAT.md requires of a reader.

    python read_plan.py P.plan [rank]      prints a rank's layouts and programs
    python read_plan.py read P.plan        prints everything as JSON, for the conformance suite
    python read_plan.py check P.plan       exits with 1 if the plan must be refused

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
# table -> its columns
TABLES = {
    "spans": "row token length sequence position",
    "moves": "send peer row rows",
    "arenas": "tensor rows heads",
    "operands": "tensor space row rows col heads",
    "instructions": "op round channel mode count",
    "transfers": "send peer operand",
    "tasks": "q kv o dmin dmax first",
    "grads": "q kv do delta dq dkv dmin dmax first",
    "rowops": "a b c d first",
    "runs": "row rows sequence position peer past leads",
    "folds": "kind head heads peer run parent",
    "states": "kind head heads peer run",
    "halo": "send peer row rows",
}
#: smallest and largest values of columns, where these are not 0 and 2**48
LEAST = dict.fromkeys(["arenas.tensor", "arenas.rows", "instructions.op", "spans.length", "moves.rows"], 1)
LEAST |= dict.fromkeys(["runs.rows", "halo.rows", "folds.heads", "states.heads"], 1)
LEAST |= dict.fromkeys(["runs.past", "folds.parent"], -1)
LEAST |= dict.fromkeys(["tasks.dmin", "tasks.dmax", "grads.dmin", "grads.dmax"], -(2**48))
MOST = {"tensor": 9, "space": 1, "col": 2**16, "op": 13, "mode": 3, "send": 1, "first": 1, "grads.first": 3}
MOST |= dict.fromkeys(["arenas.heads", "folds.heads", "states.heads"], 2**16) | {"leads": 1}
DTYPES = {"bf16": 16, "fp16": 16, "fp32": 32, "fp64": 64}
SLICED = ("header", "layouts", "moves")
SECTIONS = ("header", "request", "layouts", "moves", "report")
RECURRENT = ("runs", "folds", "states", "halo")
SIZES = dict.fromkeys(["heads", "key_heads", "key_dim", "value_dim"], (1, 2**16))
SIZES |= {"conv": (0, 1024), "layers": (1, 2**24)}
PROGRAM = ("arenas", "operands", "instructions", "transfers", "tasks", "grads", "rowops")


class RefusedError(Exception):
    """An input that a reader must refuse, as listed in FORMAT.md."""


def require(condition, message):
    if not condition:
        raise RefusedError(message)


def digest(data):
    return blake2b(data, digest_size=32).digest()


def plan_id(plan):
    level = [digest(b"\0" + part) for part in plan["parts"]]
    while len(level) > 1:
        pairs = [digest(b"\1" + a + b) for a, b in zip(level[::2], level[1::2], strict=False)]
        level = pairs + level[2 * len(pairs) :]
    sections = [digest(plan[name]) for name in SECTIONS]
    return digest(b"apportion.plan\0" + b"".join(sections) + level[0])


class Part:
    """The bytes of a part, table after table."""

    def __init__(self, data):
        self.data, self.at = data, 0

    def take(self, count):
        require(count <= len(self.data) - self.at, "tables: the part ends too soon")
        self.at += count
        return self.data[self.at - count : self.at]

    def table(self, name):
        """The rows of a table: column name -> number."""
        rows, columns = int.from_bytes(self.take(4), "little"), {}
        require(rows <= max(1, min(2**24, len(self.data) - self.at)), "tables: too many rows")
        for column in TABLES[name].split() if rows else ():
            columns[column] = self.column(rows)
        require(rows < 2 or any(map(any, columns.values())), "tables: rows that take no byte")
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def column(self, rows):
        (width,), number = self.take(1), 0
        require(width in (0, 1, 2, 4, 8), f"tables: a width of {width}")
        data, column = self.take(width * rows), []
        steps = [
            int.from_bytes(data[width * i : width * (i + 1)], "little", signed=True) for i in range(rows)
        ]
        for step in steps:
            number += step
            column.append(number)
        narrowest = next(
            w for w in (0, 1, 2, 4, 8) if not any(step + (1 << 8 * w >> 1) >> 8 * w for step in steps)
        )
        require(width == narrowest, "tables: a column is wider than its differences")
        return column

    def end(self):
        require(self.at == len(self.data), "tables: bytes are left over")


def read_part(data, rank, header, moves):
    """Reads a rank's tables. moves: the plan's moves, each with a table."""
    part = Part(data)
    result = {"rank": rank, "layouts": [part.table("spans") for _ in header["layouts"]]}
    result["programs"] = {
        kind: {phase: {name: part.table(name) for name in PROGRAM} for phase in header["phases"]}
        for kind in header["kinds"]
    }
    result["moves"] = [part.table("moves") for _ in moves]
    if "recurrent" in header:
        result["recurrent"] = {name: part.table(name) for name in RECURRENT}
    part.end()
    return result


def slice_id(envelope):
    """The id of the plan that a slice belongs to, computed up the tree from its part and the other sections."""
    node, i, n, path = (
        digest(b"\0" + envelope["part"]),
        envelope["rank"],
        envelope["ranks"],
        list(envelope["path"]),
    )
    require(
        0 <= i < n <= 65535 and len(envelope["digests"]) == 2, "parts: a slice of no rank, or without digests"
    )
    require(all(len(entry) == 32 for entry in path + envelope["digests"]), "id: a digest has 32 bytes")
    while n > 1:
        if i ^ 1 < n:
            require(path, "id: the path is too short")
            sibling = path.pop(0)
            node = digest(b"\1" + (sibling + node if i % 2 else node + sibling))
        i, n = i // 2, (n + 1) // 2
    require(not path, "id: the path is too long")
    request, report = envelope["digests"]
    sections = [
        digest(envelope["header"]),
        request,
        digest(envelope["layouts"]),
        digest(envelope["moves"]),
        report,
        node,
    ]
    cap = envelope["token_cap"]
    require(
        cap[8:] == digest(envelope["id"] + cap[:8])[:8] and len(cap) == 16, "id: a token cap without its hash"
    )
    return digest(b"apportion.plan\0" + b"".join(sections))


def read_plan(data):
    """Reads a plan or a slice: sections and parts as plain data, tables as lists of rows. Raises RefusedError."""
    envelope = msgpack.unpackb(data)
    is_known = isinstance(envelope, dict) and envelope["format"] in ("apportion.plan", "apportion.slice")
    require(is_known, "envelope: neither a plan nor a slice")
    require(
        envelope["version"][0] == 3 and envelope["version"][1] >= 0,
        f"version: {envelope['version']}, 3.x is read",
    )
    is_plan = envelope["format"] == "apportion.plan"
    parts = envelope["parts"] if is_plan else [envelope["part"]]
    bins = [*(envelope[name] for name in (SECTIONS if is_plan else SLICED)), *parts, envelope["id"]]
    bins += [] if is_plan else [*envelope["digests"], *envelope["path"]]
    require(all(isinstance(item, bytes) for item in bins), "envelope: sections, parts and digests are bin")
    computed = plan_id(envelope) if is_plan else slice_id(envelope)
    require(
        envelope["id"] == computed, f"id: {envelope['id'].hex()} is not that of the bytes, {computed.hex()}"
    )
    plan = {"id": envelope["id"].hex(), **{name: msgpack.unpackb(envelope[name]) for name in SLICED}}
    check_sections(plan, envelope["version"])
    ranks = len(parts) if is_plan else envelope["ranks"]
    require(ranks == plan["header"]["ranks"], "parts: their number is not the number of ranks")
    first = 0 if is_plan else envelope["rank"]
    parts = [read_part(part, rank, plan["header"], plan["moves"]) for rank, part in enumerate(parts, first)]
    for part in parts:
        check_part(part, plan)
    return plan | ({"parts": parts} if is_plan else {"rank": envelope["rank"], "part": parts[0]})


def check_sections(plan, version):
    check_header(plan["header"], version)
    layouts = plan["layouts"]
    require(set(layouts) == set(plan["header"]["layouts"]), "sections: layouts differ from the header's")
    require(len({layout["tokens"] for layout in layouts.values()}) == 1, "sections: layouts differ in tokens")
    require(all(set(pair) <= set(layouts) for pair in plan["moves"]), "sections: a move of unknown layouts")
    require(len(set(map(tuple, plan["moves"]))) == len(plan["moves"]), "sections: a move occurs twice")


def check_header(header, version):
    sizes = [header[name] for name in ("q_heads", "kv_heads", "head_dim", "v_head_dim")]
    require(header["version"] == version, "sections: the version differs from the envelope's")
    require(1 <= header["ranks"] <= 65535 and all(1 <= size <= 2**16 for size in sizes), "sections: sizes")
    require(sizes[0] % sizes[1] == 0, "sections: q_heads is not a multiple of kv_heads")
    require(
        header["dtype"] in DTYPES and header["kinds"] and header["layouts"], "sections: dtype, kinds, layouts"
    )
    narrow = header.get("sent_gradients")
    require(
        narrow is None or (narrow == "model" and DTYPES[header["dtype"]] == 16), "sections: sent_gradients"
    )
    require(header["home_layout"] in header["layouts"], "sections: home_layout is not a layout")
    names = [*header["kinds"], *header["layouts"]]
    require(all(0 < len(name) <= 128 for name in names), "sections: a name has 1 to 128 characters")
    for group in (header["kinds"], header["layouts"]):
        require(len(set(group)) == len(group), "sections: a name occurs twice")
    phases = [phase for phase in ("forward", "backward") if phase in header["phases"]]
    require(phases and phases == header["phases"], "sections: phases")
    require(set(header["diagonals"]) == set(header["kinds"]), "sections: diagonals must be of each kind")
    for pairs in header["diagonals"].values():
        is_sorted = len(pairs) <= 8 and pairs == sorted(map(list, set(map(tuple, pairs))))
        is_valid = is_sorted and all(-(2**62) <= low <= high <= 2**62 for low, high in pairs)
        require(is_valid, "sections: impossible diagonals")
    if "recurrent" in header:
        check_recurrent(header)
    for heads in header["head_sets"]:
        require(heads and len(set(heads)) == len(heads), "sections: a head set must hold distinct heads")
        require(all(0 <= head < header["q_heads"] for head in heads), "sections: a head that does not exist")


def check_recurrent(header):
    kinds = header["recurrent"]
    require(1 <= len(kinds) <= 16 and not set(kinds) & set(header["kinds"]), "sections: recurrent kinds")
    for name, kind in kinds.items():
        sizes = {size: kind[size] for size in SIZES}
        right = all(type(n) is int and SIZES[size][0] <= n <= SIZES[size][1] for size, n in sizes.items())
        right &= (
            set(kind) == {*SIZES, "gate", "delta"} and type(kind["delta"]) is bool and 0 < len(name) <= 128
        )
        right &= kind["gate"] in ("scalar", "diagonal") and kind["heads"] % max(kind["key_heads"], 1) == 0
        require(right, "sections: an impossible recurrent kind")


def check_part(part, plan):
    """Checks that numbers are in range and lists are used completely."""
    header, tokens = plan["header"], plan["layouts"][plan["header"]["home_layout"]]["tokens"]
    for spans in part["layouts"]:
        check_rows("spans", spans, {})
        require(all(span["token"] + span["length"] <= tokens for span in spans), "values: beyond the tokens")
    limits = {"peer": header["ranks"] - 1, "operands.heads": len(header["head_sets"])}
    for moves in part["moves"]:
        check_rows("moves", moves, limits)
    if "recurrent" in part:
        check_tables(part["recurrent"], [*header["recurrent"].values()], limits)
    for phases in part["programs"].values():
        for program in phases.values():
            for name, rows in program.items():
                check_rows(name, rows, limits | dict.fromkeys(INDEXES, len(program["operands"]) - 1))
            check_program(program, header)


def check_tables(tables, kinds, limits):
    """Checks that the tables of recurrent layers refer to existing rows."""
    for name, rows in tables.items():
        check_rows(name, rows, limits | {"kind": len(kinds) - 1})
    runs, end = tables["runs"], 0
    for run in runs:
        require(run["row"] == end, "values: a run does not begin where the one before it ends")
        require(run["past"] >= 0 or run["peer"] == 0, "values: a peer without a past")
        end = run["row"] + run["rows"]
    for slot, row in enumerate(tables["folds"]):
        require(row["parent"] < slot, "indexes: a parent that is not an earlier slot")
    for row in tables["folds"] + tables["states"]:
        require(
            row["head"] + row["heads"] <= kinds[row["kind"]]["heads"], "indexes: a head that does not exist"
        )
    require(all(row["run"] < len(runs) for row in tables["states"]), "indexes: a run that does not exist")
    rows = max(max(kind["conv"] for kind in kinds) - 1, 0) * len(runs)
    fits = all(row["send"] or row["row"] + row["rows"] <= rows for row in tables["halo"])
    require(fits, "indexes: rows of the halo that do not exist")


def check_rows(table, rows, limits):
    maxima = MOST | limits
    for row in rows:
        for column, value in row.items():
            name = f"{table}.{column}"
            maximum = maxima.get(name, maxima.get(column, 2**48))
            require(LEAST.get(name, 0) <= value <= maximum, f"values: {name} = {value} is out of range")


def check_program(program, header):
    tensors = [arena["tensor"] for arena in program["arenas"]]
    require(len(set(tensors)) == len(tensors), "values: two arenas of a tensor")
    for number, operand in enumerate(program["operands"]):
        is_none = [operand["tensor"] == 0, operand["rows"] == 0]
        is_valid = not any(is_none) if number else not any(operand.values())
        require(is_valid, "values: operand 0 is none, and no other is")
        heads = header["head_sets"][operand["heads"] - 1] if operand["heads"] else [0]
        fits = operand["tensor"] not in (3, 7) or max(heads) < header["kv_heads"]
        require(fits, "indexes: a KV head that does not exist")
    counts = dict.fromkeys(PROGRAM[3:], 0)
    for step in program["instructions"]:
        stray = step["channel"] or step["mode"] or (step["op"] != 2 and step["round"])
        require(step["op"] == 1 or not stray, "values: round, channel and mode are for launch")
        if LISTS.get(step["op"], "rowops"):
            counts[LISTS.get(step["op"], "rowops")] += step["count"]
        else:
            require(step["count"] == 0, "values: wait takes no list")
    require(
        all(counts[name] == len(program[name]) for name in counts), "counts: they do not add up to the lists"
    )


def plain(plan):
    """A plan with lists of numbers as rows."""

    def rows_of(rows):
        return [[*row.values()] for row in rows]

    for part in plan.get("parts") or [plan["part"]]:
        part["layouts"] = [*map(rows_of, part["layouts"])]
        part["moves"] = [*map(rows_of, part["moves"])]
        if "recurrent" in part:
            part["recurrent"] = [rows_of(part["recurrent"][name]) for name in RECURRENT]
        for phases in part["programs"].values():
            for phase, program in phases.items():
                phases[phase] = [rows_of(program[name]) for name in PROGRAM]
    return plan


def show_operand(tensor, space, row, rows, heads, **_):
    text = f"{TENSORS[tensor]}.{('home', 'work')[space]}[{row}:{row + rows})"
    return (text + f" head set {heads}" if heads else text) if tensor else "none"


def show_program(tables):
    lists = {name: iter(rows) for name, rows in tables.items()}
    for number, step in enumerate(tables["instructions"]):
        print(f"{number:6d} {OPS[step['op']]}", *([step["round"]] if step["op"] <= 2 else []))
        for _ in range(step["count"]):
            row = next(lists[LISTS.get(step["op"], "rowops")])
            values = {n: show_operand(**tables["operands"][v]) if n in INDEXES else v for n, v in row.items()}
            print("         ", *(f"{name}={value}" for name, value in values.items()))


def show(plan, rank):
    part = plan["parts"][rank] if "parts" in plan else plan["part"]
    for name, spans in zip(plan["header"]["layouts"], part["layouts"], strict=True):
        print(f"layout {name}:", *(tuple(span.values()) for span in spans))
    for name, rows in part.get("recurrent", {}).items():
        print(f"recurrent {name}:", *(tuple(row.values()) for row in rows))
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
        require(data[:4] != bytes.fromhex("28b52ffd"), "envelope: it is compressed: zstd -d gives the plan")
        plan = read_plan(data)
    except RefusedError as error:
        sys.exit(str(error))
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        # from msgpack, or from an unexpected type
        sys.exit(f"envelope: {type(error).__name__}: {error}")
    if verb == "read":
        print(json.dumps(plain(plan)))
    elif verb is None:
        show(plan, int(words[1]) if len(words) > 1 else 0)


if __name__ == "__main__":
    main(*sys.argv[1:])

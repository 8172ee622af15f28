"""Naive walks over programs, instruction by instruction, that find complete rows and computed statistics."""

from __future__ import annotations

from collections import Counter, defaultdict

from apportion.ir.isa import OPERAND_COLUMNS, TASK_LIST, Op
from apportion.ir.plan.fusion import RowRanges
from apportion.ir.plan.ops import instruction_of
from apportion.ir.plan.tables import ProgramSet
from apportion.ir.tensors import Space, Tensor

SUMS = {"o": (Tensor.O, ("q",)), "dq": (Tensor.DQ, ("q", "do", "delta")), "dkv": (Tensor.DKV, ("kv",))}


COMPANIONS = {"q": Tensor.Q, "do": Tensor.DO, "delta": Tensor.DELTA, "kv": Tensor.KV}


def each_row(found: RowRanges) -> list[tuple[int, int]]:
    ranges = zip(*(part.tolist() for part in found), strict=True)
    return [(of, row) for of, row0, row1 in ranges for row in range(row0, row1)]


def complete_rows(
    programs: ProgramSet, phase: str, column: str
) -> tuple[set[tuple[int, int]], set[int], set[tuple[int, int]]]:
    """For one rank's program, row by row: (task, row) of rows that are complete after the task, complete home rows, and
    (operand, row) of work rows that tasks write at their final place."""
    tensor, companions = SUMS[column]
    name = TASK_LIST[phase]
    operands, op = programs["operands"], programs["instructions"]["op"].astype(int)
    names = "tensor", "space", "row", "rows", "heads", "col"
    of = {key: operands[key].astype(int).tolist() for key in names}
    modes = programs["instructions"]["mode"].astype(int)

    def rows_of(operand: int) -> list[tuple[int, int]]:
        return [(of["space"][operand], of["row"][operand] + i) for i in range(of["rows"][operand])]

    kinds = zip(*(of[name] for name in ("tensor", "space", "col", "heads")), strict=True)
    columns_of = Counter(tensor for tensor, space, *_ in set(kinds) if space == Space.WORK)
    uniform = all(columns_of[one] <= 1 for one in (tensor, *(COMPANIONS[each] for each in companions)))
    received_home: set[int] = set()  # home rows received as results
    last: dict[tuple[int, int], int] = {}
    leaving_rows: dict[tuple[int, int], list[tuple[int, int]]] = {}
    tasks: list[tuple[int, int, int, bool]] = []
    for table, columns in OPERAND_COLUMNS.items():
        at = instruction_of(op, programs["instructions"].wide("count"), table)
        for i in range(len(programs[table])):
            for each in columns:
                operand = int(programs[table][each][i])
                if of["tensor"][operand] != tensor or op[at[i]] == Op.FINISH:
                    continue
                results = table == "transfers" and modes[at[i]] & 2
                is_sent = programs[table]["send"][i] if results else 0
                if of["space"][operand] == Space.HOME and (results or op[at[i]] == Op.DELIVER):
                    received_home |= {row for _, row in rows_of(operand)}
                leaves = (results and is_sent) or (op[at[i]] == Op.DELIVER and each == "a")
                for row in rows_of(operand):
                    if leaves:
                        leaving_rows.setdefault(row, []).append((int(at[i]), operand))
                    else:
                        last[row] = max(last.get(row, -1), int(at[i]))
                if table == name and each == column:
                    others = [int(programs[table][other][i]) for other in companions]
                    space = of["space"][operand]
                    place = space, of["row"][operand]
                    plain = all((of["space"][x], of["row"][x]) == place for x in others)
                    plain &= space == Space.WORK or not any(of["heads"][x] for x in (operand, *others))
                    tasks.append((i, int(at[i]), operand, plain))
    mixed = {(at, of["space"][operand]) for _, at, operand, plain in tasks if not plain}
    done: set[tuple[int, int]] = set()
    complete_home: set[int] = set()
    placed: set[tuple[int, int]] = set()
    for i, step, operand, _ in tasks:
        if (step, of["space"][operand]) in mixed:
            continue
        for place in rows_of(operand):
            space, number = place
            leaving = leaving_rows.get(place, [])
            fit = space == Space.HOME or (uniform and len(leaving) == 1 and leaving[0][0] > last[place])
            if fit and last[place] == step:
                done.add((i, number))
                if space == Space.HOME:
                    complete_home.add(number)
                else:
                    placed.add((leaving[0][1], number))
    return done, received_home | complete_home, placed


def computed_statistics(programs: ProgramSet) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
    """For one rank's program, row by row: (task, row) and (row of rowops, row) of statistics that tasks can compute."""
    operands, instructions = programs["operands"], programs["instructions"]
    names = "tensor", "space", "row", "rows", "heads"
    columns = {name: operands[name].astype(int).tolist() for name in names}

    def place(operand: int) -> tuple[int, int, int]:
        return columns["space"][operand], columns["row"][operand], columns["heads"][operand]

    reads: dict[int, list[tuple[int, int]]] = defaultdict(list)
    writes: dict[int, list[int]] = defaultdict(list)
    other_uses: set[int] = set()
    for table, names in OPERAND_COLUMNS.items():
        at = instruction_of(instructions["op"], instructions.wide("count"), table).tolist()
        for i in range(len(programs[table])):
            named = {name: int(programs[table][name][i]) for name in names}
            for name, operand in named.items():
                if columns["tensor"][operand] != Tensor.DELTA or columns["space"][operand] != Space.HOME:
                    continue
                rows = range(columns["row"][operand], columns["row"][operand] + columns["rows"][operand])
                own, home = place(operand), (int(Space.HOME), columns["row"][operand], 0)
                is_delta = table == "rowops" and name == "c" and instructions["op"][at[i]] == Op.DELTA
                if table == "grads" and own == home == place(named["do"]) == place(named["dq"]):
                    for row in rows:
                        reads[row].append((at[i], i))
                elif is_delta and own == home == place(named["a"]) == place(named["b"]):
                    for row in rows:
                        writes[row].append(i)
                else:
                    other_uses.update(rows)
    tasks, rowops = set(), set()
    for row in set(reads) & set(writes) - other_uses:
        first = min(at for at, _ in reads[row])
        tasks |= {(task, row) for at, task in reads[row] if at == first}
        rowops |= {(i, row) for i in writes[row]}
    return tasks, rowops

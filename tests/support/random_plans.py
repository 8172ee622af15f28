"""Random plans that are structurally valid but otherwise arbitrary, for round trips through codec and text."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from apportion import Batch, Cluster, Model, Plan, Policy, Recipe, Recurrent
from apportion.ir.isa import MOVE_COLUMNS, OPERAND_COLUMNS, RECURRENCE_TABLES, SPAN_COLUMNS, TABLES, Op
from apportion.ir.plan.plain import diagonals_of
from apportion.ir.plan.tables import Header, Layout, Move, ProgramSet, Recurrence, Request, Table
from apportion.ir.tensors import PHASES, Tensor

Rng = np.random.Generator
RECURRENT = {"gated": Recurrent(4, 2, 2, conv=3), "wide": Recurrent(6, 2, 2, 3, "diagonal", False)}
HEAD_SETS = ((0,), (1, 0), (3, 2))  # the last one holds query heads only


def random_plan(seed: int, ranks: int | None = None) -> Plan:
    """An unsealed plan of 1 to 5 ranks with numbers of any size. One in seven has recurrent layers."""
    rng = np.random.default_rng(seed)
    ranks = ranks or int(rng.integers(1, 6))
    model = Model(q_heads=4, kv_heads=2, head_dim=8, v_head_dim=4, hidden=16, ffn=16, layers=1)
    model = replace(model, recurrent={} if seed % 7 != 3 else RECURRENT)
    lengths = [int(n) for n in rng.integers(1, 2 ** rng.integers(2, 30), rng.integers(1, 5))]
    request = Request(Batch.from_lengths(lengths), Cluster(1, ranks), model, Policy(Recipe("by-hand")))
    kinds = ("default",) if rng.random() < 0.7 else ("global kind", "лок:al")
    phases = PHASES if rng.random() < 0.8 else PHASES[:1]
    keys = [*product(kinds, phases)]
    names = ("attention", "linear -> 2")
    sizes = 4, 2, 8, 4  # heads and widths
    facts = {"diagonals": diagonals_of(request.batch, kinds), "phases": phases, "recurrent": model.recurrent}
    digests = {"b": "1", "a": "2"}
    planned = ranks, kinds, "by-hand", seed, "attention", names, HEAD_SETS
    header = Header(*planned, *sizes, model.dtype, digests, **facts)
    return Plan(
        header,
        request,
        {name: Layout(name, _spans(rng, ranks, sum(lengths))) for name in names},
        {key: _program(rng, ranks) for key in keys},
        (Move(*names, _moves(rng, ranks)),) if rng.random() < 0.5 else (),
        {"slots": 3, "gap": 0.25, "limit": None, "näme": [1, {"x": []}]} if rng.random() < 0.7 else {},
        _recurrence(rng, ranks) if model.recurrent else None,
    )


def _recurrence(rng: Rng, ranks: int) -> Recurrence:
    rows: dict[str, list[Any]] = {name: [[] for _ in range(ranks)] for name in RECURRENCE_TABLES}
    for rank in range(ranks):
        end = 0
        for _ in range(rng.integers(0, 4)):
            past = int(rng.integers(-1, 3))
            peer = int(rng.integers(0, ranks)) if past >= 0 else 0
            length = _size(rng) // 8 + 1
            leads = (_size(rng), _size(rng), peer, past, int(rng.integers(0, 2)))
            rows["runs"][rank].append((end, length, *leads))
            end += length
        runs = len(rows["runs"][rank])
        for name in ("folds", "states") if runs else ("folds",):
            for slot in range(rng.integers(0, 5)):
                kind, peer = (int(rng.integers(0, most)) for most in (2, ranks))
                head, run = int(rng.integers(0, 3)), int(rng.integers(0, runs or 9))
                parent = (int(rng.integers(-1, slot)) if slot else -1,) if name == "folds" else ()
                rows[name][rank].append((kind, head, int(rng.integers(1, 3 - head + 1)), peer, run, *parent))
        for _ in range(rng.integers(0, 3)):
            send = int(rng.integers(0, 2)) if runs else 1
            place = (_size(rng), _size(rng)) if send else (int(rng.integers(0, 2 * runs)), 1)
            rows["halo"][rank].append((send, int(rng.integers(0, ranks)), *place))
    return Recurrence({name: _table(rows[name], columns) for name, columns in RECURRENCE_TABLES.items()})


def _table(rows_of: list[list[tuple[int, ...]]], names: tuple[str, ...]) -> Table:
    ptr = np.cumsum([0, *map(len, rows_of)])
    rows = [row for rows in rows_of for row in rows]
    values = np.array(rows, np.int64).reshape(len(rows), len(names))
    return Table(ptr, names, values.T.copy())


def _size(rng: Rng) -> int:
    """A count whose encoding may need any number of bytes."""
    return int(rng.integers(1, 2 ** rng.integers(1, 47)))


def _spans(rng: Rng, ranks: int, tokens: int) -> Table:
    def span() -> tuple[int, ...]:
        token = int(rng.integers(0, tokens))
        return _size(rng), token, int(rng.integers(1, tokens - token + 1)), _size(rng), _size(rng)

    return _table([[span() for _ in range(rng.integers(0, 4))] for _ in range(ranks)], SPAN_COLUMNS)


def _moves(rng: Rng, ranks: int) -> Table:
    def move() -> tuple[int, ...]:
        return int(rng.integers(0, 2)), int(rng.integers(0, ranks)), _size(rng), _size(rng)

    return _table([[move() for _ in range(rng.integers(0, 3))] for _ in range(ranks)], MOVE_COLUMNS)


def _program(rng: Rng, ranks: int) -> ProgramSet:
    programs = [_rank_program(rng, ranks) for _ in range(ranks)]
    tables = {name: _table([p[name] for p in programs], columns) for name, columns in TABLES.items()}
    return ProgramSet(tables)


def _rank_program(rng: Rng, ranks: int) -> dict[str, list[tuple[int, ...]]]:
    rows: dict[str, list[tuple[int, ...]]] = {name: [] for name in TABLES}
    if rng.random() < 0.1:
        return rows
    rows["operands"] = [(0,) * 6] + [_operand(rng) for _ in range(rng.integers(1, 9))]
    if rng.random() < 0.3:
        rows["operands"].append(rows["operands"][-1])  # equal operands keep their own index
    tensors = rng.permutation(np.arange(1, 10))[: rng.integers(0, 5)]
    rows["arenas"] = [(int(tensor), _size(rng), int(rng.integers(0, 9))) for tensor in tensors]
    for op in rng.choice(list(Op), rng.integers(0, 9)):
        _add_instruction(rng, rows, Op(op), ranks)
    return rows


def _operand(rng: Rng) -> tuple[int, ...]:
    tensor = int(rng.integers(1, 10))
    sets = len(HEAD_SETS) if tensor not in (Tensor.KV, Tensor.DKV) else len(HEAD_SETS) - 1
    space, col, heads = int(rng.integers(0, 2)), int(rng.integers(0, 3)), int(rng.integers(0, sets + 1))
    return tensor, space, _size(rng), _size(rng), col, heads


def _add_instruction(rng: Rng, rows: dict[str, list[tuple[int, ...]]], op: Op, ranks: int) -> None:
    name = op.rule.list
    count = int(rng.integers(0, 4)) if name else 0
    launch = op is Op.LAUNCH
    round_ = int(rng.integers(0, 300)) if launch or op is Op.WAIT else 0
    channel, mode = (int(rng.integers(0, 3)), int(rng.integers(0, 4))) if launch else (0, 0)
    rows["instructions"].append((int(op), round_, channel, mode, count))
    for _ in range(count):
        rows[str(name)].append(_list_row(rng, str(name), len(rows["operands"]), ranks))


def _list_row(rng: Rng, name: str, operands: int, ranks: int) -> tuple[int, ...]:
    def value(column: str) -> int:
        if column in OPERAND_COLUMNS[name]:
            return int(rng.integers(0, operands))
        if column in ("dmin", "dmax"):
            return int(rng.integers(-(2**40), 2**40)) if rng.random() < 0.1 else int(rng.integers(-9, 9))
        return int(rng.integers(0, {"first": 4 if name == "grads" else 2, "send": 2, "peer": ranks}[column]))

    return tuple(value(column) for column in TABLES[name])

"""The instruction set: opcodes, tensor codes and the columns of every table, written out, never derived.

A rank's memory is named, not addressed. Each tensor has *home* rows (what the caller passes in and gets back) and
a *work* arena whose rows the planner allots. An operand is a range of rows of one of the two:

    operand = (tensor, space, row, rows, col, heads)

    tensor  what it is; see `Tensor`
    space   home | work
    row     first row; `rows` the number of rows (> 0, except in operand 0, which means "none")
    col     first head column of a work arena that the operand's heads occupy, side by side (0 for home rows, whose
            column is the head number itself)
    heads   0: all heads of the tensor; i >= 1: `head_sets[i - 1]` of the plan header (query heads for X, Q, O, dQ,
            dO, delta; KV heads for KV, dKV). X and dX have no heads: always 0.

Operand 0 of every program is (NONE, HOME, 0, 0, 0, 0); the others are distinct. Codes here are part of the format:
they are never renumbered, columns are never reordered or retyped; new columns go last and have a default.
"""

from __future__ import annotations

from enum import IntEnum
from types import MappingProxyType


class Tensor(IntEnum):
    """Tensors of a program. Rows are tokens; `Hq`, `Hk` query and KV heads; `D`, `Dv` head dims of QK and V."""

    NONE = 0
    X = 1  # hidden states, model dtype; only where `project` is used
    Q = 2  # [rows, Hq, D], model dtype
    KV = 3  # k [rows, Hk, D] and v [rows, Hk, Dv], model dtype
    O = 4  # noqa: E741  accumulator: o [rows, Hq, Dv] normalised, and lse [rows, Hq]; float32 (float64 for float64)
    DX = 5  # gradient of X, accumulator dtype
    DQ = 6  # [rows, Hq, D], accumulator dtype
    DKV = 7  # dk [rows, Hk, D] and dv [rows, Hk, Dv], accumulator dtype
    DO = 8  # gradient of the output [rows, Hq, Dv], model dtype
    DELTA = 9  # row statistics of the merged forward: lse [rows, Hq] and delta = rowsum(dO * O) [rows, Hq]


TENSOR_NAMES = MappingProxyType(
    {
        Tensor.NONE: "none",
        Tensor.X: "X",
        Tensor.Q: "Q",
        Tensor.KV: "KV",
        Tensor.O: "O",
        Tensor.DX: "dX",
        Tensor.DQ: "dQ",
        Tensor.DKV: "dKV",
        Tensor.DO: "dO",
        Tensor.DELTA: "delta",
    }
)

KV_SIDE = frozenset({Tensor.KV, Tensor.DKV})
HEADLESS = frozenset({Tensor.NONE, Tensor.X, Tensor.DX})


class Space(IntEnum):
    """Where rows live."""

    HOME = 0
    WORK = 1


class Op(IntEnum):
    """Operations. Each instruction consumes `count` rows, in order, of the list named in `OP_LIST`."""

    LAUNCH = 1  # start all sends and receives of `round` on `channel`; list: transfers
    WAIT = 2  # this rank's sends and receives of `round` are complete; no list
    ATTEND = 3  # tasks: Q rows x KV rows under the band, merged into O rows by online softmax
    ATTEND_GRAD = 4  # grads: Q, KV, dO, delta -> added into dQ and dKV rows
    DELTA = 5  # rowops a=dO, b=O, c=delta: delta = rowsum(dO * O), LSE copied from O
    MERGE = 6  # rowops a=O partial, c=O accumulator: log-sum-exp merge (first: overwrite)
    ADD = 7  # rowops a=partial, c=accumulator, both dQ, dKV or dX (first: overwrite)
    COPY = 8  # rowops a -> c, same tensor
    CLEAR = 9  # rowops c: the identity of accumulation (0; for O also LSE = -inf)
    PROJECT = 10  # rowops a=X, b=Q (or none), c=KV (or none): the layer's projection of the heads of b and c
    PROJECT_GRAD = 11  # rowops a=X, b=dQ (or none), c=dKV (or none), d=dX: pushed back, added into d
    FINISH = 12  # rowops c=O home rows: add sink logits, write the output


OP_NAMES = MappingProxyType({op: op.name.lower() for op in Op})

OP_LIST = MappingProxyType(
    {
        Op.LAUNCH: "transfers",
        Op.WAIT: None,
        Op.ATTEND: "tasks",
        Op.ATTEND_GRAD: "grads",
        Op.DELTA: "rowops",
        Op.MERGE: "rowops",
        Op.ADD: "rowops",
        Op.COPY: "rowops",
        Op.CLEAR: "rowops",
        Op.PROJECT: "rowops",
        Op.PROJECT_GRAD: "rowops",
        Op.FINISH: "rowops",
    }
)

# mode of a launch
P2P = 0  # only ranks with transfers in the round take part
ALL_TO_ALL = 1  # every rank of the plan launches the round, with or without transfers

# grads.first: which accumulators the task overwrites
FIRST_DQ = 1
FIRST_DKV = 2

#: table -> its columns, in encoding order. All values are integers.
TABLES = MappingProxyType(
    {
        # rows and head columns of each tensor's work arena; tensors without a row have none
        "arenas": ("tensor", "rows", "heads"),
        "operands": ("tensor", "space", "row", "rows", "col", "heads"),
        # round, channel and mode are 0 except in launch (all three) and wait (round)
        "instructions": ("op", "round", "channel", "mode", "count"),
        # send: 1 sends the operand to peer, 0 receives it. The k-th send i -> j of a round meets the k-th receive
        # of j from i.
        "transfers": ("send", "peer", "operand"),
        # i - j for query row i and key row j, counted from the operands' first rows, lies in [dmin, dmax];
        # clipped: dmin >= -(key rows - 1), dmax <= query rows - 1
        "tasks": ("q", "kv", "o", "dmin", "dmax", "first"),
        "grads": ("q", "kv", "do", "delta", "dq", "dkv", "dmin", "dmax", "first"),
        "rowops": ("a", "b", "c", "d", "first"),
    }
)

#: where each token of a layout lives on a rank: `length` rows from `row` hold the global tokens from `token`, all of
#: `sequence`, at positions counting up from `position`
SPAN_COLUMNS = ("row", "token", "length", "sequence", "position")

#: rows of a remap between two layouts: `rows` rows from `row` of the source layout go to `peer` (send = 1), or
#: arrive from `peer` at `row` of the target layout (send = 0); peer may be the rank itself
MOVE_COLUMNS = ("send", "peer", "row", "rows")

PHASES = ("forward", "backward")

FORMAT = "apportion.plan"
VERSION = (1, 1)
MAX_RANKS = 65_535

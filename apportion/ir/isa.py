"""The instruction set: all ops and the columns of every table, written out in full. Tensors are in `ir.tensors`.

An op is one row of `Op`, from which text format, verification, cost model and engines derive its properties.

A rank's memory is named, not addressed. Each tensor has *home* rows (what the caller passes in and gets back) and
a *work* arena whose rows the planner allocates. An operand is a range of rows of one of the two:

    operand = (tensor, space, row, rows, col, heads)

    tensor  its code; see `ir.tensors`
    space   home | work
    row     first row; `rows` the number of rows (> 0, except in operand 0, which means "none")
    col     first head column of a work arena that the operand's heads occupy, side by side (0 for home rows, whose
            column is the head number itself)
    heads   0: all heads of the tensor; i >= 1: `head_sets[i - 1]` of the plan header (query heads for X, Q, O, dQ,
            dO, delta; KV heads for KV, dKV). X and dX have no heads: always 0.

Operand 0 of every program is (NONE, HOME, 0, 0, 0, 0); the others are distinct. Codes and columns are part of the
format: codes are never renumbered, columns never reordered or retyped; new columns go last and have a default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, IntEnum, auto
from types import MappingProxyType
from typing import Any

from apportion.ir.tensors import PARTIALS, PHASES, Tensor

# grads.first: which accumulators the task overwrites
FIRST_DQ = 1
FIRST_DKV = 2


class Use(Enum):
    """Access of an op to the rows of an operand."""

    READ = auto()  # reads values, which remain
    TAKE = auto()  # consumes partials
    MOVE = auto()  # reads values, which remain, or consumes partials
    WRITE = auto()  # writes rows of the same tokens as the operand named by `like`
    ONCE = auto()  # like WRITE, but rows may be written only once
    ADD = auto()  # adds a partial of the same tokens as `like`, or stores it if the row's `first` flag is set
    CLEAR = auto()  # sets the identity of accumulation: 0, and for O also LSE = -inf
    FINISH = auto()  # turns a partial into a value in place
    TRAVEL = auto()  # sends (like MOVE) or receives, by the row's `send` flag

    @property
    def reads(self) -> bool:
        """True if the rows are an input, on the left of the arrow in text."""
        return self in (Use.READ, Use.TAKE, Use.MOVE)


@dataclass(frozen=True)
class Argument:
    """An operand of an op: its column in the op's list, and the tensors allowed there.

    like: the column of the operand with the same tokens row by row, hence as many rows, and the same heads unless that
    operand is headless. flag: for ADD, the bit of `first`. passes: how many times the operand's rows are
    read or written in memory, as (count if that bit is set, count if not); None: (1, 2) for ADD, else (1, 1).
    """

    column: str
    use: Use
    tensors: tuple[Tensor, ...]
    like: str | None = None
    optional: bool = False
    at_home: bool = False
    flag: int = 1
    passes: tuple[int, int] | None = None


@dataclass(frozen=True)
class Rule:
    """The properties of an op. list: the table whose rows it consumes. In `tasks` and `grads` the first two operands
    are query and key rows. kernels: kernel launches per instruction that has rows, except for packing and unpacking.
    products: multiplications by the weights of the layer's projection."""

    list: str | None
    arguments: tuple[Argument, ...] = ()
    phases: tuple[str, ...] = PHASES
    kernels: int = 1
    products: int = 0

    @property
    def columns(self) -> tuple[str, ...]:
        """All operand columns of the op's list."""
        return OPERAND_COLUMNS[self.list] if self.list else ()

    @property
    def is_attention(self) -> bool:
        return self.list in TASK_LIST.values()

    def argument(self, column: str) -> Argument | None:
        """The operand in a column, or None if the op has none there."""
        return next((argument for argument in self.arguments if argument.column == column), None)

    def source(self, argument: Argument) -> Argument | None:
        """The operand that is accumulated or copied into `argument`: same tensor, other rows; None if there is none."""
        like = self.argument(argument.like or "")
        return like if like and like.use in (Use.TAKE, Use.MOVE) and not argument.use.reads else None


#: list -> its operand columns
OPERAND_COLUMNS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "transfers": ("operand",),
        "tasks": ("q", "kv", "o"),
        "grads": ("q", "kv", "do", "delta", "dq", "dkv"),
        "rowops": ("a", "b", "c", "d"),
    }
)
#: phase -> the list of its attention tasks
TASK_LIST: Mapping[str, str] = MappingProxyType({"forward": "tasks", "backward": "grads"})

_T = Tensor
_ALL = tuple(Tensor)[1:]
_SUMS = (_T.DQ, _T.DKV, _T.DX)
_NO_LIST = Rule(None, kernels=0)


def _op(code: int, name: str, *arguments: Argument, **more: Any) -> tuple[int, Rule]:
    """An op's code and rule. name: the list whose rows it consumes."""
    return code, Rule(name, arguments, **more)


class Op(IntEnum):
    """Operations; each has a code and a rule. An instruction consumes `count` rows, in order, of its op's list."""

    rule: Rule

    # the rule is optional, so that `Op(code)` looks up an op
    def __new__(cls, code: int, rule: Rule = _NO_LIST) -> Op:
        op = int.__new__(cls, code)
        op._value_, op.rule = code, rule
        return op

    # start all sends and receives of `round` on `channel`
    LAUNCH = _op(1, "transfers", Argument("operand", Use.TRAVEL, _ALL), kernels=0)
    # complete this rank's sends and receives of `round`
    WAIT = 2, _NO_LIST
    # query rows x key rows under the band, merged into O rows by online softmax
    ATTEND = _op(
        3,
        "tasks",
        Argument("q", Use.READ, (_T.Q,)),
        Argument("kv", Use.READ, (_T.KV,)),
        Argument("o", Use.ADD, (_T.O,), like="q"),
        phases=("forward",),
    )
    # the gradients of a task: one kernel for dQ, one for dK and dV
    ATTEND_GRAD = _op(
        4,
        "grads",
        Argument("q", Use.READ, (_T.Q,)),
        Argument("kv", Use.READ, (_T.KV,)),
        Argument("do", Use.READ, (_T.DO,), like="q"),
        Argument("delta", Use.READ, (_T.DELTA,), like="q"),
        Argument("dq", Use.ADD, (_T.DQ,), like="q", flag=FIRST_DQ),
        Argument("dkv", Use.ADD, (_T.DKV,), like="kv", flag=FIRST_DKV),
        phases=("backward",),
        kernels=2,
    )
    # delta = rowsum(dO * O), LSE copied from O; once per row, because the sink gradients sum over the rows
    DELTA = _op(
        5,
        "rowops",
        Argument("a", Use.READ, (_T.DO,), at_home=True),
        Argument("b", Use.READ, (_T.O,), like="a", at_home=True),
        Argument("c", Use.ONCE, (_T.DELTA,), like="a", at_home=True),
        phases=("backward",),
    )
    # merge a partial by log-sum-exp
    MERGE = _op(
        6,
        "rowops",
        Argument("a", Use.TAKE, (_T.O,)),
        Argument("c", Use.ADD, (_T.O,), like="a"),
        phases=("forward",),
    )
    # add a partial gradient
    ADD = _op(
        7,
        "rowops",
        Argument("a", Use.TAKE, _SUMS),
        Argument("c", Use.ADD, _SUMS, like="a"),
        phases=("backward",),
    )
    COPY = _op(8, "rowops", Argument("a", Use.MOVE, _ALL), Argument("c", Use.WRITE, _ALL, like="a"))
    CLEAR = _op(9, "rowops", Argument("c", Use.CLEAR, PARTIALS))
    # the layer's projection of X for the heads of b and c; its results are new arrays, which are copied to b and c
    PROJECT = _op(
        10,
        "rowops",
        Argument("a", Use.READ, (_T.X,), passes=(0, 0)),
        Argument("b", Use.WRITE, (_T.Q,), like="a", optional=True, passes=(2, 2)),
        Argument("c", Use.WRITE, (_T.KV,), like="a", optional=True, passes=(2, 2)),
        products=1,
    )
    # push gradients back through the projection: recompute it, then two products with its weights
    PROJECT_GRAD = _op(
        11,
        "rowops",
        Argument("a", Use.READ, (_T.X,)),
        Argument("b", Use.TAKE, (_T.DQ,), like="a", optional=True, passes=(0, 0)),
        Argument("c", Use.TAKE, (_T.DKV,), like="a", optional=True, passes=(0, 0)),
        Argument("d", Use.ADD, (_T.DX,), like="a"),
        phases=("backward",),
        products=3,
    )
    # add sink logits, write the output
    FINISH = _op(12, "rowops", Argument("c", Use.FINISH, (_T.O,), at_home=True), phases=("forward",))
    # copy complete rows of a sum to home rows, as results: see RESULTS
    DELIVER = _op(
        13,
        "rowops",
        Argument("a", Use.TAKE, (_T.O, _T.DQ, _T.DKV)),
        Argument("c", Use.WRITE, (_T.O, _T.DQ, _T.DKV), like="a", at_home=True),
    )


#: op -> its rule
RULES: Mapping[int, Rule] = MappingProxyType({op: op.rule for op in Op})
#: phase -> column of its task list -> the operand that attention tasks accumulate there
ADDED: Mapping[str, Mapping[str, Argument]] = MappingProxyType(
    {
        phase: {
            a.column: a for op in Op if op.rule.list == name for a in op.rule.arguments if a.use is Use.ADD
        }
        for phase, name in TASK_LIST.items()
    }
)
#: ops whose rows are attention tasks
ATTENTION = tuple(op for op in Op if op.rule.is_attention)
OP_NAMES: Mapping[Op, str] = MappingProxyType({op: op.name.lower() for op in Op})

# launch modes, as bits
P2P = 0  # only ranks with transfers in the round take part
ALL_TO_ALL = 1  # every rank of the plan launches the round, with or without transfers
# All tiles are complete rows of sums: they travel in the model's dtype (LSE in the accumulators'), from work rows to
# home rows to which nothing else is added. If a home row receives results, it receives all of its heads as results,
# from such rounds or from `deliver`.
RESULTS = 2

#: table -> its columns, in encoding order. All values are integers.
TABLES = MappingProxyType(
    {
        # rows and head columns of each tensor's work arena; tensors without work rows are absent
        "arenas": ("tensor", "rows", "heads"),
        "operands": ("tensor", "space", "row", "rows", "col", "heads"),
        # round, channel and mode are 0 except in launch (all three) and wait (round)
        "instructions": ("op", "round", "channel", "mode", "count"),
        # send: 1 sends the operand to peer, 0 receives it. The k-th send i -> j of a round matches the k-th receive of
        # j from i.
        "transfers": ("send", "peer", "operand"),
        # i - j for query row i and key row j, counted from the operands' first rows, lies in [dmin, dmax];
        # clipped: dmin >= -(key rows - 1), dmax <= query rows - 1
        "tasks": ("q", "kv", "o", "dmin", "dmax", "first"),
        "grads": ("q", "kv", "do", "delta", "dq", "dkv", "dmin", "dmax", "first"),
        "rowops": ("a", "b", "c", "d", "first"),
    }
)

#: location of the tokens of a layout on a rank: `length` rows from `row` hold the global tokens from `token`, which
#: belong to sequence `sequence`, at positions counting up from `position`
SPAN_COLUMNS = ("row", "token", "length", "sequence", "position")

#: rows of a remap between two layouts: `rows` rows from `row` of the source layout go to `peer` (send = 1), or
#: arrive from `peer` at `row` of the target layout (send = 0); peer may be the rank itself
MOVE_COLUMNS = ("send", "peer", "row", "rows")

#: table of recurrent layers -> its columns, in encoding order: `ir.plan.tables.Recurrence`. A *run* is a maximal range
#: of consecutive tokens of one branch (`ir.masks.predecessors`) on consecutive home rows of a rank.
RECURRENCE_TABLES = MappingProxyType(
    {
        # sorted by row. position: tokens before the run; peer, past: rank and number of the previous run (0, -1:
        # none); leads: 1 if this run is the past of another
        "runs": ("row", "rows", "sequence", "position", "peer", "past", "leads"),
        # slots: `heads` heads, from `head`, of run `run` of rank `peer` are folded here; parent: the slot of that
        # run's past, an earlier one (-1: none). Kinds are numbered in the order of the header
        "folds": ("kind", "head", "heads", "peer", "run", "parent"),
        # destinations of the heads of this rank's runs: the k-th row of a kind from i to j matches the k-th slot of
        # that kind on j whose run is on i
        "states": ("kind", "head", "heads", "peer", "run"),
        # rows before each run, which convolutions read: moves like those of a remap, from home rows to halo rows. Each
        # run has as many of them as the widest convolution reads, ending with the token just before the run
        "halo": MOVE_COLUMNS,
    }
)

FORMAT = "apportion.plan"
VERSION = (3, 0)
MAX_RANKS = 65_535
#: every number of a table is at most this in absolute value: sums of 2**14 of them still fit an int64
LIMIT = 2**48

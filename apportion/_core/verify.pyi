from enum import Enum
from typing import Any

from apportion.ir.arrays import Ints

NOWHERE: int

class Code(Enum):
    """What is wrong; NO_FORM: an operand does not fit its op, or sends and receives do not match."""

    NO_FORM = 0
    READ_UNWRITTEN = 1
    READ_IN_FLIGHT = 2
    READ_PARTIAL = 3
    READ_OTHER_HEADS = 4
    WRITE_SENDING = 5
    WRITE_IN_FLIGHT = 6
    WRITE_GIVEN = 7
    ADD_TO_UNWRITTEN = 8
    NOT_SAME_TOKENS = 9
    PARTIAL_SPENT = 10
    PARTIAL_LOST = 11
    PARTIAL_MIXED = 12
    PARTIAL_LEFT = 13
    PARTIAL_FROM_HOME = 14
    WRONG_HOME = 15
    WRITTEN_TWICE = 16
    NOT_FINISHED = 17
    NOT_PRODUCED = 18
    NO_RESULT = 19
    RESULT_TOUCHED = 20
    RESULT_HEADS = 21
    OTHER_KEYS = 22

class Verdict(Enum):
    """ZEROS: something was added to rows that another rank sent as zeros, so all ranks must be walked together."""

    WRONG = 0
    RIGHT = 1
    ZEROS = 2
    TOO_MANY = 3

class Lists:
    """What tasks attend to, by address: a list of bands for each head set, equal ones once."""

    def __init__(self, sets: int, /) -> None: ...
    @property
    def count(self) -> int: ...
    def begin(self, tasks: int, /) -> None: ...

class Fault:
    """The first thing that is wrong on a rank.

    instruction: over all ranks, -1 for the end of the program; item: the row of its list, over all ranks. low, high:
    rows of a tensor's space; holds, wanted: their actual and required contents: addresses of tokens or NOWHERE, or
    numbers of head sets, or bits of heads.
    """

    @property
    def code(self) -> Code: ...
    @property
    def rank(self) -> int: ...
    @property
    def instruction(self) -> int: ...
    @property
    def item(self) -> int: ...
    @property
    def tensor(self) -> int: ...
    @property
    def space(self) -> int: ...
    @property
    def low(self) -> int: ...
    @property
    def high(self) -> int: ...
    @property
    def holds(self) -> int: ...
    @property
    def wanted(self) -> int: ...

class Trace:
    """faults: of each rank at most one. is_complete: whether the tokens of all tasks are known."""

    @property
    def faults(self) -> list[Fault]: ...
    @property
    def is_complete(self) -> bool: ...

def following(lists: Lists, /) -> Ints: ...
def end(lists: Lists, starts: Ints, tokens: Ints, most: int, /) -> Ints | None: ...
def judge(
    program: tuple[Any, ...], lists: Lists, together: bool, limits: tuple[int, int, int], /
) -> tuple[Verdict, int]: ...
def trace(program: tuple[Any, ...], pieces: int, /) -> Trace | None: ...
def cut(trace: Trace, starts: Ints, tokens: Ints, most: int, /) -> Ints | None: ...
def measure(bands: Ints, mask: Ints, steps: int, /) -> tuple[Ints, Ints] | None: ...
def sweep(bands: Ints, order: Ints, steps: int, most: int, /) -> Ints | None: ...

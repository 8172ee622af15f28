from typing import Any

from apportion.ir.arrays import Bools, Ints

def incidence(ptr: Ints, pins: Ints, vertices: int, /) -> tuple[Ints, Ints]: ...
def components(ptr: Ints, pins: Ints, base: Ints, /) -> Ints: ...
def spans(ptr: Ints, pins: Ints, part: Ints, parts: int, /) -> Ints: ...
def spread(
    graph: tuple[Any, ...],
    part: Ints,
    base: Ints,
    movable: Bools,
    flops: Ints,
    cap: Ints,
    span: int,
    thorough: bool,
    /,
) -> Ints: ...
def polish(
    graph: tuple[Any, ...], part: Ints, base: Ints, movable: Bools, flops: Ints, cap: Ints, span: int, /
) -> Ints: ...
def refine_together(
    graph: tuple[Any, ...],
    part: Ints,
    movable: Bools,
    flops: Ints,
    tokens: Ints,
    flops_cap: Ints,
    tokens_cap: Ints,
    node_flops_cap: Ints,
    node_tokens_cap: Ints,
    per_node: int,
    far: int,
    /,
) -> Ints: ...
def clusters(
    ptr: Ints, pins: Ints, price: Ints, flops: Ints, of: Ints, count: int, /
) -> tuple[Ints, Ints, Ints, Ints]: ...
def place(
    graph: tuple[Any, ...],
    part: Ints,
    base: Ints,
    flops: Ints,
    tokens: Ints,
    flops_cap: Ints,
    tokens_cap: Ints,
    span: int,
    rate: float,
    /,
) -> Ints: ...

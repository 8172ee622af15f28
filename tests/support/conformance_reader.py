"""This package as a reader of the conformance suite: conformance_reader.py read|check|run|verify PATH [OUTPUTS]"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from apportion import DecodeError, Plan, Slice
from apportion.backends import numpy as executor
from apportion.backends.numpy import LocalLayer
from apportion.ir.bytes import codec
from apportion.ir.verify import check
from tests.support import recurrent_executor
from tests.support.conformance_suite import tables_of
from tests.support.moves import remap
from tests.support.projection import Weights

Array = np.ndarray


class _Inputs:
    """The input numbers of a case, read one array after another."""

    def __init__(self, path: Path) -> None:
        self._numbers, self._at = np.fromfile(path, "<f8"), 0

    def take(self, *shape: int) -> Array:
        begin, self._at = self._at, self._at + int(np.prod(shape))
        return self._numbers[begin : self._at].reshape(shape)


def run(folder: Path) -> bytes:
    """The numpy executor's outputs for a case, as bytes."""
    plan, inputs = Plan.decode((folder / "case.plan").read_bytes()), _Inputs(folder / "inputs.f64")
    head, hidden = plan.header, int(inputs.take(1)[0])
    shapes = ((head.q_heads, head.head_dim), (head.kv_heads, head.head_dim), (head.kv_heads, head.v_head_dim))
    weights = Weights(*(inputs.take(heads, hidden, width) for heads, width in shapes)) if hidden else None
    found: list[Array] = []
    for kind in head.kinds:
        found += _run_kind(plan, kind, inputs, weights)
    for name in head.recurrent:
        found += _run_recurrent(plan, name, inputs)
    for number, move in enumerate(plan.moves):
        source = plan.layout(move.source)
        found += remap(plan, number, [source.tokens(rank) for rank in range(head.ranks)])
    return b"".join(np.ascontiguousarray(array, "<f8").tobytes() for array in found)


def _run_kind(plan: Plan, kind: str, inputs: _Inputs, weights: Weights | None) -> list[Array]:
    head, home = plan.header, plan.layout(plan.header.home_layout)
    q, k = (head.q_heads, head.head_dim), (head.kv_heads, head.head_dim)
    v, do = (head.kv_heads, head.v_head_dim), (head.q_heads, head.v_head_dim)
    scale, softcap = inputs.take(2).tolist()
    sinks = inputs.take(head.q_heads)
    shapes = (q, k, v, do) if weights is None else ((weights.q.shape[1],), do)
    parts = [[inputs.take(int(rows), *shape) for shape in shapes] for rows in home.rows_per_rank]
    *given, do_all = (executor.gather(home, part) for part in zip(*parts, strict=True))
    layer = LocalLayer(None if np.isinf(sinks).all() else sinks, scale, softcap or None, weights)
    o, lse, saved = executor.forward(plan, kind, given, layer)
    *grads, dsinks = executor.backward(plan, kind, saved, do_all)
    found = [np.zeros(head.q_heads) if dsinks is None else dsinks]
    for rank in range(head.ranks):
        found += [array[home.tokens(rank)] for array in (o, lse, *grads)]
    return found


def _run_recurrent(plan: Plan, name: str, inputs: _Inputs) -> list[Array]:
    kind, home = plan.header.recurrent[name], plan.layout(plan.header.home_layout)
    weight = inputs.take(kind.conv_channels, kind.conv) if kind.halo else None
    decay = (kind.heads, kind.key_dim) if kind.gate == "diagonal" else (kind.heads,)
    shapes = [(kind.conv_channels,), decay, *([(kind.heads,)] if kind.delta else [])]
    shapes.append((kind.heads, kind.value_dim))
    parts = [[inputs.take(int(rows), *shape) for shape in shapes] for rows in home.rows_per_rank]
    x, decays, *beta, do = (executor.gather(home, part) for part in zip(*parts, strict=True))
    given = recurrent_executor.Inputs(x, decays, beta[0] if beta else None, weight)
    *rows, dweight = recurrent_executor.run(plan, name, given, do)
    found = [] if dweight is None else [dweight]
    for rank in range(plan.header.ranks):
        found += [array[home.tokens(rank)] for array in rows if array is not None]
    return found


def opened(data: bytes, check_id: bool = True) -> Plan | Slice:
    """Decodes a plan or a slice. Raises DecodeError."""
    return Slice.decode(data) if b"apportion.slice" in data[:32] else codec.decode(data, check_id)


def main(verb: str, path: str, outputs: str = "") -> int:
    """Runs a command; returns the exit code."""
    if verb == "run":
        Path(outputs).write_bytes(run(Path(path)))
        return 0
    try:
        plan = opened(Path(path).read_bytes(), check_id=verb != "verify")
    except DecodeError as error:
        print(error, file=sys.stderr)
        return 1
    if verb == "read":
        print(json.dumps(tables_of(plan)))
    violations = check(plan) if verb == "verify" else ()
    for violation in violations[:1]:
        print(violation.rule)
    return int(bool(violations))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""Rule 9: the report matches the programs. Figures that only planning knows are not checked: the names of exchanges,
their slots and rounds, blocks, bounds, and the reason why planning stopped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import msgspec
import numpy as np

from apportion.ir.arrays import Floats
from apportion.ir.plan import totals
from apportion.ir.tensors import PHASES
from apportion.ir.verify.report import Violation
from apportion.ir.verify.subject import Subject

RULE = "report"

_Natural = Annotated[int, msgspec.Meta(ge=0)]
_Number = Annotated[float, msgspec.Meta(ge=0)]


class _Bytes(msgspec.Struct):
    total: _Natural
    max_rank: _Natural
    inter_node: _Natural


class _ReportedExchange(msgspec.Struct):
    kind: str
    phase: str
    name: str
    slots: _Natural
    max_degree: _Natural
    rounds: _Natural
    bytes: _Natural


class _Bound(msgspec.Struct):
    bound: _Number | None
    value: _Number | None
    gap: _Number | None


class _Sizes(msgspec.Struct):
    largest_rank: _Natural
    total: _Natural


class _Imbalance(msgspec.Struct):
    compute: float
    tokens: float


class _Termination(msgspec.Struct):
    bound: _Number | None = None
    value: _Number | None = None


class _Report(msgspec.Struct):
    """Schema of the checked fields of a report; unknown fields are ignored."""

    recipe: str = ""
    ranks: _Natural = 0
    tokens: _Natural = 0
    slots: _Natural = 0
    max_degree: _Natural = 0
    rounds: _Natural = 0
    imbalance_bound: _Number = 0.0
    area: dict[str, _Natural] = {}
    bytes: _Bytes | None = None
    imbalance: _Imbalance | None = None
    plan_bytes: _Sizes | None = None
    exchanges: list[_ReportedExchange] = []
    bounds: dict[str, _Bound] = {}
    termination: _Termination | None = None


_ROUNDING = 1e-9  # relative error of floating-point sums
_GAP_ERROR = 1e-6  # relative error of gaps

#: a place in the report, and the value required there
Fact = tuple[tuple[str, ...], Any]


def check(subject: Subject) -> Iterator[Violation]:
    """Violations of the rule `report`, for the fields present."""
    report = subject.plan.report
    try:
        msgspec.convert(dict(report), _Report)
    except msgspec.ValidationError as error:
        yield Violation(RULE, None, None, None, None, f"the report is malformed: {str(error)[:200]}")
        return
    for path, actual in (*_request(subject), *_bytes(subject), *_balance(subject), *_sums(report)):
        value = _value_at(report, path)
        if value is not None and not _agrees(value, actual):
            message = f"the report has {'.'.join(path)} = {str(value)[:80]}, but the plan has {actual}"
            yield Violation(RULE, None, None, None, None, message)
    yield from _check_exchange_bytes(subject)
    yield from _check_bounds(report)


def _value_at(report: Any, path: tuple[str, ...]) -> Any:
    """The value at a place, or None."""
    for name in path:
        report = report.get(name) if isinstance(report, Mapping) else None
    return report


def _agrees(value: Any, actual: Any) -> bool:
    if isinstance(actual, float):
        is_close = isinstance(value, int | float) and abs(value - actual) <= _ROUNDING * max(1.0, abs(actual))
        return is_close and not isinstance(value, bool)
    return type(value) is type(actual) and bool(value == actual)


def _request(subject: Subject) -> Iterator[Fact]:
    plan = subject.plan
    batch = plan.request.batch
    yield ("recipe",), plan.header.recipe
    yield ("ranks",), plan.header.ranks
    yield ("tokens",), batch.tokens
    for kind in batch.kinds:
        yield ("area", kind), int(batch.area(kind))
    if plan.sections is not None:
        sizes = [len(part) for part in plan.sections.parts]
        yield ("plan_bytes", "largest_rank"), max(sizes)
        yield ("plan_bytes", "total"), sum(sizes)


def _bytes(subject: Subject) -> Iterator[Fact]:
    """Rounds, total bytes, and bytes of attention tiles."""
    yield ("rounds",), totals.rounds(subject.plan.programs)
    for name, number in totals.sum_volumes(subject.volumes.values()).summary().items():
        yield ("bytes", name), number
    exchanges = _exchanges(subject.plan.report)
    if "exchanges" in subject.plan.report:
        tiles = sum(item["bytes"] for item in exchanges if item["name"] in ("fetch", "return"))
        yield ("bounds", "kv_bytes", "value"), float(tiles)


def _check_exchange_bytes(subject: Subject) -> Iterator[Violation]:
    """Checks that the exchanges of a program move all its bytes."""
    sizes: Counter[tuple[str, str]] = Counter()
    for item in _exchanges(subject.plan.report):
        sizes[item["kind"], item["phase"]] += item["bytes"]
    moved_bytes = {key: int(volume.sent.sum()) for key, volume in subject.volumes.items()}
    for key in sorted(sizes.keys() | moved_bytes.keys()) if "exchanges" in subject.plan.report else ():
        actual = moved_bytes.get(key, 0)
        if sizes[key] != actual:
            message = (
                f"according to the report, its exchanges move {sizes[key]} bytes; the program moves {actual}"
            )
            yield Violation(RULE, None, *key, None, message)


def _exchanges(report: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    exchanges: list[Mapping[str, Any]] = report.get("exchanges", [])
    return exchanges


def _balance(subject: Subject) -> Iterator[Fact]:
    """Imbalance of tokens in the attention layout, and of compute in the less even phase, both relative to speed."""
    plan = subject.plan
    request = plan.request
    rows = subject.attention.rows_per_rank
    yield ("imbalance", "tokens"), request.batch.largest_excess(rows, subject.token_shares)
    speeds = np.asarray(request.cluster.speeds or np.ones(plan.header.ranks), np.float64)
    loads = [totals.loads(plan, phase) for phase in PHASES]
    time: Floats = max((load / speeds for load in loads), key=lambda times: float(times.max()))
    mean = float((time * speeds).sum()) / float(speeds.sum())
    yield ("imbalance", "compute"), float(time.max()) / mean - 1 if mean else 0.0
    yield ("bounds", "makespan", "value"), float(time.max())


def _sums(report: Mapping[str, Any]) -> Iterator[Fact]:
    """Totals over all exchanges."""
    exchanges = _exchanges(report)
    if "exchanges" in report:
        for name in ("slots", "max_degree"):
            yield (name,), sum(item[name] for item in exchanges)
        yield ("bounds", "slots", "value"), float(sum(item["slots"] for item in exchanges))
        yield ("bounds", "slots", "bound"), float(sum(item["max_degree"] for item in exchanges))


def _check_bounds(report: Mapping[str, Any]) -> Iterator[Violation]:
    """Checks that no value is below its bound, that gaps match, and that planning ended at the makespan."""
    for name, bound in report.get("bounds", {}).items():
        limit, value, gap = bound["bound"], bound["value"], bound["gap"]
        if limit is None or value is None:
            continue
        if value < limit * (1 - _ROUNDING):
            message = f"the report has {name} = {value}, below its own bound {limit}"
            yield Violation(RULE, None, None, None, None, message)
        elif gap is not None and (not limit or abs(gap - value / limit) > _GAP_ERROR * gap):
            message = f"according to the report, the gap of {name} is {gap}, for {value} and bound {limit}"
            yield Violation(RULE, None, None, None, None, message)
    ended = _value_at(report, ("termination", "value"))
    makespan = _value_at(report, ("bounds", "makespan", "value"))
    if ended is not None and makespan is not None and not _agrees(ended, float(makespan)):
        message = f"according to the report, planning ended at {ended}; the makespan is {makespan}"
        yield Violation(RULE, None, None, None, None, message)

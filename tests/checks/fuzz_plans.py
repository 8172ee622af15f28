"""Feeds mutated plans to the decoder and the verifier, which may raise only typed errors.

    python -m tests.checks.fuzz_plans --count 100000 --json

Every iteration starts from a golden plan, a small plan of one of several recipes, or a plan from the command line. It
either damages the plan's bytes or changes their meaning: a number, a table or one of its rows, a program, a mask, a
value, a type, a key. Changed plans get the id of their new bytes, so that they reach later checks; plans that decode go
to the verifier. Exit status 1 if anything but an ApportionError is raised or an iteration takes longer than
`--limit-ms`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.progress import track

from apportion import ApportionError, Batch, Cluster, DecodeError, Model, Plan, Recurrent, masks
from apportion.ir.bytes import codec, table_bytes
from apportion.ir.bytes.sections import Sections, sections_id
from apportion.ir.isa import LIMIT, SPAN_COLUMNS, TABLES
from apportion.ir.plan import plain
from apportion.ir.plan.tables import Layout, Move, ProgramSet, Table, empty_table, join_tables
from apportion.ir.verify import check
from apportion.planner import api
from tests.checks.fuzz_judge import repaired

GOLDEN = Path(__file__).resolve().parents[2] / "apportion/schemas/golden"

_encode = msgspec.msgpack.Encoder(order="deterministic").encode
_decode = msgspec.msgpack.Decoder().decode

NUMBERS = (
    *(0, 1, 2, 3, 7, 8, 255, 256, 65535),
    *(2**31 - 1, 2**31, 2**40, 2**48 + 1, 2**63 - 1, 2**64 - 1, -1, -(2**63)),
)
VALUES: tuple[Any, ...] = (
    *(None, True, 1.5, float("nan"), float("inf")),
    *("", "x" * 300, b"", b"\xff", [], {}, [[[]]]),
)

MASKS = (
    *(masks.causal(), masks.full(), masks.bands([]), masks.bands([[0, 1, 0, 1, 0, 0]]), masks.prefix_lm(5)),
    *(masks.sliding_window(3), masks.sliding_window(1, 5), masks.chunked(7), masks.block_causal(4, 2)),
)


@dataclass
class Result:
    """Counts of results. outcomes: by class of error; `clean` or `violations` for plans that decoded."""

    count: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    rules: Counter[str] = field(default_factory=Counter)  # by the first broken rule
    slowest_ms: float = 0.0
    escaped: Counter[str] = field(default_factory=Counter)  # untyped exceptions, with their places

    def to_data(self) -> dict[str, Any]:
        return {
            "count": self.count,
            "outcomes": dict(sorted(self.outcomes.items())),
            "first_rules": dict(sorted(self.rules.items())),
            "slowest_ms": round(self.slowest_ms, 2),
            "escaped": dict(self.escaped.most_common(20)),
        }


# ---------------------------------------------------------------------------------------------- mutations


def flip_bits(rng: random.Random, data: bytes, other: bytes) -> bytes:
    edited = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        edited[rng.randrange(len(edited))] ^= 1 << rng.randrange(8)
    return bytes(edited)


def truncate(rng: random.Random, data: bytes, other: bytes) -> bytes:
    return data[: rng.randrange(len(data))]


def splice(rng: random.Random, data: bytes, other: bytes) -> bytes:
    return data[: rng.randrange(len(data))] + other[rng.randrange(len(other)) :]


def overwrite(rng: random.Random, data: bytes, other: bytes) -> bytes:
    at = rng.randrange(len(data))
    noise = rng.randbytes(rng.choice((1, 2, 4, 9)))
    return data[:at] + noise + data[at + rng.choice((0, len(noise))) :]


RAW = (flip_bits, truncate, splice, overwrite)


def change_value(rng: random.Random, value: Any) -> Any:
    """Returns a replacement for a value."""
    if isinstance(value, bool) or value is None:
        return rng.choice((*NUMBERS, *VALUES))
    if isinstance(value, int):
        close = value + rng.choice((-2, -1, 1, 2))
        return rng.choice((close, close, close, rng.choice(NUMBERS), rng.choice(VALUES)))
    if isinstance(value, bytes) and value and rng.random() < 0.7:
        return rng.choice(RAW)(rng, value, value)
    if isinstance(value, str) and rng.random() < 0.5:
        return rng.choice(("default", "attention", "linear", "forward", "causal", value[:-1], value + "x"))
    return rng.choice((*NUMBERS, *VALUES))


def change_inside(rng: random.Random, value: Any) -> Any:
    """Makes one change within `value`: drops, adds, moves, renames or changes a key or an item."""
    if isinstance(value, dict) and value:
        return _change_map(rng, dict(value))
    if isinstance(value, list) and value:
        return _change_list(rng, list(value))
    return change_value(rng, value)


def _change_map(rng: random.Random, value: dict[Any, Any]) -> Any:
    key = rng.choice(list(value))
    chance = rng.random()
    if chance < 0.08:
        del value[key]
    elif chance < 0.16:
        value[rng.choice(("more", "rank", "backward", "tasks", ""))] = value[key]
    elif chance < 0.2:
        value[key] = change_value(rng, value[key])
    else:
        value[key] = change_inside(rng, value[key])
    return value


def _change_list(rng: random.Random, value: list[Any]) -> Any:
    at, chance = rng.randrange(len(value)), rng.random()
    if chance < 0.08:
        del value[at]
    elif chance < 0.16:
        value.insert(rng.randrange(len(value) + 1), value[at])
    elif chance < 0.2:
        rng.shuffle(value)
    else:
        value[at] = change_inside(rng, value[at])
    return value


def change_numbers(rng: random.Random, sections: Sections) -> Sections:
    """Changes a few numbers of one table, which only the later checks detect."""
    plan = codec.decode(codec.encode_wire(sections), check_id=False)
    table = _some_table(rng, plan)
    for _ in range(rng.choice((1, 1, 1, 2, 4)) if len(table) else 0):
        column = table[rng.choice(table.names)]
        at = rng.randrange(len(column))
        close = int(column[at]) + rng.choice((-8, -2, -1, 1, 2, 8))
        column[at] = rng.choice((close, close, int(rng.choice(column.tolist())), rng.randrange(16), LIMIT))
    return _with_tables(sections, plan)


def change_rows(rng: random.Random, sections: Sections) -> Sections:
    """Drops, repeats or swaps rows of one rank in one table."""
    plan = codec.decode(codec.encode_wire(sections), check_id=False)
    table = _some_table(rng, plan)
    ranks = np.flatnonzero(np.diff(table.ptr))
    if len(ranks):
        rank = int(rng.choice(ranks.tolist()))
        begin, end = int(table.ptr[rank]), int(table.ptr[rank + 1])
        order = list(range(len(table)))
        a, b = rng.randrange(begin, end), rng.randrange(begin, end)
        rng.choice((lambda: order.pop(a), lambda: order.insert(b, a), lambda: _swap(order, a, b)))()
        table.ptr[rank + 1 :] += len(order) - len(table)
        object.__setattr__(table, "values", table.values[:, order].copy())
    return _with_tables(sections, plan)


def change_programs(rng: random.Random, sections: Sections) -> Sections:
    """Swaps two programs, or replaces all or one of a program's tables by another program's or by empty ones, for all
    ranks or one."""
    plan = codec.decode(codec.encode_wire(sections), check_id=False)
    programs = {key: dict(program.tables) for key, program in plan.programs.items()}
    to, source = rng.choice(list(programs)), rng.choice(list(programs))
    names = rng.choice((list(TABLES), list(TABLES), [rng.choice(list(TABLES))]))
    empty = {name: empty_table(TABLES[name], plan.header.ranks) for name in names}
    new = {name: rng.choice((programs[source][name], empty[name])) for name in names}
    chance = rng.random()
    if chance < 0.3:
        programs[to], programs[source] = programs[source], programs[to]
    elif chance < 0.6:
        programs[to] |= new
    else:
        rank, other = rng.randrange(plan.header.ranks), rng.randrange(plan.header.ranks)
        programs[to] |= {name: _with_rank(programs[to][name], rank, new[name], other) for name in names}
    edited = {key: ProgramSet(tables) for key, tables in programs.items()}
    return _with_tables(sections, repaired(replace(plan, programs=edited)))


def _with_rank(table: Table, rank: int, source: Table, other: int) -> Table:
    """The table with the rows of `rank` replaced by `source`'s rows of `other`."""
    ranks = range(table.ranks)
    return join_tables([source.rank(other) if one == rank else table.rank(one) for one in ranks])


def change_layouts(rng: random.Random, sections: Sections) -> Sections:
    """Swaps two layouts; often also replaces one rank's rows of a layout by another rank's, or drops them."""
    plan = codec.decode(codec.encode_wire(sections), check_id=False)
    layouts = dict(plan.layouts)
    a, b = rng.choice(list(layouts)), rng.choice(list(layouts))
    layouts[a], layouts[b] = replace(layouts[b], name=a), replace(layouts[a], name=b)
    if rng.random() < 0.7:
        rank, other = rng.randrange(plan.header.ranks), rng.randrange(plan.header.ranks)
        spans = rng.choice((layouts[b].spans, empty_table(SPAN_COLUMNS, plan.header.ranks)))
        layouts[a] = replace(layouts[a], spans=_with_rank(layouts[a].spans, rank, spans, other))
    return _with_tables(sections, replace(plan, layouts=layouts))


def change_request(rng: random.Random, sections: Sections) -> Sections:
    """Changes a kind's mask, the lengths, speeds, policy, heads or widths, and the header to match."""
    plan = codec.decode(codec.encode_wire(sections), check_id=False)
    request, header = plan.request, plan.header
    chance = rng.random()
    if chance < 0.4:
        specs = {kind: mask.specs[0] for kind, mask in request.batch.masks.items()}
        specs[rng.choice(list(specs))] = rng.choice(MASKS)
        request = replace(request, batch=Batch.from_lengths(request.batch.lengths, specs))
    elif chance < 0.6:
        tokens = request.batch.tokens
        first = rng.randrange(1, max(tokens, 2))
        lengths = [one for one in rng.choice(((first, tokens - first), (tokens,), (first,))) if one > 0]
        request = replace(request, batch=Batch.from_lengths(lengths, dict.fromkeys(header.kinds, MASKS[0])))
    elif chance < 0.7:
        speeds = tuple(rng.choice((1e-3, 1.0, 1.0, 2.0)) for _ in range(header.ranks))
        request = replace(request, cluster=replace(request.cluster, speeds=speeds))
    elif chance < 0.85:
        limits = ("token_cap", 1), ("tolerance", 0.0), ("memory_cap_gib", 1e-9), ("seed", 7)
        field, value = rng.choice(limits)
        request = replace(request, policy=replace(request.policy, **{field: value}))
    else:
        field = rng.choice(("q_heads", "kv_heads", "head_dim", "v_head_dim"))
        model = replace(request.model, **{field: rng.choice((1, 2, 3, 8, 64, 4096))})
        request = replace(request, model=model)
    facts = {name: getattr(request.model, name) for name in plain.MODEL_FACTS}
    header = replace(header, **facts, diagonals=plain.diagonals_of(request.batch, header.kinds))
    edited = codec.encode_sections(replace(plan, request=request, header=header), list(sections.parts))
    tokens = request.batch.tokens
    return edited if tokens == plan.request.batch.tokens else replace(edited, layouts=sections.layouts)


def _some_table(rng: random.Random, plan: Plan) -> Table:
    tables = [layout.spans for layout in plan.layouts.values()] + [move.table for move in plan.moves]
    tables += [] if plan.recurrence is None else list(plan.recurrence.tables.values()) * 8
    found = rng.choice(tables + [table for p in plan.programs.values() for table in p.tables.values()])
    object.__setattr__(found, "values", found.values.astype(np.int64))
    return found


def _with_tables(sections: Sections, plan: Plan) -> Sections:
    tables = table_bytes.tables_of(plan.layouts, plan.programs, plan.moves, plan.recurrence)
    parts = table_bytes.encode_parts(tables, plan.header.ranks)
    return replace(sections, parts=list(parts))


def _swap(order: list[int], a: int, b: int) -> None:
    order[a], order[b] = order[b], order[a]


def change_part(rng: random.Random, sections: Sections) -> Sections:
    """Changes, drops or inserts a byte of a part."""
    rank = rng.randrange(len(sections.parts))
    parts = list(sections.parts)
    part, byte = parts[rank], bytes([rng.choice((0, 1, 2, 3, 4, 8, 127, 128, 255, rng.randrange(256)))])
    at = rng.randrange(len(part) + 1)
    parts[rank] = part[:at] + rng.choice((byte, b"", byte + part[at : at + 1])) + part[at + 1 :]
    return replace(sections, parts=parts)


CHANGES = (
    *(change_numbers, change_numbers, change_numbers, change_rows, change_programs, change_programs),
    *(change_layouts, change_request),
)


def change_tables(rng: random.Random, sections: Sections) -> Sections:
    """Changes tables; returns sections unchanged if an earlier mutation broke them."""
    try:
        return rng.choice(CHANGES)(rng, sections)
    except ApportionError:
        return sections


def _edited(data: bytes, change: Callable[[Any], bytes]) -> bytes:
    """Applies a change to `data`; returns it unchanged if an earlier mutation broke it or msgpack cannot encode the new
    value."""
    try:
        return change(_decode(data))
    except Exception:
        return data


def change_section(rng: random.Random, sections: Sections) -> Sections:
    name = rng.choice(("header", "header", "request", "request", "request", "layouts", "moves", "report"))
    data = getattr(sections, name)
    if data and rng.random() < 0.1:
        edited: Any = rng.choice(RAW)(rng, data, data)
    else:
        edited = _edited(data, lambda value: _encode(change_inside(rng, value)))
    return replace(sections, **{name: edited})


def change_parts(rng: random.Random, sections: Sections) -> Sections:
    parts = _change_list(rng, [*sections.parts])
    return replace(sections, parts=[part if isinstance(part, bytes) else b"" for part in parts])


def mutate(rng: random.Random, plans: Sequence[Plan]) -> bytes:
    """Mutates one of the plans; returns its bytes."""
    plan = rng.choice(plans)
    if rng.random() < 0.15:
        return rng.choice(RAW)(rng, plan.encode(), rng.choice(plans).encode())
    sections: Sections = plan.sections
    for _ in range(rng.choice((1, 1, 1, 2))):
        if not sections.parts:
            break
        change = rng.choice((*[change_tables] * 3, change_part, change_section, change_parts))
        sections = change(rng, sections)
    sections = replace(sections, id=b"")
    sections = replace(sections, id=sections_id(sections) if sections.parts else b"")
    return codec.encode_wire(sections, plan.header.version)


# ---------------------------------------------------------------------------------------------- running


def try_plan(data: bytes, result: Result, verify: Callable[[Plan], Sequence[Any]] = check) -> None:
    """Decodes and verifies a plan and counts the result."""
    result.count += 1
    begin = time.perf_counter()
    try:
        violations = verify(codec.decode(data))
        result.outcomes["violations" if violations else "clean"] += 1
        result.rules.update(violation.rule for violation in violations[:1])
    except ApportionError as error:
        result.outcomes[type(error).__name__] += 1
        if not isinstance(error, DecodeError):
            result.rules[type(error).__name__] += 1
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        result.outcomes["escaped"] += 1
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(frame.filename).name}:{frame.lineno}"
        result.escaped[f"{type(error).__name__} at {place}: {error}"[:160]] += 1
    result.slowest_ms = max(result.slowest_ms, (time.perf_counter() - begin) * 1e3)


def golden_plans() -> list[Plan]:
    """The plans that ship with the format."""
    return [Plan.decode(path.read_bytes()) for path in sorted(GOLDEN.glob("*.plan"))]


RECURRENT: tuple[dict[str, Recurrent], ...] = ({}, {"d": Recurrent(2, 4, 4, conv=3), "e": Recurrent(1, 2, 2)})
KINDS = {"a": masks.causal(), "b": masks.bands([]), "c": masks.sliding_window(9)}


RECIPES = ("ring", "usp", "upipe", "fcp", "distca", "dcp", "zeppelin", "flexsp")


def planned(recipes: Sequence[str] = RECIPES) -> Iterator[Plan]:
    """Yields small plans of several recipes, which include kinds without pairs, ranks without tokens, split heads,
    projections, and moves to a second layout."""
    for name in recipes:
        for lengths in ([3], [40, 24, 9]):
            for kinds in (KINDS, {"a": KINDS["a"]}):
                recurrent = RECURRENT[name == "usp" and kinds is not KINDS]
                model = Model(4, 4, 8, hidden=32, layers=1, recurrent=recurrent)
                try:
                    yield api.plan(Batch.from_lengths(lengths, kinds), Cluster(2, 2), model, name)
                except ApportionError:
                    continue


def one_rank(plans: Sequence[Plan]) -> list[Plan]:
    """The plans reduced to their first rank: a single change is enough to change facts that all ranks share."""
    found = []
    for plan in plans:
        layouts = {name: Layout(name, layout.spans.rank(0)) for name, layout in plan.layouts.items()}
        programs = {key: program.rank(0) for key, program in plan.programs.items()}
        moves = tuple(Move(move.source, move.target, move.table.rank(0)) for move in plan.moves)
        request = replace(plan.request, cluster=Cluster(1, 1))
        header = replace(plan.header, ranks=1)
        recurrence = plan.recurrence and plan.recurrence.rank(0)
        found.append(codec.seal(Plan(header, request, layouts, programs, moves, plan.report, recurrence)))
    return found


def fuzz(plans: Sequence[Plan], count: int, seed: int, show: bool = False) -> Result:
    """Tries `count` mutated plans."""
    rng, result = random.Random(seed), Result()
    console = Console(stderr=True)
    for _ in track(range(count), "mutated plans", console=console, disable=not show):
        try_plan(mutate(rng, plans), result)
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("plans", nargs="*", type=Path, help="plans to mutate (default: golden, small)")
    parser.add_argument("--count", type=int, default=100_000, help="mutated plans to try")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-ms", type=float, default=2_000.0, help="longest time that one plan may take")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    options = parser.parse_args(arguments)
    plans = [Plan.decode(path.read_bytes()) for path in options.plans]
    plans = plans or [*golden_plans(), *one_rank(golden_plans()), *planned()]
    data = fuzz(plans, options.count, options.seed, show=True).to_data()
    print(json.dumps(data) if options.json else json.dumps(data, indent=2))
    return int(bool(data["escaped"]) or data["slowest_ms"] > options.limit_ms)


if __name__ == "__main__":
    sys.exit(main())

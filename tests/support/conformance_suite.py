"""Writes `apportion/schemas/conformance`, the suite that readers in other languages must pass.

    python -m tests.support.conformance_suite            everything except existing plans
    python -m tests.support.conformance_suite --replan   including the plans

Plans do not change with the planner, since the suite tests the format. Everything else follows from them. Inputs are
multiples of 1/64, exact in bf16. Outputs come from dense attention (`oracle.py`), without plans; if a plan rounds
gradients in transit, they come from the numpy executor, which is checked against dense attention.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

import apportion as ap
from apportion import Plan, Recurrent, Sequence, Slice
from apportion.backends import numpy as executor
from apportion.backends.numpy import LocalLayer
from apportion.ir.isa import MOVE_COLUMNS, SPAN_COLUMNS, TABLES, VERSION, Op
from apportion.ir.masks import bands, specs as masks
from apportion.ir.plan.tables import Table
from tests.support import oracle, recurrences
from tests.support.conformance_faults import broken, malformed, newer
from tests.support.parse import parse
from tests.support.projection import Weights
from tests.support.random_plans import random_plan
from tests.support.recurrent_executor import Inputs
from tests.support.strategies import STRATEGIES, steps

ROOT = Path(__file__).resolve().parents[2]
SUITE = ROOT / "apportion/schemas/conformance"
TOLERANCE = 1e-9
#: seeds of random plans that are only read
_RANDOM = (1, 2, 5, 11)
#: case -> rank of its slice in the suite
_SLICES = {"one_rank": 0, "reshuffle": 1, "questions": 2, "zeppelin": 3, "few_tokens": 3, "mixed_kinds": 1}
_SLICES |= {"recurrent": 2}
#: error bound of gradients rounded to bf16, relative to the largest gradient
_ROUNDED = 2.0**-6
_HIDDEN = 3  # width of X

Array = np.ndarray
Arrays = list[tuple[dict[str, Any], Array]]


_MODEL = ap.Model(2, 1, 4, 2, dtype="fp64", hidden=4, ffn=4, layers=1)


@dataclass(frozen=True)
class Case:
    """A plan to read and run, from a strategy and a request or from a text in `tests/plans`."""

    what: str
    strategy: str = ""  # from `strategies.py`, or a recipe
    lengths: tuple[int, ...] = (23, 9, 4)
    mask: Any = field(default_factory=masks.causal)
    model: ap.Model = field(default_factory=lambda: _MODEL)
    cluster: ap.Cluster = field(default_factory=lambda: ap.Cluster(2, 2))
    text: str = ""
    sinks: bool = False
    softcap: float = 0.0
    scale: float | None = None

    def plan(self) -> Plan:
        if self.text:
            return parse((ROOT / f"tests/plans/{self.text}.txt").read_text())
        batch = ap.Batch.from_sequences([Sequence(length, self.mask) for length in self.lengths])
        recipe = ap.Recipe(self.strategy, STRATEGIES.get(self.strategy) or steps(self.strategy))
        return ap.plan(batch, self.cluster, self.model, recipe=recipe)


_HEADS = replace(_MODEL, q_heads=4, kv_heads=2)
_BF16 = replace(_HEADS, dtype="bf16")
_NARROW = replace(_BF16, sent_gradients="model")
_KINDS = {"global": masks.causal(), "local": masks.sliding_window(5)}
_LAYERS = {"global": 1, "local": 1}
_RECURRENT = {
    "gated_delta": Recurrent(heads=4, key_dim=2, value_dim=1, key_heads=2, conv=4),
    "gated_linear": Recurrent(heads=3, key_dim=2, value_dim=2, gate="diagonal", delta=False, conv=2),
    "lightning": Recurrent(heads=1, key_dim=2, value_dim=3, delta=False),
}
_KIMI = {"kimi_delta": Recurrent(2, 2, 2, gate="diagonal", conv=3)}
_TREE = masks.tree([(-1, 9), (0, 6), (0, 5), (1, 7), (1, 3)])
_WINDOW, _SINKS = masks.sliding_window(7), masks.sink_window(2, 5)
_QUESTION, _IMAGE = masks.shared_question(10, [8, 6]), masks.image_spans([(3, 6)])
_OF_KINDS: dict[str, Any] = {"mask": _KINDS, "model": replace(_HEADS, layers=_LAYERS)}
_ON_THREE: dict[str, Any] = {"mask": _QUESTION, "cluster": ap.Cluster(1, 3)}
CASES: dict[str, Case] = {
    "fcp": Case("blocks by LPT, keys and values travel in matchings", "fcp"),
    "reshuffled": Case(
        "home rows are the loader's, heads are split inside nodes", "inner_reshuffled", model=_HEADS
    ),
    "fcp_narrow": Case("gradients rounded to bf16 in transit", "fcp", model=_NARROW),
    "relays_narrow": Case(
        "gradients rounded to fp16 at each hop of a relay", "relays", model=replace(_NARROW, dtype="fp16")
    ),
    "ring": Case("a zig-zag ring, fp32", "ring", model=replace(_HEADS, dtype="fp32")),
    "ulysses": Case(
        "heads all-to-all, complete rows travel as results, bf16", "ulysses", model=replace(_BF16, kv_heads=4)
    ),
    "ulysses_shared": Case("KV heads shared by ranks; sinks", "ulysses", model=_HEADS, sinks=True),
    "usp_window": Case(
        "heads and a ring, sliding windows, a soft cap", "usp", mask=_WINDOW, model=_HEADS, softcap=1.5
    ),
    "upipe": Case("heads in stages; another scale", "upipe_ring", model=_HEADS, scale=0.25),
    "zeppelin": Case("two layouts and a remap between them", "zeppelin", (40, 2, 2, 2)),
    "mixed": Case(
        "short documents stay whole on a rank, the long one is split by heads",
        "mixed",
        (25, 5, 4, 3, 3),
        model=_BF16,
    ),
    "mixed_kinds": Case("two attention kinds, each with its own split", "mixed_kinds", **_OF_KINDS),
    "two_kinds": Case(
        "two attention kinds, reshuffled, sinks",
        "ring_reshuffled",
        mask=_KINDS,
        sinks=True,
        model=replace(_MODEL, layers=_LAYERS),
    ),
    "tree": Case("a prefix tree: positions continue from the parent's", "node", (30, 30), _TREE),
    "recurrent": Case(
        "three kinds of recurrent layers alongside attention",
        "fcp",
        (17, 6, 1, 3),
        model=replace(_MODEL, recurrent=_RECURRENT),
    ),
    "recurrent_tree": Case(
        "recurrent layers on a prefix tree: branches continue from their trunk",
        "node",
        (30,),
        _TREE,
        model=replace(_MODEL, recurrent=_KIMI),
    ),
    "questions": Case("shared questions on a ring over three ranks", "ring_of_holders", (24,), **_ON_THREE),
    "spans": Case("images inside text, in a gather by node", "gather_by_node", (32, 6), _IMAGE, sinks=True),
    "blockwise": Case("two diagonals in a kind: sink tokens and a window", "contiguous", mask=_SINKS),
    "distca": Case("queries travel, complete rows come back as results", "distca_paper", (40, 6, 3)),
    "dcp_heads": Case("head groups and divisions are computed separately", "dcp_heads", model=_HEADS),
    "few_tokens": Case("ranks without tokens", "ring", (2, 1)),
    "one_rank": Case("one rank: no round at all", "fcp", (9, 4), cluster=ap.Cluster(1, 1)),
    "clear": Case("by hand: rows that see no key; a rank without tokens computes", text="clear"),
    "heads": Case("by hand: the layer's projection is part of the program", text="heads", sinks=True),
    "nested": Case("by hand", text="nested"),
    "q_moves": Case("by hand: queries travel, partials come back", text="q_moves"),
    "relay": Case("by hand: tiles are relayed, gradients added up on the way", text="relay", sinks=True),
    "reshuffle": Case("by hand: two kinds, a remap, channels", text="reshuffle"),
    "results": Case("by hand: results of O, dQ and dKV", text="results", sinks=True),
    "waves": Case("by hand", text="waves"),
}


# ---------------------------------------------------------------------------------------------- inputs and outputs


def numbers(seed: int, *shape: int) -> Array:
    """Multiples of 1/64 in [-2, 2), by a formula that works in every language: the upper 8 bits of splitmix64."""
    size = int(np.prod(shape))
    state = np.arange(1, size + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed << 32)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state = (state ^ state >> np.uint64(shift)) * np.uint64(factor)
    return ((state ^ state >> np.uint64(31)) >> np.uint64(56)).astype(np.float64).reshape(shape) / 64 - 2


def projects(plan: Plan) -> bool:
    return any(Op.PROJECT in programs["instructions"]["op"] for programs in plan.programs.values())


def all_heads(plan: Plan) -> tuple[range, range]:
    return range(plan.header.q_heads), range(plan.header.kv_heads)


def weights_of(plan: Plan) -> Weights:
    head = plan.header
    shapes = ((head.q_heads, head.head_dim), (head.kv_heads, head.head_dim), (head.kv_heads, head.v_head_dim))
    return Weights(*(numbers(90 + i, heads, _HIDDEN, width) / 2 for i, (heads, width) in enumerate(shapes)))


def problem_of(plan: Plan, case: Case, number: int) -> tuple[oracle.Problem, Array | None]:
    """The problem of one attention kind in token order, and its hidden states if the plan projects them."""
    head, tokens, seed = plan.header, plan.request.batch.tokens, 10 * number
    sinks = numbers(seed + 5, head.q_heads) if case.sinks else None
    scale = head.head_dim**-0.5 if case.scale is None else case.scale
    do = numbers(seed + 3, tokens, head.q_heads, head.v_head_dim)
    hidden = numbers(seed + 4, tokens, _HIDDEN) / 2 if projects(plan) else None
    if hidden is not None:
        q, k, v = weights_of(plan).project(hidden, plan.request.batch.positions(), *all_heads(plan))
    else:
        q = numbers(seed, tokens, head.q_heads, head.head_dim)
        k = numbers(seed + 1, tokens, head.kv_heads, head.head_dim)
        v = numbers(seed + 2, tokens, head.kv_heads, head.v_head_dim)
    return oracle.Problem(q, k, v, do, sinks, scale, case.softcap or None), hidden


def recurrent_inputs(kind: Recurrent, tokens: int, number: int) -> tuple[Inputs, Array]:
    """The inputs of a recurrent kind in token order, and the gradient of its output."""
    seed, diagonal = 200 + 10 * number, (kind.key_dim,) if kind.gate == "diagonal" else ()
    given = Inputs(
        numbers(seed, tokens, kind.conv_channels) / 4,
        1 - np.floor(32 * numbers(seed + 1, tokens, kind.heads, *diagonal) + 64) / 256,
        numbers(seed + 2, tokens, kind.heads) / 8 + 0.25 if kind.delta else None,
        numbers(seed + 3, kind.conv_channels, kind.conv) / 2 if kind.halo else None,
    )
    return given, numbers(seed + 4, tokens, kind.heads, kind.value_dim)


def inputs_of(plan: Plan, case: Case) -> Arrays:
    """The arrays of `inputs.f64` in order."""
    hidden = _HIDDEN if projects(plan) else 0
    found: Arrays = [({"name": "hidden"}, np.array(float(hidden)))]
    if hidden:
        weights = weights_of(plan)
        found += [({"name": f"w_{name}"}, getattr(weights, name)) for name in "qkv"]
    for number, kind in enumerate(plan.header.kinds):
        problem, x = problem_of(plan, case, number)
        sinks = np.full(plan.header.q_heads, -np.inf) if problem.sinks is None else problem.sinks
        layer = {"scale": np.array(problem.scale), "softcap": np.array(case.softcap), "sinks": sinks}
        found += [({"name": name, "kind": kind}, array) for name, array in layer.items()]
        given = {"q": problem.q, "k": problem.k, "v": problem.v} if x is None else {"x": x}
        found += by_rank(plan, kind, given | {"do": problem.do})
    for number, (name, held) in enumerate(plan.header.recurrent.items()):
        of_layer, do = recurrent_inputs(held, plan.request.batch.tokens, number)
        *rows, weight = of_layer._asdict().items()
        found += [({"name": weight[0], "kind": name}, one) for one in weight[1:] if one is not None]
        found += by_rank(plan, name, {key: one for key, one in (*rows, ("do", do)) if one is not None})
    return found


def outputs_of(plan: Plan, case: Case) -> Arrays:
    """The arrays of `outputs.f64` in order."""
    found: Arrays = []
    for number, kind in enumerate(plan.header.kinds):
        problem, x = problem_of(plan, case, number)
        answer = answer_of(plan, kind, problem)
        dsinks = np.zeros(plan.header.q_heads) if answer.dsinks is None else answer.dsinks
        found.append(({"name": "dsinks", "kind": kind}, dsinks))
        grads = {"dq": answer.dq, "dk": answer.dk, "dv": answer.dv}
        if x is not None:
            positions = plan.request.batch.positions()
            of_qkv = answer.dq, answer.dk, answer.dv
            grads = {"dx": weights_of(plan).gradient(x, positions, *all_heads(plan), of_qkv)}
        found += by_rank(plan, kind, {"o": answer.o, "lse": answer.lse} | grads)
    for number, (name, held) in enumerate(plan.header.recurrent.items()):
        batch = plan.request.batch
        given, do = recurrent_inputs(held, batch.tokens, number)
        *rows, weight = recurrences.dense(held, recurrences.predecessors(batch), given, do)._asdict().items()
        found += [({"name": weight[0], "kind": name}, one) for one in weight[1:] if one is not None]
        found += by_rank(plan, name, {key: one for key, one in rows if one is not None})
    for move in plan.moves:
        target = plan.layout(move.target)
        for rank in range(plan.header.ranks):
            where = {"name": "moved", "move": f"{move.source} -> {move.target}", "rank": rank}
            found.append((where, target.tokens(rank).astype(np.float64)))
    return found


def answer_of(plan: Plan, kind: str, problem: oracle.Problem) -> oracle.Answer:
    tokens = plan.request.batch.tokens
    answer = oracle.dense(problem, bands.dense(plan.request.batch.bands(kind), tokens, tokens))
    if plan.header.sent_gradients != "model":
        return answer
    layer = LocalLayer(problem.sinks, problem.scale, problem.softcap)
    rounded = executor.run(plan, kind, problem.q, problem.k, problem.v, problem.do, layer)
    for actual, exact in zip(rounded, answer, strict=True):
        assert actual is None or np.abs(actual - exact).max() <= _ROUNDED * np.abs(exact).max()
    return oracle.Answer(*rounded)


def by_rank(plan: Plan, kind: str, arrays: dict[str, Array]) -> Iterator[tuple[dict[str, Any], Array]]:
    """Yields the home rows of the arrays, rank by rank."""
    home = plan.layout(plan.header.home_layout)
    for rank in range(plan.header.ranks):
        tokens = home.tokens(rank)
        for name, array in arrays.items():
            yield {"name": name, "kind": kind, "rank": rank}, array[tokens]


def listed(arrays: Arrays) -> list[dict[str, Any]]:
    """A description of each array with its shape, and its offset in the file, counted in numbers."""
    found, offset = [], 0
    for where, array in arrays:
        found.append(where | {"shape": list(array.shape), "offset": offset})
        offset += array.size
    return found


def packed(arrays: Arrays) -> bytes:
    return b"".join(np.ascontiguousarray(array, "<f8").tobytes() for _, array in arrays)


# ---------------------------------------------------------------------------------------------- expected tables


def tables_of(held: Plan | Slice) -> dict[str, Any]:
    """A plan or slice as `read` prints it, with lists of rows instead of encoded tables."""
    sealed = held.wire if isinstance(held, Slice) else held.sealed()
    sections = {name: msgpack.unpackb(getattr(sealed, name)) for name in ("header", "layouts", "moves")}
    found = {"id": held.id.hex(), **sections}
    if isinstance(held, Slice):
        return found | {"rank": held.rank, "part": _part(held, held.rank, 0)}
    return found | {"parts": [_part(held, rank, rank) for rank in range(held.header.ranks)]}


def _part(held: Plan | Slice, rank: int, row: int) -> dict[str, Any]:
    """The tables of a rank. row: the rank's index in the tables (0 in a slice)."""
    programs: dict[str, Any] = {}
    for (kind, phase), program in held.programs.items():
        tables = [_rows(program[name].rank(row), TABLES[name]) for name in TABLES]
        programs.setdefault(kind, {})[phase] = tables
    recurrence = held.recurrence
    found = [] if recurrence is None else [*recurrence.rank(row).tables.values()]
    recurrent = {"recurrent": [_rows(table, table.names) for table in found]} if found else {}
    return recurrent | {
        "rank": rank,
        "layouts": [_rows(layout.spans.rank(row), SPAN_COLUMNS) for layout in held.layouts.values()],
        "programs": programs,
        "moves": [_rows(move.table.rank(row), MOVE_COLUMNS) for move in held.moves],
    }


def _rows(table: Table, names: tuple[str, ...]) -> list[list[int]]:
    return [list(row) for row in zip(*(table[name].tolist() for name in names), strict=True)]


# ---------------------------------------------------------------------------------------------- the files


def compact(data: Any) -> bytes:
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def lines(data: dict[str, list[dict[str, Any]]]) -> bytes:
    """Encodes JSON with one entry per line."""
    groups = [f'"version": {json.dumps(list(VERSION))}']
    for name, entries in data.items():
        rows = ",\n  ".join(json.dumps(entry, ensure_ascii=False) for entry in entries)
        groups.append(f'"{name}": [\n  {rows}\n]')
    return ("{" + ",\n".join(groups) + "}\n").encode()


def suite(plans: dict[str, Plan]) -> dict[str, bytes]:
    """The files by path. plans: the cases' plans."""
    files: dict[str, bytes] = {}
    index: dict[str, list[dict[str, Any]]] = {
        name: [] for name in ("cases", "reading", "slices", "malformed", "broken")
    }
    for name, case in CASES.items():
        plan = plans[name]
        inputs, outputs = inputs_of(plan, case), outputs_of(plan, case)
        arrays = {"inputs": listed(inputs), "outputs": listed(outputs)}
        files |= {
            f"cases/{name}/case.plan": plan.encode(),
            f"cases/{name}/tables.json": compact(tables_of(plan)),
            f"cases/{name}/arrays.json": lines(arrays),
            f"cases/{name}/inputs.f64": packed(inputs),
            f"cases/{name}/outputs.f64": packed(outputs),
        }
        index["cases"].append({"name": name, "tolerance": TOLERANCE, "what": case.what})
    for seed in _RANDOM:
        plan, name = random_plan(seed), f"random_{seed}"
        files[f"reading/{name}.plan"], files[f"reading/{name}.json"] = plan.encode(), compact(tables_of(plan))
        index["reading"].append({"name": name, "what": "any numbers that a plan may hold; it has no meaning"})
    data = newer(plans["reshuffle"])
    files["reading/newer.plan"], files["reading/newer.json"] = data, compact(tables_of(Plan.decode(data)))
    what = "a newer minor version, with more keys, tables and columns"
    index["reading"].append({"name": "newer", "what": what})
    for name, rank in _SLICES.items():
        held = plans[name].for_rank(rank)
        files[f"slices/{name}.plan"], files[f"slices/{name}.json"] = held.encode(), compact(tables_of(held))
        index["slices"].append({"name": name, "what": f"the slice of rank {rank}"})
    recurrent = plans["recurrent"]
    for group, found in (("malformed", malformed(recurrent)), ("broken", broken(recurrent))):
        for name, (rule, data) in found.items():
            files[f"{group}/{name}.plan"] = data
            index[group].append({"name": name, "breaks": rule})
    return files | {"suite.json": lines(index)}


def plans_of(folder: Path, replan: bool) -> dict[str, Plan]:
    """The plans of the cases. replan: makes new ones even if they exist."""
    paths = {name: folder / f"cases/{name}/case.plan" for name in CASES}
    return {
        name: CASES[name].plan() if replan or not path.exists() else Plan.decode(path.read_bytes())
        for name, path in paths.items()
    }


def main(args: list[str]) -> None:
    files = suite(plans_of(SUITE, "--replan" in args))
    for name, data in files.items():
        path = SUITE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    existing = {str(path.relative_to(SUITE)) for path in SUITE.rglob("*") if path.is_file()}
    for name in existing - files.keys() - {"README.md"}:
        (SUITE / name).unlink()
    print(f"{len(files)} files, {sum(map(len, files.values())):,} bytes in {SUITE.relative_to(ROOT)}")


if __name__ == "__main__":
    main(sys.argv[1:])

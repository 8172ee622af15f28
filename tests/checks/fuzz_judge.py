"""Tests the verifier against execution on mutated plans: an accepted mutant must compute the same as the original.

    python -m tests.checks.fuzz_judge --count 100000 --json

Every accepted mutant runs on the numpy executor, in float64, forward and backward, and its outputs are compared with
those of its original plan. Mutants form a random walk: the next one is derived from an accepted one. Plans of many
recipes take turns; for plans with recurrent layers, recurrent tables are changed and recurrent outputs compared. Exit
status 1 if an accepted mutant computes something else or the verifier raises. Counts refused mutants by their first
rule, and those whose first finding names no rank.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from apportion import ApportionError, Batch, Cluster, Model, Plan, Recurrent, Sequence as Sample, masks
from apportion.backends import numpy as executor
from apportion.ir.arrays import Floats
from apportion.ir.isa import TABLES, TASK_LIST, Op
from apportion.ir.plan.ops import LIST_OF_OP, LISTS
from apportion.ir.plan.tables import ProgramSet, Recurrence, Table
from apportion.ir.verify import check
from apportion.planner import api
from apportion.planner.recipe.recipes import find_recipe, with_block
from tests.support import recurrent_executor
from tests.support.projection import Weights
from tests.support.recurrences import random_inputs

RECIPES = (
    *("fcp_paper", "fcp", "blend", "distca", "dcp", "zeppelin", "mixed", "ulysses", "upipe", "ring", "usp"),
    *("loongtrain", "upipe_ring"),
)
#: rules that check a plan's report and digests, which a mutant may violate
_STATEMENT_RULES = ("report", "digests")
_LONGEST = 30  # accepted mutants before the next plan
_WEIGHTS = {
    "operands": 6,
    "transfers": 4,
    "tasks": 5,
    "grads": 5,
    "rowops": 4,
    "instructions": 3,
    "arenas": 1,
}


@dataclass
class Result:
    """Counts of results. refused: by first rule; nowhere: refusals without a rank; missed: accepted mutants that
    compute something else or raise."""

    count: int = 0
    accepted: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    nowhere: int = 0
    missed: list[str] = field(default_factory=list)

    def to_data(self) -> dict[str, Any]:
        return {
            "count": self.count,
            "accepted": self.accepted,
            "refused": dict(sorted(self.refused.items())),
            "nowhere": self.nowhere,
            "missed": self.missed[:20],
        }


def plans(ranks: Sequence[int] = (4, 8), names: Sequence[str] = RECIPES) -> Iterator[tuple[str, Plan]]:
    """Yields (recipe, plan): small plans of all recipes."""
    lengths = (90, 30, 210, 7, 150, 700, 70, 13)
    model = Model(q_heads=8, kv_heads=8, head_dim=2, hidden=16, layers=1, dtype="fp64")
    shapes = [(count, nodes) for count in ranks for nodes in sorted({2, count // 2})]
    for name in names:
        recipe = find_recipe(name)
        recipe = with_block(recipe, 32) if name == "fcp_paper" else recipe
        for count, nodes in shapes:
            cluster = Cluster(nodes=nodes, ranks_per_node=count // nodes)
            batch = Batch.from_lengths(lengths[: 2 + count // 2 * 2])
            try:
                yield name, api.plan(batch, cluster, model, recipe, verify=False)
            except ApportionError:
                continue


def recurrent_plans(names: Sequence[str] = ("fcp", "blend", "zeppelin", "usp")) -> Iterator[tuple[str, Plan]]:
    """Yields (recipe, plan) for a model with recurrent layers: trees, packs, runs shorter than a halo."""
    kinds = {
        "delta": Recurrent(heads=3, key_dim=2, value_dim=1, conv=4),
        "plain": Recurrent(heads=2, key_dim=1, value_dim=2, delta=False, conv=2),
    }
    model = Model(q_heads=8, kv_heads=8, head_dim=2, hidden=16, layers=1, dtype="fp64", recurrent=kinds)
    tree = Sample(40, masks.tree([[-1, 12], [0, 9], [0, 11], [2, 3], [2, 5]]))
    batch = Batch.from_sequences([tree, Sample(30, masks.documents([9, 19, 2])), Sample(50), Sample(1)])
    for name in names:
        for cluster in (Cluster(1, 3), Cluster(2, 4)):
            try:
                yield name, api.plan(batch, cluster, model, name)
            except ApportionError:
                continue


# ---------------------------------------------------------------------------------------------- mutations


def mutate(rng: random.Random, plan: Plan) -> tuple[str, Plan]:
    """Changes one program or the recurrent tables in one to three places; returns a description and the plan."""
    if plan.recurrence is not None:
        return _mutate_recurrence(rng, plan, dict(plan.recurrence.tables))
    key = rng.choice(sorted(plan.programs))
    tables = dict(plan.programs[key].tables)
    done = []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        name = rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
        if name in TASK_LIST.values():
            name = TASK_LIST[key[1]]
        if len(tables[name]):
            change, tables[name] = _change(rng, name, tables[name])
            done.append(f"{key[1]} {change}")
    return "; ".join(done), replace(plan, programs={**plan.programs, key: ProgramSet(tables)}, sections=None)


def _mutate_recurrence(rng: random.Random, plan: Plan, tables: dict[str, Table]) -> tuple[str, Plan]:
    done = []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        name = rng.choice([name for name, table in tables.items() if len(table)])
        change, tables[name] = _change(rng, name, tables[name])
        done.append(change)
    return "; ".join(done), replace(plan, recurrence=Recurrence(tables), sections=None)


def _change(rng: random.Random, name: str, table: Table) -> tuple[str, Table]:
    columns = {one: np.array(table[one], np.int64) for one in table.names}
    ptr, row = np.array(table.ptr, np.int64), rng.randrange(len(table))
    rank = int(np.searchsorted(ptr, row, side="right")) - 1
    other, chance = rng.randrange(int(ptr[rank]), int(ptr[rank + 1])), rng.random()
    if chance < 0.6:
        one = rng.choice(table.names)
        values = columns[one]
        before = int(values[row])
        others = int(values[other]), int(values[other]), int(values[rng.randrange(len(values))])
        far = before + rng.choice((-32, -16, -8, 8, 16, 32))
        values[row] = rng.choice((before - 1, before + 1, *others[:2], before ^ 1, 0, 1, others[2], far))
        return f"{name}.{one}[{row}] {before} -> {int(values[row])}", Table.of(ptr, columns)
    if chance < 0.8:
        for values in columns.values():
            values[row], values[other] = values[other], values[row]
        return f"{name} {row} <-> {other}", Table.of(ptr, columns)
    if chance < 0.9:
        ptr[rank + 1 :] -= 1
        return f"{name} {row} dropped", Table.of(ptr, {one: np.delete(v, row) for one, v in columns.items()})
    ptr[rank + 1 :] += 1
    duplicated = {one: np.insert(v, other, v[row]) for one, v in columns.items()}
    return f"{name} {row} again at {other}", Table.of(ptr, duplicated)


def repaired(plan: Plan) -> Plan:
    """Corrects the counts of instructions if a rank's list does not have as many rows as they state, so that dropped
    and added rows, and dropped instructions, pass the first rule."""
    programs = {}
    for key, program in plan.programs.items():
        table = program["instructions"]
        columns = {one: np.array(table[one], np.int64) for one in TABLES["instructions"]}
        op = columns["op"]
        if len(op) == 0 or op.min() < 0 or op.max() >= len(LIST_OF_OP):
            return plan
        ptr = np.asarray(table.ptr)
        for rank in range(table.ranks):
            lo, hi = int(ptr[rank]), int(ptr[rank + 1])
            lists = LIST_OF_OP[op[lo:hi]]
            for number, name in enumerate(LISTS):
                at = lo + np.flatnonzero(lists == number)
                have = int(np.diff(program[name].ptr)[rank])
                surplus = int(columns["count"][at].sum()) - have
                if surplus and len(at):
                    big = at[int(np.argmax(columns["count"][at]))]
                    columns["count"][big] -= surplus
        programs[key] = ProgramSet({**program.tables, "instructions": Table.of(ptr, columns)})
    return replace(plan, programs=programs)


# ---------------------------------------------------------------------------------------------- comparing


def weights_of(model: Model) -> Weights:
    """Equal for equal models."""
    draw, keys = np.random.default_rng(1), (model.kv_heads, model.hidden)
    shapes = (model.q_heads, model.hidden, model.head_dim), (*keys, model.head_dim), (*keys, model.value_dim)
    return Weights(*(draw.normal(size=shape) for shape in shapes))


def outputs(plan: Plan) -> list[Floats]:
    """O, LSE and all gradients of a plan's attention kinds, or of its recurrent kinds if it has any. Raises the errors
    of the executor."""
    if plan.recurrence is not None:
        return _recurrent_outputs(plan)
    model, tokens, draw = plan.request.model, plan.request.batch.tokens, np.random.default_rng(0)
    q, do = (draw.normal(size=(tokens, model.q_heads, width)) for width in (model.head_dim, model.value_dim))
    k, v = (draw.normal(size=(tokens, model.kv_heads, width)) for width in (model.head_dim, model.value_dim))
    inputs, layer = (q, k, v), executor.PLAIN
    if any((programs["instructions"]["op"] == Op.PROJECT).any() for programs in plan.programs.values()):
        inputs, layer = (
            (draw.normal(size=(tokens, model.hidden)),),
            executor.LocalLayer(project=weights_of(model)),
        )
    found: list[Floats] = []
    for kind in plan.header.kinds:
        o, lse, saved = executor.forward(plan, kind, inputs, layer)
        found += [o, lse, *(one for one in executor.backward(plan, kind, saved, do) if one is not None)]
    return found


def _recurrent_outputs(plan: Plan) -> list[Floats]:
    found = list[Floats]()
    for name, kind in plan.header.recurrent.items():
        inputs, do = random_inputs(kind, plan.request.batch.tokens)
        found += [one for one in recurrent_executor.run(plan, name, inputs, do) if one is not None]
    return found


def differs(plan: Plan, expected: list[Floats]) -> str:
    """Describes the wrong behaviour of an accepted plan; empty if it behaves correctly."""
    try:
        found = outputs(plan)
    except Exception as error:
        return f"raises {error!r}"
    right = all(np.allclose(a, b, rtol=0, atol=1e-9) for a, b in zip(found, expected, strict=True))
    return "" if right else "computes something else"


def fuzz(originals: Sequence[tuple[str, Plan]], count: int, seed: int) -> Result:
    """Tests `count` mutants of the plans in turn."""
    result, rng = Result(), random.Random(seed)
    at = seed
    while result.count < count:
        name, plan = originals[at % len(originals)]
        at += 1
        changes: list[str] = []
        expected: list[Floats] = []
        for _ in range(4 * _LONGEST):
            if result.count == count or len(changes) > _LONGEST:
                break
            change, mutant = mutate(rng, plan)
            mutant = repaired(mutant) if rng.random() < 0.9 else mutant
            result.count += 1
            found = [one for one in check(mutant) if one.rule not in _STATEMENT_RULES]
            if found:
                result.refused[found[0].rule] += 1
                result.nowhere += found[0].rank is None
                continue
            result.accepted += 1
            expected = expected or outputs(plan)
            changes.append(change)
            if wrong := differs(mutant, expected):
                result.missed.append(f"{name}, seed {seed}: {' / '.join(changes)}: {wrong}")
                break
            plan = mutant
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", default="4,8", help="numbers of ranks of the original plans")
    parser.add_argument("--recipes", default=",".join(RECIPES))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    originals = list(plans([int(one) for one in options.ranks.split(",")], options.recipes.split(",")))
    originals += recurrent_plans()
    result = fuzz(originals, options.count, options.seed)
    data = result.to_data()
    text = "\n".join(f"{name}: {value}" for name, value in data.items())
    print(json.dumps(data, indent=1) if options.json else text)
    return 1 if result.missed else 0


if __name__ == "__main__":
    sys.exit(main())

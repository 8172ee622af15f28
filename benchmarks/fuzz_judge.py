"""Holds the verifier's quick judge against its rules, over mutated plans: what it accepts, they must accept.

    python -m benchmarks.fuzz_judge --count 100000 --json

Walks from plan to plan: a mutant that the rules accept is what the next one is made of. Plans of many recipes are
taken in turn. Exit status 1 where the judge accepted what the rules reject.
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

from apportion.ir.bytes.codec import Plan
from apportion.ir.errors import ApportionError
from apportion.ir.isa import TABLES, TASK_LIST
from apportion.ir.plan.ops import LIST_OF_OP, LISTS
from apportion.ir.plan.tables import ProgramSet, Table
from apportion.ir.request.batch import Batch
from apportion.ir.request.cluster import Cluster
from apportion.ir.request.model import Model
from apportion.ir.verify import RULES
from apportion.ir.verify.rules import coverage
from apportion.ir.verify.subject import Subject
from apportion.planner import api
from apportion.planner.recipe.recipes import find_recipe, with_block

RECIPES = (
    "fcp_paper",
    "fcp",
    "blend",
    "distca",
    "dcp",
    "zeppelin",
    "mixed",
    "ulysses",
    "upipe",
    "ring",
    "usp",
    "loongtrain",
    "upipe_ring",
)
#: those that the judge stands for; besides coverage, which it gives the tasks
_JUDGED = ("operands", "transfers", "heads", "results", "dataflow", "delivery")
_LONGEST = 30  # accepted mutants in a row, until the next plan
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
    """What came out, by whether the judge and the rules accepted it. missed: mutations that only the judge accepted."""

    count: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)  # recipes of what only the rules accepted
    missed: list[str] = field(default_factory=list)

    def to_data(self) -> dict[str, Any]:
        return {
            "count": self.count,
            "outcomes": dict(sorted(self.outcomes.items())),
            "refused": dict(self.refused.most_common()),
            "missed": self.missed[:20],
        }


def plans(ranks: Sequence[int] = (4, 8), names: Sequence[str] = RECIPES) -> Iterator[tuple[str, Plan]]:
    """(recipe, plan), small ones, of all recipes."""
    lengths = (900, 300, 2100, 64, 1500, 7000, 700, 128)
    model = Model(q_heads=8, kv_heads=8, head_dim=16, hidden=128, layers=1)
    shapes = [(count, nodes) for count in ranks for nodes in sorted({2, count // 2})]
    for name in names:
        recipe = find_recipe(name)
        recipe = with_block(recipe, 256) if name == "fcp_paper" else recipe
        for count, nodes in shapes:
            cluster = Cluster(nodes=nodes, ranks_per_node=count // nodes)
            batch = Batch.from_lengths(lengths[: 2 + count // 2 * 2])
            try:
                yield name, api.plan(batch, cluster, model, recipe, verify=False)
            except ApportionError:
                continue


# ---------------------------------------------------------------------------------------------- mutations


def mutate(rng: random.Random, plan: Plan) -> tuple[str, Plan]:
    """One program changed in one to three places; what was done."""
    key = rng.choice(sorted(plan.programs))
    tables = dict(plan.programs[key].tables)
    done = []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        name = rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
        if name in TASK_LIST.values():
            name = TASK_LIST[key[1]]
        if len(tables[name]):
            what, tables[name] = _change(rng, name, tables[name])
            done.append(f"{key[1]} {what}")
    return "; ".join(done), replace(plan, programs={**plan.programs, key: ProgramSet(tables)}, sections=None)


def _change(rng: random.Random, name: str, table: Table) -> tuple[str, Table]:
    columns = {one: np.array(table[one], np.int64) for one in TABLES[name]}
    ptr, row = np.array(table.ptr, np.int64), rng.randrange(len(table))
    rank = int(np.searchsorted(ptr, row, side="right")) - 1
    other, chance = rng.randrange(int(ptr[rank]), int(ptr[rank + 1])), rng.random()
    if chance < 0.6:
        one = rng.choice(TABLES[name])
        values = columns[one]
        before = int(values[row])
        values[row] = rng.choice(
            (
                before - 1,
                before + 1,
                int(values[other]),
                int(values[other]),
                before ^ 1,
                0,
                1,
                int(values[rng.randrange(len(values))]),
                before + rng.choice((-256, -128, -64, 64, 128, 256)),
            )
        )
        return f"{name}.{one}[{row}] {before} -> {int(values[row])}", Table.of(ptr, columns)
    if chance < 0.8:
        for values in columns.values():
            values[row], values[other] = values[other], values[row]
        return f"{name} {row} <-> {other}", Table.of(ptr, columns)
    if chance < 0.9:
        ptr[rank + 1 :] -= 1
        return f"{name} {row} dropped", Table.of(ptr, {one: np.delete(v, row) for one, v in columns.items()})
    ptr[rank + 1 :] += 1
    again = {one: np.insert(v, other, v[row]) for one, v in columns.items()}
    return f"{name} {row} again at {other}", Table.of(ptr, again)


def repaired(plan: Plan) -> Plan:
    """The counts of instructions set right where one list of a rank is a row longer or shorter than they say: so that
    dropped and added rows, and dropped instructions, get past the first rule."""
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


def accepted(plan: Plan) -> tuple[bool, bool] | None:
    """Whether the judge and the rules accept the plan, coverage included on either side; None where it has no form
    that they could look at."""
    by_name = {rule.name: rule for rule in RULES}
    if any(True for _ in by_name["structure"].find(Subject(plan))):
        return None
    one, other = Subject(plan), Subject(plan)
    judged = one.judge()
    judged_covered = judged and not any(coverage.violations(one, program) for program in one.programs)
    held = _hold(other, by_name)
    if judged and not held:
        return True, False  # whatever coverage says
    covered = held and not any(coverage.violations(other, program) for program in other.programs)
    if judged and judged_covered != covered:
        return judged_covered, covered
    return judged_covered, covered


def _hold(subject: Subject, by_name: dict[str, Any]) -> bool:
    """Whether the rules that the judge stands for hold; without what `dataflow` says where coverage is broken."""
    for name in _JUDGED[:4]:
        if any(True for _ in by_name[name].find(subject)):
            return False
    try:
        faults = any(len(subject.flow(program).faults) for program in subject.runnable)
        return not faults and not any(True for _ in by_name["delivery"].find(subject))
    except ApportionError:
        return False


def fuzz(begin: Sequence[tuple[str, Plan]], count: int, seed: int) -> Result:
    """`count` mutants, from the plans in turn."""
    result, rng = Result(), random.Random(seed)
    at = seed
    while result.count < count:
        name, plan = begin[at % len(begin)]
        at += 1
        story: list[str] = []
        for _ in range(4 * _LONGEST):
            if result.count == count or len(story) > _LONGEST:
                break
            what, mutant = mutate(rng, plan)
            mutant = repaired(mutant) if rng.random() < 0.9 else mutant
            found = accepted(mutant)
            result.count += 1
            if found is None:
                result.outcomes["no form"] += 1
                continue
            judged, right = found
            result.outcomes[f"judge {'yes' if judged else 'no'}, rules {'yes' if right else 'no'}"] += 1
            if judged and not right:
                result.missed.append(f"{name}, seed {seed}: {' / '.join([*story, what])}")
            if right and not judged:
                result.refused[name] += 1
            if right:
                plan = mutant
                story.append(what)
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", default="4,8", help="of the plans that are mutated")
    parser.add_argument("--recipes", default=",".join(RECIPES))
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(arguments)
    begin = list(plans([int(one) for one in asked.ranks.split(",")], asked.recipes.split(",")))
    result = fuzz(begin, asked.count, asked.seed)
    data = result.to_data()
    print(
        json.dumps(data, indent=1)
        if asked.json
        else "\n".join(f"{name}: {value}" for name, value in data.items())
    )
    return 1 if result.missed else 0


if __name__ == "__main__":
    sys.exit(main())

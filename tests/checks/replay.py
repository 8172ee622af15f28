"""Regression check of plans: compares ids, and digests of their meaning step by step, with committed ones.

    make replay                 compares with tests/data/replays.json; exit status 1 if a plan differs
    make replay BASE=83469d6    compares with a commit; prints the first differing row of the first differing step
    make replay UPDATE=1        rewrites the file; the commit message must state why plans changed

Covers all recipes and variants of the tests with several mask families, kinds, numbers of ranks and heads, and seeds;
the built-in recipes on log-normal documents; and random mixtures of passes. A plan's steps, in order:

    layouts     which rank holds which tokens, and moves between layouts
    tasks       the tasks of each rank, ignoring order and places in memory
    transfers   senders, receivers and rows, ignoring order
    order       the programs, ignoring places in memory
    memory      the programs
    report      the planner's report, except the plan's size in bytes
    bytes       the plan's id, for everything else: header, request and encoding

All but the last are computed after encoding and decoding: a change of format changes a plan's id but not its meaning.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests/data/replays.json"
STEPS = ("layouts", "tasks", "transfers", "order", "memory", "report", "bytes")

Ints = NDArray[np.integer[Any]]
Rows = dict[str, Ints]  # columns of equal length


# --- cases


@dataclass(frozen=True)
class Case:
    """A case. make: returns the plan, or None if the mixture is refused; raises if the request is refused."""

    name: str
    make: Callable[[], Any]


def cases() -> list[Case]:
    """All cases; they are small, and identical in every process."""
    return [*_variants(), *_defaults(), *_mixtures()]


def _variants() -> Iterator[Case]:
    from tests.support.matrix import SEQUENCES
    from tests.support.strategies import STRATEGIES

    names = list(SEQUENCES)
    for number, (recipe, steps) in enumerate(STRATEGIES.items()):
        for turn in range(6):
            at = 5 * number + turn
            chosen = [names[(at + step) % len(names)] for step in (0, 3, 7)]
            ranks, heads, two = (1, 2, 3, 4, 6, 8)[(at + turn) % 6], at % 3, at % 2
            name = f"{recipe}/{'+'.join(chosen)}/{ranks} ranks/heads {heads}/{1 + two} kinds/seed {turn % 3}"
            yield Case(name, lambda a=(recipe, steps, chosen, ranks, heads, two, turn % 3): _variant(*a))


def _variant(
    recipe: str, steps: Mapping[str, Any], chosen: Sequence[str], ranks: int, heads: int, two: int, seed: int
) -> Any:
    import apportion as ap
    from apportion.ir.masks import specs as masks
    from apportion.ir.request.batch import Batch
    from apportion.ir.request.model import Model
    from apportion.ir.request.policy import Policy, Recipe
    from apportion.ir.request.sequences import Sequence
    from tests.support.matrix import LAYERS, SEQUENCES
    from tests.support.strategies import cluster

    own = [SEQUENCES[name] for name in chosen] + [(64, masks.causal())]
    kinds = [(length, {"global": mask, "local": masks.sliding_window(7)}) for length, mask in own]
    batch = Batch.from_sequences([Sequence(*some) for some in (kinds if two else own)])
    model = Model(*LAYERS[heads][:4], dtype="fp64", layers={"global": 1, "local": 1} if two else 1)
    policy = Policy(Recipe(recipe, steps), seed=seed, token_cap=batch.tokens)
    return ap.plan(batch, cluster(ranks), model, policy=policy)


def _defaults() -> Iterator[Case]:
    import apportion as ap
    from apportion.ir.request.model import Model
    from apportion.planner.recipe.recipes import entries
    from tests.support.strategies import cluster

    model = Model(8, 4, 64, hidden=512, layers=2)
    for recipe in [name for name in entries() if name != "round_robin"]:  # added by the tests' plug-in
        for ranks, seed in ((4, 0), (8, 1), (16, 2)):
            rng = np.random.default_rng(seed)
            lengths = rng.lognormal(6.0, 1.2, 3 * ranks).astype(int).clip(1, 6000)
            batch = ap.Batch.from_lengths(lengths.tolist())
            request = batch, cluster(ranks), model, recipe, seed
            yield Case(f"{recipe}/log-normal/{ranks} ranks/seed {seed}", lambda a=request: ap.plan(*a))


def _mixtures() -> Iterator[Case]:
    from tests.support.mixtures import plan_of

    for seed in range(1000, 1060):
        yield Case(f"mixture {seed}", lambda a=seed: (plan_of(a) or (None,))[0])


# --- the meaning of a plan


def meaning(plan: Any) -> dict[str, list[Rows]]:
    """Step -> tables with their operands resolved, independent of codes, widths and operand numbers."""
    return {
        "layouts": [_ranked(one.spans) for _, one in sorted(plan.layouts.items())]
        + [_ranked(move.table) for move in plan.moves],
        "tasks": [_sorted(_resolved(plan, key, name)) for key in _keys(plan) for name in ("tasks", "grads")],
        "transfers": [_sorted(_resolved(plan, key, "transfers")) for key in _keys(plan)],
        "order": _programs(plan, "instructions", memory=False),
        "memory": _programs(plan, "arenas", memory=True),
    }


def _programs(plan: Any, table: str, memory: bool) -> list[Rows]:
    """One table and all lists of each program, in program order."""
    lists = ("transfers", "tasks", "grads", "rowops")
    found = []
    for key in _keys(plan):
        found += [_ranked(plan.programs[key][table]), *(_resolved(plan, key, name, memory) for name in lists)]
    return found


def _keys(plan: Any) -> list[tuple[str, str]]:
    return sorted(plan.programs)


def _ranked(table: Any) -> Rows:
    return {"rank": table.rank_of_row(), **{name: table[name] for name in sorted(table.columns)}}


#: columns of lists that are operand numbers
_OPERANDS = frozenset({"operand", "q", "kv", "o", "do", "delta", "dq", "dkv", "a", "b", "c", "d"})


def _resolved(plan: Any, key: tuple[str, str], name: str, memory: bool = False) -> Rows:
    """A list's rows with tensor, space, rows and heads of each operand, and its place if it has home rows or with
    `memory`."""
    programs = plan.programs[key]
    table, operands = programs[name], programs["operands"]
    heads = np.array([0, *(1 + sum(1 << head for head in sorted(one)) for one in plan.header.head_sets)])
    rank = table.rank_of_row()
    found: Rows = {"rank": rank}
    for column in table.columns:
        if column not in _OPERANDS:
            found[column] = table[column]
            continue
        at = operands.ptr[:-1][rank] + table[column]
        place = memory | (operands["space"][at] == 0)
        found |= {f"{column}.{part}": operands[part][at] for part in ("tensor", "space", "rows")}
        found[f"{column}.heads"] = heads[operands["heads"][at]]
        found[f"{column}.row"] = np.where(place, operands["row"][at], 0)
        if memory:
            found[f"{column}.col"] = operands["col"][at]
    return found


def _sorted(rows: Rows) -> Rows:
    order = np.lexsort([*reversed(rows.values())])
    return {name: column[order] for name, column in rows.items() if name != "first"}


def digests(plan: Any) -> list[str]:
    """The digest of each step."""
    made = [_digest(tables) for tables in meaning(plan).values()]
    report = {name: value for name, value in plan.report.items() if name != "plan_bytes"}
    encoded = json.dumps(report, sort_keys=True, default=lambda value: value.item())
    return [*made, hashlib.sha256(encoded.encode()).hexdigest()[:12], plan.id.hex()[:12]]


def _digest(tables: Sequence[Rows]) -> str:
    found = hashlib.sha256()
    for rows in tables:
        for name, column in rows.items():
            found.update(name.encode())
            found.update(np.ascontiguousarray(column, "<i8").tobytes())
    return found.hexdigest()[:12]


# --- runs


def record(progress: bool = False) -> dict[str, list[str]]:
    """Case -> the digests of its steps, or its refusal."""
    from apportion.ir.bytes.codec import Plan
    from apportion.ir.errors import ApportionError

    found, listed = {}, cases()
    for case in track(listed, "planning", console=Console(stderr=True), disable=not progress, transient=True):
        try:
            plan = case.make()
            found[case.name] = ["refused"] if plan is None else digests(Plan.decode(plan.encode()))
        except ApportionError as error:
            found[case.name] = [f"refused: {type(error).__name__}"]
    return found


def differing(own: Mapping[str, Sequence[str]], other: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Case -> the first step that differs; "refused" or "missing" if only one side has a plan."""
    found = {}
    for name in dict.fromkeys([*own, *other]):
        a, b = own.get(name), other.get(name)
        if a is None or b is None:
            found[name] = "missing"
        elif list(a) != list(b):
            both_planned = len(a) == len(b) == len(STEPS)
            pairs = zip(STEPS, a, b, strict=True) if both_planned else [("refused", "", "x")]
            found[name] = next(step for step, x, y in pairs if x != y)
    return found


def lines(name: str, step: str) -> list[str]:
    """The rows of a case's step as text."""
    plan = next(case for case in cases() if case.name == name).make()
    rows_as_text = []
    for rows in meaning(plan)[step]:
        columns = [column.tolist() for column in rows.values()]
        pairs = (zip(rows, row, strict=True) for row in zip(*columns, strict=True))
        rows_as_text += [" ".join(f"{key}={value}" for key, value in row) for row in pairs]
    return rows_as_text


class OtherProcess:
    """Runs this file in another process, started on construction, with the package of another folder."""

    def __init__(self, arguments: Sequence[str], package: Path = ROOT) -> None:
        path = f"{package}{os.pathsep}{package / 'tests/plugin'}"  # precedes an installed package
        env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(Path(__file__).resolve()), *arguments]
        self._process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE)

    def read(self) -> Any:
        output, _ = self._process.communicate()
        if self._process.returncode:
            raise subprocess.CalledProcessError(self._process.returncode, self._process.args)
        return json.loads(output)


def committed_steps() -> dict[str, list[str]]:
    steps_by_case: dict[str, str] = json.loads(DATA.read_text())
    return {name: steps.split(", ") for name, steps in steps_by_case.items()}


def write(found: Mapping[str, Sequence[str]]) -> None:
    DATA.write_text(json.dumps({name: ", ".join(steps) for name, steps in found.items()}, indent=0) + "\n")


def compare_with(base: str, as_json: bool) -> int:
    """Compares with another commit's package; everything else comes from this tree."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        subprocess.run(["git", "-C", str(ROOT), "worktree", "add", "-q", "--detach", tree, base], check=True)
        try:
            subprocess.run(["make", "-C", tree, "--silent", "core", f"PYTHON={sys.executable}"], check=True)
            other, own = OtherProcess(["--record"], tree), record(progress=True)
            found = differing(own, other.read())
            status = print_differences(f"{base}", len(own), found, as_json)
            for name, step in list(found.items())[:1]:
                if step in STEPS[:-1] and not as_json:
                    _print_rows(base, name, step, OtherProcess(["--rows", name, step], tree).read())
            return status
        finally:
            subprocess.run(["git", "-C", str(ROOT), "worktree", "remove", "--force", tree], check=True)


def _print_rows(base: str, name: str, step: str, other: Sequence[str]) -> None:
    own = lines(name, step)
    differing_rows = (i for i, (a, b) in enumerate(zip(own, other, strict=False)) if a != b)
    at = next(differing_rows, min(len(own), len(other)))
    print(f"{name}: {step}, row {at} of {len(own)} (of {len(other)} at {base})")
    for mark, rows in (("-", other), ("+", own)):
        print(f"  {mark} {rows[at] if at < len(rows) else '(none)'}")


def print_differences(base: str, count: int, found: Mapping[str, str], as_json: bool) -> int:
    """Prints differences; returns the exit status."""
    if as_json:
        print(json.dumps({"base": base, "cases": count, "differ": found}))
        return int(bool(found))
    if not found:
        print(f"{count} plans, none differs from {base}")
        return 0
    first = Counter(found.values())
    other = len(found) - first["bytes"]
    print(f"{len(found)} of {count} plans differ from {base}, {other} in meaning; the first step that does:")
    print("  " + ", ".join(f"{step} {first[step]}" for step in (*STEPS, "refused", "missing") if first[step]))
    print("\n".join(f"  {step:<10}{name}" for name, step in list(found.items())[:20]))
    return 1


def main(arguments: Sequence[str] | None = None) -> int:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--base", metavar="COMMIT", help="compare with the plans of this commit")
    parser.add_argument("--update", action="store_true", help="rewrite the file")
    parser.add_argument("--json", action="store_true", help="print differences as JSON")
    parser.add_argument("--record", action="store_true", help="print all digests as JSON")
    parser.add_argument("--rows", nargs=2, metavar=("CASE", "STEP"), help="print the rows of a step as JSON")
    options = parser.parse_args(arguments)
    if options.record or options.rows:
        print(json.dumps(record(progress=True) if options.record else lines(*options.rows)))
        return 0
    if options.base:
        return compare_with(options.base, options.json)
    if options.update:
        write(record(progress=True))
        print(f"{DATA.name} is rewritten: state in the commit message why plans changed")
        return 0
    own, known = record(progress=True), committed_steps()
    return print_differences(DATA.name, len(known), differing(own, known), options.json)


if __name__ == "__main__":
    import apportion  # noqa: F401, of the requested tree; tests always come from this tree

    sys.path.insert(0, str(ROOT))
    sys.exit(main())

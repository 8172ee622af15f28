"""Plans that relay tiles, reduce along a tree and split heads, each broken in one place: the right rule refuses it."""

from __future__ import annotations

from functools import cache

import pytest

import apportion as ap
from apportion.ir.bytes.codec import Plan
from apportion.ir.verify import Violation, check
from tests.support.parse import parse
from tests.support.strategies import STRATEGIES, cluster

MODEL = ap.Model(q_heads=4, kv_heads=2, head_dim=8, dtype="fp64", hidden=32, ffn=64, layers=1)
#: strategy -> ranks, and lengths with several runs of tokens in a tile
SIZES = {"ring": (8, [40, 24]), "node": (8, [40, 24, 17]), "ulysses": (4, [40, 24, 17])}


@cache
def good(name: str) -> str:
    """A plan as text without its id, so that an edited text is sealed again."""
    ranks, lengths = SIZES[name]
    recipe = ap.Recipe(name, STRATEGIES[name])
    plan = ap.plan(ap.Batch.from_lengths(lengths), cluster(ranks), MODEL, recipe, verify=False)
    return "\n".join(line for line in plan.text().split("\n") if not line.startswith("id "))


def broken(name: str, phase: str, old: str, new: str) -> str:
    """The plan with the first occurrence of a text in rank 2's program replaced."""
    before, section = good(name).split("\nrank 2\n")
    section, after = section.split("\nrank 3\n")
    head, forward, backward = section.split("\nprogram default ")
    part = forward if phase == "forward" else backward
    assert old in part, part
    part = part.replace(old, new, 1)
    parts = (head, part, backward) if phase == "forward" else (head, forward, part)
    return f"{before}\nrank 2\n" + "\nprogram default ".join(parts) + f"\nrank 3\n{after}"


def later(wait: str, line: str) -> tuple[str, str]:
    """The edit that moves a wait after the lines that need it."""
    return f"  {wait}\n  {line}\n", f"  {line}\n  {wait}\n"


def earlier(moved_line: str, *lines: str) -> tuple[str, str]:
    """The edit that moves a line before its preceding lines."""
    return "".join(f"  {line}\n" for line in (*lines, moved_line)), "".join(
        f"  {line}\n" for line in (moved_line, *lines)
    )


# broken part -> strategy, phase, edit, the violated rule, words of its message
CASES = {
    "ring: own rows sent on": (
        "ring",
        "forward",
        ("launch 3: send KV.work[0:8) to 3", "launch 3: send KV.home[0:8) to 3"),
        "coverage",
        "forbidden pairs",
    ),
    "ring: rows sent on before they arrived": (
        "ring",
        "forward",
        later("wait 2", "launch 3: send KV.work[0:8) to 3, receive KV.work[8:16) from 1"),
        "dataflow",
        "pending receive",
    ),
    "ring: no wait": ("ring", "forward", ("  wait 3\n", ""), "transfers", "wait"),
    "ring: gradient rows left out": (
        "ring",
        "backward",
        ("  add dKV.work[8:14) -> dKV.work[16:22)\n", ""),
        "delivery",
        "has not reached its home",
    ),
    "ring: gradient sent on without its sum": (
        "ring",
        "backward",
        ("send dKV.work[16:22) to 3", "send dKV.work[8:14) to 3"),
        "delivery",
        "merged, added or sent before",
    ),
    "ring: gradient added twice": (
        "ring",
        "backward",
        ("add dKV.work[0:8) -> dKV.home[0:8)", "add" + ",".join([" dKV.work[0:8) -> dKV.home[0:8)"] * 2)),
        "delivery",
        "merged, added or sent before",
    ),
    "ring: sum into other rows": (
        "ring",
        "backward",
        ("add dKV.work[0:8) -> dKV.work[8:16)", "add dKV.work[0:8) -> dKV.home[0:8)"),
        "delivery",
        "adds tokens",
    ),
    "node: other rows relayed": (
        "node",
        "forward",
        ("send KV.work[0:5) to 3", "send KV.work[5:10) to 3"),
        "coverage",
        "pairs",
    ),
    "node: relayed before it arrived": (
        "node",
        "backward",
        earlier(
            "launch 2 channel 1: send KV.work[0:5) to 3, receive KV.work[20:25) from 3",
            "wait 0",
            "attend_grad Q.home[0:10) KV.work[0:5) dO.home[0:10) delta.home[0:10)"
            " -> dQ.home[0:10) dKV.work[0:5) full first_dkv, "
            "Q.home[5:10) KV.work[5:10) dO.home[5:10) delta.home[5:10)"
            " -> dQ.home[5:10) dKV.work[5:10) full first_dkv",
        ),
        "dataflow",
        "pending",
    ),
    "node: no wait": ("node", "backward", ("  wait 4\n", ""), "transfers", "wait"),
    "node: a branch left out of the reduction": (
        "node",
        "backward",
        ("  add dKV.work[30:35) -> dKV.work[0:5)\n", ""),
        "delivery",
        "has not reached its home",
    ),
    "node: a branch added before it arrived": (
        "node",
        "backward",
        later("wait 4", "add dKV.work[30:35) -> dKV.work[0:5)"),
        "dataflow",
        "pending",
    ),
    "node: a branch added twice": (
        "node",
        "backward",
        ("add dKV.work[30:35) -> dKV.work[0:5)", "add" + ",".join([" dKV.work[30:35) -> dKV.work[0:5)"] * 2)),
        "delivery",
        "merged, added or sent before",
    ),
    "ulysses: heads of another rank sent": (
        "ulysses",
        "forward",
        ("send Q.home[0:20).h4 to 3", "send Q.home[0:20).h1 to 3"),
        "transfers",
        "head set",
    ),
    "ulysses: heads of another rank kept": (
        "ulysses",
        "forward",
        ("copy Q.home[0:20).h3 -> Q.work[40:60).h3", "copy Q.home[0:20).h4 -> Q.work[40:60).h4"),
        "dataflow",
        "but they hold heads of set",
    ),
    "ulysses: keys of another head": (
        "ulysses",
        "forward",
        ("Q.work[0:40).h3 KV.work[0:40).h2", "Q.work[0:40).h3 KV.work[0:40).h1"),
        "heads",
        "head",
    ),
    "ulysses: own output left out": (
        "ulysses",
        "forward",
        ("  deliver O.work[40:60).h3 -> O.home[0:20).h3 first\n", ""),
        "results",
        "receive results in 3 of 4 heads",
    ),
    "ulysses: no wait": ("ulysses", "backward", ("  wait 1\n", ""), "transfers", "wait"),
    "ulysses: own gradient left out": (
        "ulysses",
        "backward",
        ("add dKV.work[40:60).h2 -> dKV.home[0:20).h2, ", "add "),
        "delivery",
        "never reaches its home",
    ),
    "ulysses: a head's gradient added twice": (
        "ulysses",
        "backward",
        (
            "dKV.work[101:121).h1 -> dKV",
            "dKV.work[101:121).h1 -> dKV.home[0:20).h1, dKV.work[101:121).h1 -> dKV",
        ),
        "delivery",
        "merged, added or sent before",
    ),
}


def case(name: str) -> str:
    strategy, phase, edit, _, _ = CASES[name]
    return broken(strategy, phase, *edit)


def first(plan: Plan) -> Violation:
    violations = check(plan)
    assert violations
    return violations[0]


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_verifies(name: str) -> None:
    recipe = ap.Recipe(name, STRATEGIES[name])
    for lengths in ([40, 24, 17], [64], [3, 50, 9, 31]):
        batch = ap.Batch.from_lengths(lengths)
        policy = ap.Policy(recipe, token_cap=batch.tokens)
        assert check(ap.plan(batch, cluster(8 if "inner" not in name else 4), MODEL, policy=policy)) == ()


@pytest.mark.parametrize("name", CASES)
def test_a_broken_plan_is_refused_by_the_right_rule(name: str) -> None:
    *_, rule, words = CASES[name]
    violation = first(parse(case(name)))
    assert violation.rule == rule, str(violation)
    assert any(word in violation.message for word in words.split("|")), str(violation)


def test_coverage_is_judged_even_if_no_task_has_known_tokens() -> None:
    """If every read of a program fails, coverage has nothing to list by head."""
    plan = good("ulysses").replace("Q.home", "O.home").replace("KV.home", "O.home")
    assert check(parse(plan))
    lines = [
        line for line in good("ulysses").split("\n") if not line.startswith(("  copy", "  launch", "  wait"))
    ]
    assert first(parse("\n".join(lines))).rule == "dataflow"
